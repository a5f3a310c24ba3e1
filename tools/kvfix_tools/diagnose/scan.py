"""Blocks of log text to hits. Only lines that hold a needle of the grammar are looked at.

A hit is a plain tuple, since there are many and they cross processes: (number of the line in the block, its time as it
stands there or b"", process or "", name of the message, the groups of its pattern, the message's text). Most are only
counted: `seconds` and `fields` are for those that are not.
"""

from __future__ import annotations

import calendar
import re
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Union

from kvfix import redact
from kvfix_tools.diagnose import grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Fields = dict[str, Union[int, str]]  # noqa: UP007
Groups = tuple["bytes | None", ...]
Hit = tuple[int, bytes, str, str, Groups, bytes]

#: Name of a hit that stands for all lines at DEBUG of a block: the log's level hides nothing.
DEBUG = "debug"
#: Of a message, for evidence.
_LONGEST_BODY = 1 << 14
#: Longer ones are looked at in pieces.
LONGEST_LINE = 1 << 16
#: Pasted logs lose the escape character; JSON (Docker's own files) spells it out.
_ANSI = rb"(?:\x1b|\\u001b)?\[[0-9;]*m"
#: `[2026-11-21 01:41:27,007] LMCache INFO: `, the same in 0.3.0 to 0.5.6.
_FRAME = b"] LMCache "
_LEVEL = re.compile(rb"\] LMCache [A-Z]{4,8}:(?:" + _ANSI + rb")? ?")
_STAMP = len(b"2026-11-21 01:41:27,007")
#: What stands in front of the bracket of a line that no process has signed: a colour and the time.
_SHORTEST = len(b"\x1b[32;20m[") + _STAMP
#: ` (vllm_v1_adapter.py:1476:lmcache.integration.vllm.vllm_v1_adapter)`
_TRAILER = re.compile(rb" ?(?:" + _ANSI + rb")?\(([\w]+\.py):(\d+):([\w.]+)\)(?:" + _ANSI + rb")?(?:\\n\x22.*|\s*)$")
_COLOURS = re.compile(_ANSI)
#: Lists of token ids stand in dumps of requests; they are a prompt.
_TOKEN_IDS = re.compile(r"\d+(?:, ?\d+){7,}")
#: `ERROR 12-03 01:24:36 [core.py:844] `, and whose it is: `(EngineCore_DP0 pid=7703) `, `(VllmWorker rank=0 pid=31) `.
_VLLM = re.compile(
    rb"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d)-(\d\d) (\d\d:\d\d:\d\d)(?:\.\d+)? \[[^\]\s]*:\d+\] ?"
)
_PROCESS = re.compile(rb"\((\w+)(?: rank=(\d+))?[^()\n]{0,40}? ?pid=(\d+)\)")

_BY_HEAD: dict[bytes, list[grammar.Message]] = {}
_ANYWHERE = [message for message in grammar.MESSAGES if message.source != "raised"]
_RAISED = [message for message in grammar.MESSAGES if message.source == "raised"]
for _known in grammar.MESSAGES:
    for _start in _known.starts:
        _BY_HEAD.setdefault(_start[:4], []).append(_known)

#: Kinds of lines that there are many of. One search finds them in a block, where whole lines are at hand.
_MANY = ("asked", "storing", "stored", "retrieved", "due", "mp_stored", "mp_retrieved", "mp_prefetched")


_WHOSE = rb"(?:\[req_id=([^\]\n]*)\] )?"


def _usual() -> tuple[re.Pattern[bytes], dict[int, tuple[str, tuple[int, ...]]]]:
    """One pattern for lines of these kinds that stand alone, and {its group: (name, the groups of its fields)}.

    Group 1 is where the body begins, group 2 whose line it is where that stands in front.
    """
    parts, places, group = [], {}, 3
    for message in grammar.MESSAGES:
        if message.name in _MANY:
            pattern = re.sub(rb"\(\?P<\w+>", b"(", message.pattern.pattern)
            shared = pattern.startswith(_WHOSE)
            own = tuple(range(group + 1, group + 1 + len(message.fields) - shared))
            places[group] = (message.name, (2, *own) if shared else own)
            group += 1 + len(own)
            parts.append(pattern.removeprefix(_WHOSE))
    head = rb"\] LMCache [A-Z]{4,8}:(?:" + _ANSI + rb")? ()" + _WHOSE
    return re.compile(head + rb"(?:(" + rb")|(".join(parts) + rb"))[^\n]{0,999}$", re.MULTILINE), places


_USUAL, _USUAL_PLACES = _usual()
_D = ord("D")


def hits(block: bytes, find: Callable[[bytes], Iterator[tuple[int, int]]] | None = None) -> list[Hit]:
    """Every line of the block that means something, in order. `find` gives the spans of lines to look at.

    Lines of which there are many are taken at one go, where they are whole. What is left of the block has as many
    lines, and is looked through for all the others.
    """
    found: list[Hit] = []
    rest: list[bytes] = []
    number, end, debug = 0, 0, False
    for match in _USUAL.finditer(block):
        start, ending = match.span()
        line = block.rfind(b"\n", end, start) + 1 or end
        stamp = block[max(line, start - _STAMP) : start]
        if len(stamp) < _STAMP or _second(stamp[:19]) is None or stamp[19:20] != b",":
            continue
        if block.find(_FRAME, start + 1, ending) >= 0:
            continue
        process = ""
        if start - line > _SHORTEST:
            prefix = block[line : start - _STAMP]
            if _FRAME in prefix:
                continue
            process = _process_before(prefix)
        between = block[end:start]  # whole lines, and what stands before this one's bracket
        rest.append(between)
        end = ending
        number += between.count(b"\n")
        if not debug and block[start + len(_FRAME)] == _D:
            debug = True
            found.append((number, b"", "", DEBUG, (), b""))
        name, places = _USUAL_PLACES[match.lastindex]  # type: ignore[index]
        found.append((number, stamp, process, name, match.group(*places), block[match.start(1) : end]))
    if not found:
        return _others(block, find or spans)
    rest.append(block[end:])
    others = _others(b"".join(rest), find or spans)
    if others:
        found += others
        found.sort(key=itemgetter(0))
    return found


def _others(block: bytes, find: Callable[[bytes], Iterator[tuple[int, int]]]) -> list[Hit]:
    found: list[Hit] = []
    number, counted, debug = 0, 0, False
    for start, end in find(block):
        number += block.count(b"\n", counted, start)
        counted = start
        line = block[start : min(end, start + LONGEST_LINE)]
        if not debug and b" LMCache DEBUG:" in line:
            debug = True
            found.append((number, b"", "", DEBUG, (), b""))
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
            end = lines.get(start, -1)
            if end < 0:
                end = block.find(b"\n", at)
                lines[start] = end = end if end >= 0 else size
            at = block.find(needle, end)
    return iter(sorted(lines.items()))


def _read(line: bytes, number: int, found: list[Hit]) -> None:
    while True:
        start = line.find(_FRAME)
        level = _LEVEL.match(line, start) if start >= 0 else None
        if level is None:
            _read_unframed(line, number, found)
            return
        at = level.end()
        for message in _BY_HEAD.get(line[at : at + 4], ()):
            match = message.pattern.match(line, at)
            if match is not None:
                process = _process(line[:start]) if start > _SHORTEST else ""
                stamp = line[max(0, start - _STAMP) : start]
                found.append((number, stamp, process, message.name, match.groups(), line[at : at + _LONGEST_BODY]))
                break
        if any(needle in line[:start] for needle in grammar.NEEDLES):
            _read_unframed(line[:start], number, found)
        again = line.find(_FRAME, at)
        if again < 0 or not _LEVEL.match(line, again):
            return
        line = line[at:]  # two lines glued together


def _read_unframed(line: bytes, number: int, found: list[Hit]) -> None:
    """A line of vLLM, of a traceback, or one that has lost its beginning."""
    if b"\x1b" in line or b"[0" in line:
        line = _COLOURS.sub(b"", line)
    process = _process(line)
    head = _VLLM.search(line)
    stamp = head[1] if head is not None else b""
    body = line if head is None else line[head.end() :]
    if head is None and process:
        body = line[line.find(b"pid=") :].partition(b") ")[2] or line
    for message in _ANYWHERE:
        if message.literal in line:
            match = message.pattern.search(body) or message.pattern.search(line)
            if match is not None:
                found.append((number, stamp, process, message.name, match.groups(), body[:_LONGEST_BODY]))
                return


def fields(name: str, groups: Groups) -> Fields:
    """{field: count or text} of a hit."""
    return {
        field: int(value) if count else _shown(value)
        for (field, count), value in zip(grammar.BY_NAME[name].fields, groups, strict=True)
        if value is not None
    }


def _shown(value: bytes) -> str:
    return _TOKEN_IDS.sub("<numbers left out>", value.decode("utf-8", "replace"))


def raised(text: str) -> tuple[str, Fields] | None:
    """What an exception's text means: name of the message and its fields."""
    line = text.encode()
    for message in _RAISED:
        match = message.pattern.search(line) if message.literal in line else None
        if match is not None:
            return message.name, fields(message.name, match.groups())
    return None


@lru_cache(maxsize=4096)
def _process_of(name: bytes, rank: bytes | None, pid: bytes) -> str:
    return f"{name.decode('ascii', 'replace')}{'' if rank is None else '_' + rank.decode()} pid={pid.decode()}"


@lru_cache(maxsize=1024)
def _process_before(prefix: bytes) -> str:
    return _process(prefix)


def _process(prefix: bytes) -> str:
    if b"pid=" not in prefix:
        return ""
    match = None
    for match in _PROCESS.finditer(prefix):  # noqa: B007  the last one: what stands before it is another line's end
        pass
    return "" if match is None else _process_of(match[1], match[2], match[3])


def seconds(stamp: bytes) -> float | None:
    """Of a hit's time: seconds since 1970 as if the log's clock were UTC. vLLM gives no year: 1970 stands for it."""
    second = _second(stamp[:19] if len(stamp) == _STAMP else stamp)
    if second is None or len(stamp) != _STAMP:
        return second
    return second + int(stamp[20:]) / 1000 if stamp[20:].isdigit() else second


@lru_cache(maxsize=1024)
def _second(stamp: bytes) -> float | None:
    text = stamp.decode("ascii", "replace")
    try:
        parts = [int(part) for part in re.split(r"[- :]", "1970-" + text if len(text) == 14 else text)]
        return float(calendar.timegm((*parts, 0, 0, 0))) if len(parts) == 6 else None
    except (ValueError, OverflowError):
        return None


def trailer(body: bytes) -> tuple[str, int, str] | None:
    """(file, line, logger) of the statement that made this line."""
    match = _TRAILER.search(body)
    return (match[1].decode(), int(match[2][:9]), match[3].decode()) if match else None


def text(body: bytes) -> str:
    """The message, without its trailer, colours, secrets and what could do harm in a terminal."""
    shown = _COLOURS.sub(b"", _TRAILER.sub(b"", body)).decode("utf-8", "replace")
    shown = redact.text(_TOKEN_IDS.sub("<numbers left out>", shown))
    return "".join(sign if sign.isprintable() else " " for sign in shown).strip()[:600]
