"""For `make matrix`: play all scenarios with the vLLM of this environment and several LMCache releases.

    python -m maintain.scenario_matrix_process LIMIT FOLDER...

Each folder contains one LMCache release. This process imports vLLM once, plays all scenarios with each release in a
fork, and prints one line of JSON per release. LIMIT: maximum seconds for the import of vLLM, and for each release.
"""

import json
import multiprocessing
import os
import platform
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from kvfix_tools.lab import runner
from kvfix_tools.lab.scenario import Scenario, scenarios


def play(scenario: Scenario) -> dict[str, Any]:
    """Return the outcomes without and with the fixes. `as_expected` is true if both outcomes are the expected ones."""
    expected = runner.expected(scenario)
    row: dict[str, Any] = {"scenario": scenario.slug, "expected": expected}
    try:
        released, fixed = runner.play(scenario, False), runner.play(scenario, True)
    except Exception as error:  # noqa: BLE001  the row reports any error of the lab with this pair
        row |= {"released": "error", "fixed": "error", "why": first_line(error)}
        return row | {"as_expected": False}
    row |= {"released": released.outcome, "fixed": fixed.outcome}
    if released.outcome == "not-applicable":
        row["why"] = released.message
    # If no fix belongs to the scenario, both outcomes must be equal. The outcomes may differ only if another bug, which
    # kvfix fixes, ends the scenario early in the run without fixes.
    good = ("clean", "not-applicable") if scenario.fixes else (expected,)
    as_expected = released.outcome == expected and (fixed.outcome in good or bool(not scenario.fixes and released.also))
    return row | {"as_expected": as_expected}


def play_all(folder: str, answer: Connection) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        runner.prepare(folder)
        answer.send({"outcomes": [play(scenario) for scenario in scenarios()]})
    except BaseException as error:  # noqa: BLE001
        answer.send({"why": first_line(error)})
    os._exit(0)  # threads of LMCache may never end


def in_fork(folder: str, limit: int) -> dict[str, Any]:
    fork = multiprocessing.get_context("fork")
    answer, to_parent = fork.Pipe(duplex=False)
    process = fork.Process(target=play_all, args=(folder, to_parent))
    process.start()
    to_parent.close()
    try:
        if answer.poll(limit):
            return dict(answer.recv())
        return {"why": f"not done after {limit} s"}
    except EOFError:
        process.join()
        return {"why": f"the process ended, status {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def main(limit: int, folders: list[str]) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM prints while it is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    failed = ""
    signal.alarm(limit)
    try:
        import torch
        import vllm.v1.core.sched.scheduler  # noqa: F401

        torch.set_num_threads(1)  # a fork does not have the threads of its parent
    except Exception as error:  # noqa: BLE001  an old vLLM may raise any error with newer packages
        failed = first_line(error)
    signal.alarm(0)
    with os.fdopen(answers, "w") as out:
        for folder in folders:
            answer = {"why": failed} if failed else in_fork(folder, limit)
            print(json.dumps({"python": platform.python_version(), **answer}), file=out, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
