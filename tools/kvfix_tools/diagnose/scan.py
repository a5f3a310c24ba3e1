"""Blocks of log text to hits. Only lines that hold a needle of the grammar are looked at.

A hit is a plain tuple, since there are many and they cross processes: (number of the line in the block, seconds or
None, process or "", name of the message, its fields, the message's text).
"""

from __future__ import annotations

import calendar
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Union

from kvfix_tools.diagnose import grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Fields = dict[str, Union[int, str]]  # noqa: UP007
Hit = tuple[int, "float | None", str, str, Fields, bytes]

#: Longer ones are looked at in pieces.
LONGEST_LINE = 1 << 16
_ANSI = rb"\x1b?\[[0-9;]*m"
#: `[2026-11-21 01:41:27,007] LMCache INFO:`, the same in 0.3.1 to 0.5.6; pasted logs lose the escape character.
_FRAME = re.compile(
    rb"\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3})\] LMCache (DEBUG|INFO|WARNING|ERROR|CRITICAL):(?:"
    + _ANSI
    + rb")? ?"
)
#: ` (vllm_v1_adapter.py:1476:lmcache.integration.vllm.vllm_v1_adapter)`
_TRAILER = re.compile(rb" ?(?:" + _ANSI + rb")?\(([\w]+\.py):(\d+):([\w.]+)\)(?:" + _ANSI + rb")?\s*$")
_COLOURS = re.compile(_ANSI)
#: Lists of token ids stand in dumps of requests; they are a prompt.
_TOKEN_IDS = re.compile(r"\d+(?:, ?\d+){7,}")
#: `ERROR 12-03 01:24:36 [core.py:844] `, and whose it is: `(EngineCore_DP0 pid=7703) `, `(VllmWorker rank=0 pid=31) `.
_VLLM = re.compile(
    rb"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d)-(\d\d) (\d\d:\d\d:\d\d)(?:\.\d+)? \[[^\]\s]*:\d+\] ?"
)
_PROCESS = re.compile(rb"\((\w+)(?: rank=(\d+))?[^()\n]{0,40}? ?pid=(\d+)\)")

_OTHER_NEEDLES = [needle for needle in grammar.NEEDLES if b"LMCache" not in needle]
_BY_HEAD: dict[bytes, list[grammar.Message]] = {}
_ANYWHERE = [message for message in grammar.MESSAGES if message.source != "raised"]
_RAISED = [message for message in grammar.MESSAGES if message.source == "raised"]
for _known in grammar.MESSAGES:
    for _start in _known.starts:
        _BY_HEAD.setdefault(_start[:4], []).append(_known)


def hits(block: bytes, find: Callable[[bytes], Iterator[tuple[int, int]]] | None = None) -> list[Hit]:
    """Every line of the block that means something, in order. `find` gives the spans of lines to look at."""
    found: list[Hit] = []
    number, counted = 0, 0
    for start, end in (find or spans)(block):
        number += block.count(b"\n", counted, start)
        counted = start
        line = block[start : min(end, start + LONGEST_LINE)]
        _read(line, number, found)
    return found


def spans(block: bytes) -> Iterator[tuple[int, int]]:
    """(start, end) of the lines that hold a needle, in order: the standard library's way."""
    lines: dict[int, int] = {}
    size = len(block)
    for needle in grammar.NEEDLES:
        at = block.find(needle)
        while at >= 0:
            start = block.rfind(b"\n", 0, at) + 1
            end = block.find(b"\n", at)
            lines[start] = end = end if end >= 0 else size
            at = block.find(needle, end)
    return iter(sorted(lines.items()))


def _read(line: bytes, number: int, found: list[Hit]) -> None:
    frame = _FRAME.search(line)
    if frame is None:
        _read_unframed(line, number, found)
        return
    body = line[frame.end() :]
    for message in _BY_HEAD.get(body[:4], ()):
        if message.literal in body:
            match = message.pattern.match(body)
            if match is not None:
                process = _process(line[: frame.start()]) if frame.start() > 12 else ""
                fields = _fields(message, match)
                found.append((number, _seconds(frame[1], frame[2]), process, message.name, fields, body))
                break
    if frame.start() > 12 and any(needle in line[: frame.start()] for needle in _OTHER_NEEDLES):
        _read_unframed(line[: frame.start()], number, found)
    if b"] LMCache " in body:  # two lines glued together
        _read(body, number, found)


def _read_unframed(line: bytes, number: int, found: list[Hit]) -> None:
    """A line of vLLM, of a traceback, or one that has lost its beginning."""
    if b"\x1b" in line or b"[0" in line:
        line = _COLOURS.sub(b"", line)
    when: float | None = None
    process = _process(line)
    head = _VLLM.search(line)
    if head is not None:
        when = _seconds(b"%s-%s %s" % (head[1], head[2], head[3]), b"0")
    body = line if head is None else line[head.end() :]
    if head is None and process:
        body = line[line.find(b"pid=") :].partition(b") ")[2] or line
    for message in _ANYWHERE:
        if message.literal in line:
            match = message.pattern.search(body) or message.pattern.search(line)
            if match is not None:
                found.append((number, when, process, message.name, _fields(message, match), body))
                return


def _fields(message: grammar.Message, match: re.Match[bytes]) -> Fields:
    numbers = message.numbers
    fields: Fields = {}
    for name, value in match.groupdict().items():
        if value is not None:
            # 18 digits: int() of a very long one is refused by Python, and no count is that long.
            fields[name] = int(value[:18]) if name in numbers else value.decode("utf-8", "replace")
    return fields


def raised(text: str) -> tuple[str, Fields] | None:
    """What an exception's text means: name of the message and its fields."""
    line = text.encode()
    for message in _RAISED:
        match = message.pattern.search(line) if message.literal in line else None
        if match is not None:
            return message.name, _fields(message, match)
    return None


@lru_cache(maxsize=4096)
def _process_of(name: bytes, rank: bytes | None, pid: bytes) -> str:
    return f"{name.decode('ascii', 'replace')}{'' if rank is None else '_' + rank.decode()} pid={pid.decode()}"


def _process(prefix: bytes) -> str:
    if b"pid=" not in prefix:
        return ""
    match = None
    for match in _PROCESS.finditer(prefix):  # noqa: B007  the last one: what stands before it is another line's end
        pass
    return "" if match is None else _process_of(match[1], match[2], match[3])


@lru_cache(maxsize=1024)
def _second(stamp: bytes) -> float | None:
    """Seconds since 1970 as if the clock of the log were UTC. vLLM gives no year: 1970 stands for it."""
    text = stamp.decode()
    try:
        if len(text) == 14:
            text = "1970-" + text
        parts = [int(part) for part in re.split(r"[- :]", text)]
        return float(calendar.timegm((*parts, 0, 0, 0)))
    except (ValueError, OverflowError):
        return None


def _seconds(stamp: bytes, milliseconds: bytes) -> float | None:
    second = _second(stamp)
    return None if second is None else second + int(milliseconds) / 1000


def trailer(body: bytes) -> tuple[str, int, str] | None:
    """(file, line, logger) of the statement that made this line."""
    match = _TRAILER.search(body)
    return (match[1].decode(), int(match[2]), match[3].decode()) if match else None


def text(body: bytes) -> str:
    """The message, without its trailer, colours and what could do harm in a terminal."""
    shown = _COLOURS.sub(b"", _TRAILER.sub(b"", body[:4000])).decode("utf-8", "replace")
    shown = _TOKEN_IDS.sub("<numbers left out>", shown)
    return "".join(sign if sign.isprintable() else " " for sign in shown).strip()[:600]
