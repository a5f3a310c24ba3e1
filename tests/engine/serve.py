"""A user's program: apply kvfix, start vLLM, generate. Run as `python serve.py JOB.json`; it writes the job's `out`.

The job has these fields:

- `apply`: mode, or None; `transfer`; `engine`: arguments of LLM; `rounds`: requests of each round; `spoil`
- optional, numbers of rounds: `spoil_from`; `abort_before`: abort `waiting` of `abort` then, behind its `running`

A request is a prompt, and the number of tokens to generate. This file has all that a user does with kvfix, and only in
the parent process.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from kvfix_tools.roundtrip import real_engine


def main(job: dict[str, Any]) -> None:
    if job["apply"]:
        import kvfix

        kvfix.apply(job["apply"])
    llm = real_engine.make(Path(job["model"]), job["transfer"], **job["engine"])
    rounds: list[list[list[int]]] = []
    for number, requests in enumerate(job["rounds"]):
        if number == job.get("abort_before"):
            abort_waiting(llm.llm_engine, job["abort"])
        if number == job.get("spoil_from"):
            Path(job["spoil"]).touch()
        rounds.append(real_engine.generate(llm, requests))
    ask_for_recorders(Path(os.environ["KVFIX_DUMP_DIR"]))
    answer = {"rounds": rounds, "preemptions": real_engine.counter(llm, "vllm:num_preemptions")}
    Path(job["out"]).write_text(json.dumps(answer))


def ask_for_recorders(folder: Path) -> None:
    """As `kvfix dump` does: vLLM kills its processes at the end, and they would leave nothing."""
    ready = [int(path.stem.rpartition("-")[2]) for path in folder.rglob("*.ready")]
    for pid in ready:
        os.kill(pid, signal.SIGUSR2)
    until = time.monotonic() + 30
    while len(list(folder.rglob("*-signal.jsonl"))) < len(ready) and time.monotonic() < until:
        time.sleep(0.05)


def abort_waiting(engine: Any, job: dict[str, Any]) -> None:
    """One request runs, another waits behind it and is aborted; the first one runs to its end."""
    for name in ("running", "waiting"):
        prompt, tokens = job[name]
        engine.add_request(name, {"prompt_token_ids": prompt}, real_engine.greedy(tokens))
        for _ in range(4):
            engine.step()
    engine.abort_request(["waiting"])
    while engine.has_unfinished_requests():
        engine.step()


if __name__ == "__main__":
    import job

    job.run(main, engine_is_here=os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0")
