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
import tempfile
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
        row |= {"released": "error", "fixed": "error", "why": f"{type(error).__name__}: {error}".splitlines()[0]}
        return row | {"as_expected": False}
    row |= {"released": released.outcome, "fixed": fixed.outcome}
    if released.outcome == "not-applicable":
        row["why"] = released.message
    # Where nobody has fixed it yet, it is as it was; but where another bug ended it before, and that one is fixed.
    good = ("clean", "not-applicable") if scenario.fixes else (expected,)
    as_expected = released.outcome == expected and (fixed.outcome in good or bool(not scenario.fixes and released.also))
    return row | {"as_expected": as_expected}


def _child(folder: str, limit: int, answer_to: int, said_to: int) -> None:
    signal.alarm(limit)
    os.dup2(said_to, 1)
    os.dup2(said_to, 2)
    try:
        runner.prepare(folder)
        answer: dict[str, Any] = {"outcomes": [_play(scenario) for scenario in scenarios()]}
    except BaseException as error:  # noqa: BLE001
        answer = {"why": f"{type(error).__name__}: {error}".splitlines()[0]}
    with os.fdopen(answer_to, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


def main(limit: int) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM prints while it is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    import vllm.v1.core.sched.scheduler  # noqa: F401

    torch.set_num_threads(1)  # a fork has none of the threads that its parent has started
    with os.fdopen(answers, "w") as out:
        for line in sys.stdin:
            read, write = os.pipe()
            with tempfile.TemporaryFile() as said:
                pid = os.fork()
                if pid == 0:
                    os.close(read)
                    _child(line.strip(), limit, write, said.fileno())
                os.close(write)
                with os.fdopen(read) as pipe:
                    text = pipe.read()
                _, status = os.waitpid(pid, 0)
            ended = f"not done after {limit} s" if os.WTERMSIG(status) == signal.SIGALRM else f"ended with {status}"
            answer = json.loads(text) if text else {"why": ended}
            print(json.dumps({"python": platform.python_version(), **answer}), file=out, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
