"""Plays all scenarios under this environment's vLLM with one LMCache release after the other, for `make matrix`.

A line on stdin is a folder with an LMCache release; the answer is a line of JSON on stdout. vLLM is imported once, and
each release is played in a fork of this process, since one process holds one release.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from typing import Any

from kvfix_tools.lab import runner
from kvfix_tools.lab.scenario import Scenario, scenarios


def _play(scenario: Scenario) -> dict[str, Any]:
    """Outcomes as released and with fixes, and whether both are as they must be."""
    expected = runner.expected(scenario)
    row: dict[str, Any] = {"scenario": scenario.slug, "expected": expected}
    try:
        released, fixed = runner.play(scenario, False), runner.play(scenario, True)
    except Exception as error:  # noqa: BLE001  whatever the lab does under this pair is what is to be written down
        row |= {"released": "error", "fixed": "error", "why": _line(error)}
        return row | {"as_expected": False}
    row |= {"released": released.outcome, "fixed": fixed.outcome}
    if released.outcome == "not-applicable":
        row["why"] = released.message
    # Where nobody has fixed it yet, it is as it was; but where another bug ended it before, and that one is fixed.
    good = ("clean", "not-applicable") if scenario.fixes else (expected,)
    as_expected = released.outcome == expected and (fixed.outcome in good or bool(not scenario.fixes and released.also))
    return row | {"as_expected": as_expected}


def _child(folder: str, limit: int, answer_to: int) -> None:
    signal.alarm(limit)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        runner.prepare(folder)
        answer: dict[str, Any] = {"outcomes": [_play(scenario) for scenario in scenarios()]}
    except BaseException as error:  # noqa: BLE001
        answer = {"why": _line(error)}
    with os.fdopen(answer_to, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


def _in_fork(folder: str, limit: int) -> dict[str, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _child(folder, limit, write)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if text:
        return dict(json.loads(text))
    timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    return {"why": f"not done after {limit} s" if timed_out else f"the process ended, status {status}"}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def main(limit: int) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM prints while it is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    failed = ""
    try:
        import torch
        import vllm.v1.core.sched.scheduler  # noqa: F401

        torch.set_num_threads(1)  # a fork has none of the threads that its parent has started
    except Exception as error:  # noqa: BLE001  an old vLLM among new packages may fail in any way
        failed = _line(error)
    with os.fdopen(answers, "w") as out:
        for line in sys.stdin:
            answer = {"why": failed} if failed else _in_fork(line.strip(), limit)
            print(json.dumps({"python": platform.python_version(), **answer}), file=out, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
