"""A format file for lnav, from the same grammar: `python -m kvfix_tools.diagnose.lnav > kvfix.lnav.json`.

    lnav -i kvfix.lnav.json

lnav merges many files by time, filters, and searches with SQL; with this it knows LMCache's and vLLM's lines, their
levels, and the request they speak of. Its `sample` lines are checked by lnav itself when it loads the file.
"""

from __future__ import annotations

import json
from typing import Any

from kvfix_tools.diagnose import statements

_ID = r"(?:Reqid: |\[req_id=|for request |request_id=|Request |<resume-load> req=)(?<request>[^\s,:()\]]+)"
_LMCACHE = (
    r"^(?<process>\([^)]*pid=\d+\) )?\[(?<timestamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\] LMCache (?<level>\w+): "
    r"(?<body>(?:(?!" + _ID.replace("(?<request>", "(?:") + r").)*(?:" + _ID + r")?.*?)"
    r"(?: \((?<file>\w+\.py):(?<line>\d+):(?<logger>[\w.]+)\))?\s*$"
)
_VLLM = (
    r"^(?<process>\([^)]*pid=\d+\) )?(?<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"(?<timestamp>\d\d-\d\d \d\d:\d\d:\d\d) \[(?<file>[^\]:]+):(?<line>\d+)\] (?<body>.*)$"
)
_VLLM_LINES = [
    "(EngineCore_DP0 pid=276) ERROR 12-03 01:24:36 [core.py:844] EngineCore encountered a fatal error.",
    "INFO 12-03 01:24:36 [loggers.py:248] Engine 000: Avg prompt throughput: 0.0 tokens/s",
]
_LEVELS = {"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR", "critical": "CRITICAL"}


def format_file() -> dict[str, Any]:
    """The content of the file: one format, since lnav gives a file one and both write to the same.

    A sample for each statement of the newest release that has it.
    """
    field = {"kind": "string", "identifier": True}
    return {
        "$schema": "https://lnav.org/schemas/format-v1.schema.json",
        "kvfix": {
            "title": "vLLM with LMCache",
            "description": "LMCache 0.3.0 to 0.5.6, in vLLM's processes and in its server; vLLM 0.9 to 0.32",
            "regex": {"lmcache": {"pattern": _LMCACHE}, "vllm": {"pattern": _VLLM}},
            "level": _LEVELS,
            "timestamp-format": ["%Y-%m-%d %H:%M:%S,%L", "%m-%d %H:%M:%S"],
            "opid-field": "request",
            "value": {
                "process": field,
                "request": field,
                "file": field,
                "line": {"kind": "integer"},
                "logger": field,
            },
            "sample": [{"line": line} for line in [*samples(), *_VLLM_LINES]],
        },
    }


def samples() -> list[str]:
    """A line of each wording, as the newest release that has it prints it."""
    lines = []
    for row in statements.known()["lmcache"]:
        if row.level in _LEVELS:
            release = list(row.lines)[-1]
            at = f"{row.file}:{row.lines[release][0]}:lmcache.{row.file.removesuffix('.py')}"
            lines.append(
                f"[2026-11-21 01:41:27,007] LMCache {row.level.upper()}: {statements.sample(row.template)} ({at})"
            )
    return lines


if __name__ == "__main__":
    print(json.dumps(format_file(), indent=2))
