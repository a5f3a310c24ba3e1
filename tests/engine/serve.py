"""A user's program: apply kvfix, start vLLM, generate. Run as `python serve.py JOB.json`; it writes the job's `out`.

The job has these fields:

- `apply`: mode, or None; `transfer`; `engine`: arguments of LLM; `rounds`: requests of each round; `spoil`
- optional: `config` of the model, `counters` of vLLM to return, `l2` of l2.py

These optional fields are numbers of rounds:

- `apply_before`: call kvfix.apply() then, for an engine in this process
- `abort_before`: abort requests then. `abort`: requests `running` and `waiting`, `extra_args` of the latter, `steps`
- `spoil_from`; `mix_before`: of the L2
- `l2_before`: empty L1, so that all chunks come from the L2
- `one_by_one_in`: each request has a higher priority than the last one, whose load has begun

A request is a prompt, and the number of tokens to generate. A number as the prompt means that request of the previous
round, with its answer. This file has all that a user does with kvfix, and only in the parent process.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import l2

from kvfix_tools.roundtrip import real_engine


def main(job: dict[str, Any]) -> None:
    if job["apply"]:
        import kvfix

        kvfix.apply(job["apply"])
    llm = real_engine.make(Path(job["model"]), job["transfer"], config=job.get("config"), **job["engine"])
    rounds: list[list[list[int]]] = []
    requests: list[tuple[list[int], int]] = []
    preempted: list[int] = []
    for number, asked in enumerate(job["rounds"]):
        requests = [(continued(each, requests, rounds), tokens) for each, tokens in asked]
        if number == job.get("apply_before"):
            import kvfix

            kvfix.apply()
        if number == job.get("abort_before"):
            abort_waiting(llm.llm_engine, job["abort"])
        if number == job.get("spoil_from"):
            Path(job["spoil"]).touch()
        if number in job.get("l2_before", ()):
            l2.empty_l1(job["l2"])
        if number == job.get("mix_before"):
            l2.mix(job["l2"])
        if number == job.get("one_by_one_in"):
            one_by_one(llm.llm_engine, requests, Path(job["spoil"]))
        rounds.append(real_engine.generate(llm, requests))
        preempted.append(real_engine.counter(llm, "vllm:num_preemptions") - sum(preempted))
    ask_for_recorders(Path(os.environ["KVFIX_DUMP_DIR"]))
    counters = {name: real_engine.counter(llm, name) for name in job.get("counters", ())}
    answer = {"rounds": rounds, "preempted": preempted, "preemptions": sum(preempted), "counters": counters}
    Path(job["out"]).write_text(json.dumps(answer))


def continued(
    prompt: list[int] | int, requests: list[tuple[list[int], int]], rounds: list[list[list[int]]]
) -> list[int]:
    return [*requests[prompt][0], *rounds[-1][prompt]] if isinstance(prompt, int) else prompt


def ask_for_recorders(folder: Path) -> None:
    """As `kvfix dump` does: vLLM kills its processes at the end, and they would leave nothing."""
    ready = [int(path.stem.rpartition("-")[2]) for path in folder.rglob("*.ready")]
    for pid in ready:
        os.kill(pid, signal.SIGUSR2)
    until = time.monotonic() + 30
    while len(list(folder.rglob("*-signal.jsonl"))) < len(ready) and time.monotonic() < until:
        time.sleep(0.05)


def abort_waiting(engine: Any, job: dict[str, Any]) -> None:
    """One request runs, another waits behind it and is aborted; the first one runs to its end.

    `steps` of each are between these. An engine in another process does not wait for this one: there steps are 0, and
    the plugin holds the engine until the abort is there (`abort_comes_first` of kvfix_engine_hangs.py).
    """

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


def one_by_one(engine: Any, requests: list[tuple[list[int], int]], spoil: Path) -> None:
    """Read the begun loads from the file next to `spoil` (plugin/kvfix_engine_hangs.py)."""
    for number, (prompt, tokens) in enumerate(requests, 1):
        more = {"priority": len(requests) - number}
        engine.add_request(f"r{number}", {"prompt_token_ids": prompt}, real_engine.greedy(tokens), **more)
        while not spoil.with_suffix(f".{number}").exists():
            time.sleep(0.01)
    while engine.has_unfinished_requests():
        engine.step()


if __name__ == "__main__":
    import job

    job.run(main, engine_is_here=os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0")
