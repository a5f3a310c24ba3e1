"""Apply kvfix, start vLLM and generate tokens, as a user's program does: `python serve.py JOB.json`.

The JSON file has these fields:
- `out` is the file for the results. `apply` is the mode of kvfix, or None. `model` is the folder of the model.
- `transfer` is the kv_transfer_config. `engine` has the arguments of vLLM's class LLM.
- `rounds` has lists of requests that run together (a round). A request is (prompt, number of tokens to generate). A
  number N, in place of a prompt, stands for the prompt and the answer of request N in the previous round.
- `before` has a list of calls for each round number. The program makes the calls before the round. A call is a list.
  The list begins with the name of a function in this module. The function's arguments after `engine` follow.
- `config` (optional) has changes of the model. `counters` (optional) has the names of vLLM's counters to return.
- `calm`, `hard` and `flags` replace `rounds` (see `until_told()`).
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Container
from pathlib import Path
from typing import Any

import httpx

from kvfix_tools.roundtrip import real_engine

SPOIL = Path(os.environ.get("KVFIX_TEST_SPOIL", "/nonexistent"))


def main(job: dict[str, Any]) -> None:
    if job["apply"]:
        import kvfix

        kvfix.apply(job["apply"])
    llm = real_engine.make(Path(job["model"]), job["transfer"], config=job.get("config"), **job["engine"])
    if "flags" in job:
        Path(job["out"]).write_text(json.dumps(until_told(llm, job)))
        return
    rounds: list[list[list[int]]] = []
    requests: list[tuple[list[int], int]] = []
    preempted: list[int] = []
    for number, asked in enumerate(job["rounds"]):
        requests = [(continued(each, requests, rounds), tokens) for each, tokens in asked]
        for name, *arguments in job["before"].get(str(number), ()):
            globals()[name](llm.llm_engine, *arguments)
        rounds.append(real_engine.generate(llm, requests))
        preempted.append(real_engine.counter(llm, "vllm:num_preemptions") - sum(preempted))
    if "KVFIX_TEST_FAULTS" not in os.environ:  # with planted faults no process writes a recorder file
        recorders(Path(os.environ["KVFIX_DUMP_DIR"]), limit=30)
    counters = {name: real_engine.counter(llm, name) for name in job.get("counters", ())}
    answer = {"rounds": rounds, "preempted": preempted, "preemptions": sum(preempted), "counters": counters}
    Path(job["out"]).write_text(json.dumps(answer))


def until_told(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Run rounds until the folder `flags` has a file `stop`. While a file `hard` exists, send `hard`, else `calm`."""
    folder, rounds, preempted = Path(job["flags"]), list[tuple[str, list[list[int]]]](), 0
    while not (folder / "stop").exists():
        kind = "hard" if (folder / "hard").exists() else "calm"
        rounds.append((kind, real_engine.generate(llm, job[kind])))
        preempted = real_engine.counter(llm, "vllm:num_preemptions")
        print(f"{kind} round {len(rounds)} ended", flush=True)
    return {"rounds": rounds, "preemptions": preempted}


def continued(prompt: list[int] | int, asked: list[tuple[list[int], int]], rounds: list[list[list[int]]]) -> list[int]:
    return [*asked[prompt][0], *rounds[-1][prompt]] if isinstance(prompt, int) else prompt


def recorders(folder: Path, limit: float, among: Container[int] | None = None) -> list[Path]:
    """Make each process that has a file `*.ready` write a recorder file. among: PIDs (None: all). limit: in seconds."""
    pids = [int(path.stem.rpartition("-")[2]) for path in folder.rglob("*.ready")]
    ready, before = [pid for pid in pids if among is None or pid in among], set(folder.rglob("*-signal.jsonl"))
    for pid in ready:
        os.kill(pid, signal.SIGUSR2)
    until = time.monotonic() + limit
    while len(files := set(folder.rglob("*-signal.jsonl")) - before) < len(ready) and time.monotonic() < until:
        time.sleep(0.05)
    return sorted(files)


def apply(engine: Any) -> None:
    import kvfix

    kvfix.apply()


def spoil(engine: Any) -> None:
    SPOIL.touch()


def abort_waiting(engine: Any, job: dict[str, Any]) -> None:
    """Add request `running`, then add and abort request `waiting`. `steps` is 0 if EngineCore has its own process."""

    def add(name: str, **more: Any) -> None:
        prompt, tokens = job[name]
        engine.add_request(name, {"prompt_token_ids": prompt}, real_engine.greedy(tokens, **more))

    add("running")
    for _ in range(job["steps"]):
        engine.step()
    add("waiting", extra_args=job["extra_args"])
    for _ in range(job["steps"]):
        engine.step()
    engine.abort_request(["waiting"])
    while engine.has_unfinished_requests():
        engine.step()


def one_by_one(engine: Any, requests: list[tuple[list[int], int]]) -> None:
    """Add each request after the load of the previous request has begun. A later request has a higher priority."""
    for number, (prompt, tokens) in enumerate(requests, 1):
        more = {"priority": len(requests) - number}
        engine.add_request(f"r{number}", {"prompt_token_ids": prompt}, real_engine.greedy(tokens), **more)
        while not SPOIL.with_suffix(f".{number}").exists():
            time.sleep(0.01)
    while engine.has_unfinished_requests():
        engine.step()


def empty_l1(engine: Any, server: str) -> None:
    """Empty the L1 of the `lmcache server` at this URL. Later hits come from the server's L2, which has all chunks."""

    def status() -> dict[str, Any]:
        return dict(httpx.get(f"{server}/status", timeout=10).json()["storage_manager"])

    idle, until = 0, time.monotonic() + 60
    while idle < 3:  # both counts can briefly be 0 while the server begins to store a key
        assert time.monotonic() < until, "the L2 still stores"
        stores = status()["store_controller"]
        idle = 0 if stores["pending_keys_count"] or stores["in_flight_task_count"] else idle + 1
        time.sleep(0.05)  # the server sends no event, so ask again
    while objects := status()["l1_manager"]["total_object_count"]:
        assert time.monotonic() < until, f"the L1 still has {objects} objects"
        httpx.post(f"{server}/cache/clear", json={}, timeout=10).raise_for_status()


def mix_l2(engine: Any, folder: str) -> None:
    """Exchange the bytes of equally large chunks in this folder of the L2. Hits from the L2 then change the answers."""
    by_size: dict[int, list[Path]] = {}
    for file in sorted(Path(folder).glob("*.data")):
        by_size.setdefault(file.stat().st_size, []).append(file)
    for files in by_size.values():
        contents = [file.read_bytes() for file in files]
        for file, content in zip(files, contents[1:] + contents[:1], strict=True):
            file.write_bytes(content)


if __name__ == "__main__":
    try:
        main(json.loads(Path(sys.argv[1]).read_text()))
    finally:
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":  # LMCache's threads in this process never end
            if sys.exc_info()[0]:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
