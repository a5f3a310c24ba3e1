"""Blocks of log text to lines that mean something. Only those that hold a needle of the grammar are read."""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterator
from functools import lru_cache

from kvfix_tools.diagnose import grammar
from kvfix_tools.diagnose.log_line import ANSI, Fields, LogLine, without_colours, without_tokens

#: Name of a line that stands for all lines of a block at DEBUG, whatever they say: the log's level hides nothing.
DEBUG = "debug"
#: Bytes of a line that are read, and of a message that are kept for evidence.
LONGEST_LINE, _LONGEST_BODY = 1 << 16, 1 << 14
NEEDLE = re.compile(b"|".join(re.escape(needle) for needle in grammar.NEEDLES))
#: `[2026-11-21 01:41:27,007] LMCache INFO: `, the same in 0.3.0 to 0.5.6.
_FRAME = b"] LMCache "
_LEVEL = re.compile(rb"\] LMCache [A-Z]{4,8}:(?:" + ANSI + rb")? ?")
_STAMP = len(b"2026-11-21 01:41:27,007")
#: `ERROR 12-03 01:24:36 [core.py:844] `, and whose it is: `(EngineCore_DP0 pid=7703) `, `(VllmWorker rank=0 pid=31) `.
_VLLM = re.compile(rb"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]\s]*:\d+\] ?")
_PROCESS = re.compile(rb"\((\w+)(?: rank=(\d+))?[^()\n]{0,40}? ?pid=(\d+)\)")

#: LMCache's messages by the first bytes of their bodies.
_BY_HEAD: dict[bytes, list[grammar.Message]] = {}
for _message in grammar.MESSAGES:
    for _start in _message.starts:
        _BY_HEAD.setdefault(_start[:4], []).append(_message)
_ANYWHERE = [message for message in grammar.MESSAGES if message.source != "raised"]
_RAISED = [message for message in grammar.MESSAGES if message.source == "raised"]


def scan(block: bytes, file: str = "log", first: int = 1) -> Iterator[LogLine]:
    """Every line of the block that means something, in order. first: number of the block's first line in the file."""
    debug = False
    for number, text in enumerate(block.split(b"\n"), first):
        if NEEDLE.search(text) is None:
            continue
        text = text[:LONGEST_LINE]
        if not debug and b" LMCache DEBUG:" in text:
            debug = True
            yield LogLine(DEBUG, {}, None, "", file, number, b"")
        for message, match, stamp, process, body in _messages(text):
            fields = _fields(message, match)
            yield LogLine(message.name, fields, seconds(stamp), process, file, number, body[:_LONGEST_BODY])


_Match = tuple[grammar.Message, "re.Match[bytes]", bytes, str, bytes]


def _messages(text: bytes) -> Iterator[_Match]:
    """(message, its match, the time as it stands there or b"", process or "", body). Lines may be glued together.

    vLLM's own lines have a time without a year, which is not read.
    """
    while True:
        start = text.find(_FRAME)
        level = _LEVEL.match(text, start) if start >= 0 else None
        if level is None:
            yield from _unframed(text)
            return
        at = level.end()
        for message in _BY_HEAD.get(text[at : at + 4], ()):
            match = message.pattern.match(text, at)
            if match is not None:
                yield message, match, text[max(0, start - _STAMP) : start], _process(text[:start]), text[at:]
                break
        if NEEDLE.search(text, 0, start):
            yield from _unframed(text[:start])
        again = text.find(_FRAME, at)
        if again < 0 or not _LEVEL.match(text, again):
            return
        text = text[at:]


def _unframed(text: bytes) -> Iterator[_Match]:
    """A line of vLLM, of a traceback, or one that has lost its beginning."""
    if b"\x1b" in text or b"[0" in text:
        text = without_colours(text)
    process = _process(text)
    head = _VLLM.search(text)
    body = text
    if head is not None:
        body = text[head.end() :]
    elif process:
        body = text[text.find(b"pid=") :].partition(b") ")[2] or text
    for message in _ANYWHERE:
        if message.literal in text:
            match = message.pattern.search(body) or message.pattern.search(text)
            if match is not None:
                yield message, match, b"", process, body
                return


def _fields(message: grammar.Message, match: re.Match[bytes]) -> Fields:
    """{field: count or text}"""
    return {
        field: int(value) if count else without_tokens(value.decode("utf-8", "replace"))
        for (field, count), value in zip(message.fields, match.groups(), strict=True)
        if value is not None
    }


def raised(text: str) -> tuple[str, Fields] | None:
    """What an exception's text means: name of the message and its fields."""
    line = text.encode()
    for message in _RAISED:
        match = message.pattern.search(line) if message.literal in line else None
        if match is not None:
            return message.name, _fields(message, match)
    return None


def _process(prefix: bytes) -> str:
    """Of the last process that is named there: what stands before it is another line's end."""
    if b"pid=" not in prefix:
        return ""
    named = _PROCESS.findall(prefix)
    if not named:
        return ""
    name, rank, pid = (part.decode("ascii", "replace") for part in named[-1])
    return f"{name}{'_' if rank else ''}{rank} pid={pid}"


def seconds(stamp: bytes) -> float | None:
    """`2026-11-21 01:41:27,007` as seconds since 1970, as if the log's clock were UTC; None: it is no time."""
    second = _second(stamp[:19]) if len(stamp) == _STAMP else None
    return second + int(stamp[20:]) / 1000 if second is not None and stamp[20:].isdigit() else second


@lru_cache(maxsize=1024)
def _second(stamp: bytes) -> float | None:
    try:
        year, month, day, hour, minute, second = map(int, re.split(rb"[- :]", stamp))
        return float(calendar.timegm((year, month, day, hour, minute, second, 0, 0, 0)))
    except (ValueError, OverflowError):
        return None
