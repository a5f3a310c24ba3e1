"""A log with a sign of a known problem, as the process of its code prints it."""

from __future__ import annotations

import re

from kvfix_tools.diagnose.problems import Problem
from kvfix_tools.diagnose.signs import Sign
from tests.diagnose.lines import CORE

LMCACHE = "[2026-11-21 01:41:27,007] LMCache {level}: {text} (any.py:7:lmcache.any)\n"
VLLM = "(EngineCore_DP0 pid=276) {level} 12-03 01:24:36 [any.py:7] {text}\n"
RAN = "INFO 12-03 01:24:31 [factory.py:64] Creating v1 connector with name: {} and\n"


def filled(text: str) -> str:
    return re.sub(r"<\w+>", "7", text)


def shown(problem: Problem, sign: Sign) -> str:
    """Its lines; where the record needs it, after the line that names the connector."""
    return (RAN.format(problem.connectors[0]) if problem.named else "") + _shown(problem, sign)


def _shown(problem: Problem, sign: Sign) -> str:
    if sign.form == "logged":
        frame = VLLM if "vllm" in problem.releases else LMCACHE
        return frame.format(level="ERROR", text=filled(sign.text))
    if sign.form == "stack":
        file, _, function = sign.within.rpartition(":")
        return f"Thread 4242 (active+gil)\n    {function} (lmcache/{file}:7)\n    run (threading.py:9)\n"
    if sign.form == "died":
        if not sign.within:
            text = filled(sign.text)
            return f"library.cpp:77: {text}: Assertion `held' failed.\n" if text.isidentifier() else f"ERROR {text}\n"
        file, _, function = ("", "", sign.within) if "::" in sign.within else sign.within.rpartition(":")
        return (
            f"Fatal Python error: {sign.text or 'Segmentation fault'}\n\n"
            "Current thread 0x00007f (most recent call first):\n"
            f'  File "/opt/app/{file or "any.py"}", line 7 in {function}\n'
            '  File "/opt/app/vllm/core.py", line 9 in run\n\n'
        )
    file, _, function = sign.within.rpartition(":")
    path = file or ("any.py" if problem.general else "lmcache/any.py")
    text = f": {filled(sign.text)}" if sign.text else ""
    caller = sign.through if sign.through.endswith(".py") else f"/{sign.through}/caller.py"
    lines = [
        "Traceback (most recent call last):",
        *([f'  File "/opt/app{caller}", line 5, in call', "    call()"] if sign.through else []),
        f'  File "/opt/app/{path}", line 7, in {function or "any"}',
        f"    {sign.source or 'call()'}",
        f"{sign.kind or 'RuntimeError'}{text}",
    ]
    return "".join(f"{CORE}{line}\n" for line in lines)
