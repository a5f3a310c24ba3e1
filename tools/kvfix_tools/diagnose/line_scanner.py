"""Blocks of log text to lines that mean something. Only lines that hold a needle are read, and those of a traceback.

Literals first: a search for each needle in the whole block costs a fraction of looking at each line. What kvfix knows
of single problems adds no needle: problems are looked for in lines of errors and warnings only.
"""

from __future__ import annotations

import calendar
import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache

from kvfix_tools.diagnose import grammar, log_formats
from kvfix_tools.diagnose.log_line import ANSI, Fields, LogLine, without_colours, without_tokens
from kvfix_tools.diagnose.stacks import Stack, Stacks
from kvfix_tools.diagnose.tracebacks import Raised, Tracebacks

#: Name of a line that stands for all lines of an input at DEBUG: the log's level hides nothing.
DEBUG = "debug"
#: Name of a line that names a connector, and says nothing else.
WHO = "who"
#: Bytes of a line that are read, and of a message that are kept for evidence.
LONGEST_LINE, _LONGEST_BODY = 1 << 16, 1 << 14
#: Bodies of messages that are kept, to know them again.
_BODIES = 4096
#: `[2026-11-21 01:41:27,007] LMCache INFO: `, the same in 0.3.0 to 0.5.6.
_FRAME = b"] LMCache "
_LEVEL = re.compile(rb"\] LMCache ([A-Z]{4,8}):(?:" + ANSI + rb")? ?")
_STAMP = len(b"2026-11-21 01:41:27,007")
#: `ERROR 12-03 01:24:36 [core.py:844] `, and whose it is: `(EngineCore_DP0 pid=7703) `, `(VllmWorker rank=0 pid=31) `.
_VLLM = re.compile(rb"(DEBUG|INFO|WARNING|ERROR|CRITICAL) +\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[?([^\[\]\s]*:\d+)\] ?")
_PROCESS = re.compile(rb"\((\w+)(?: rank=(\d+))?[^()\n]{0,40}? ?pid=(\d+)\)")
#: Levels of other loggers: logging's own format, uvicorn, glog (Mooncake, NIXL), UCX; and what argparse says.
_OTHER = re.compile(
    rb"(?:^|[\s\]|])(?:(?P<level>WARNING|WARN|ERROR|CRITICAL|FATAL)\b[\s:\]-]"
    rb"|(?P<glog>[WEF])(?:\d{4}){1,2} \d\d:\d\d:\d\d|(?P<usage>error): (?:argument|unrecognized|the following) )"
)
_LEVELS = {b"W": "warning", b"E": "error", b"F": "critical", b"WARN": "warning", b"FATAL": "critical"}
#: A process that died of something that is no exception.
_DIED = re.compile(
    rb"(?P<what>Segmentation fault|Segfault encountered|SIGSEGV|SIGABRT|SIGBUS|Bus error|oom-kill|OOMKilled"
    rb"|Out of memory: Killed process \d+|(?:^|\s)Killed\s*(?:process \d+|$)|terminate called"
    rb"|exit code:? -(?:6|7|9|11)\b|symbol lookup error|Assertion [`'][^\n]{1,300}' failed)"
)
_DEATHS = (b"ault", b"illed", b"SIG", b"Bus error", b"terminate called", b"exit code", b"lookup error", b"Assertion")
#: What an engine or a server says when it is asked to end: errors after it are no failure.
_CLOSING = (b"Unregistered ", b"Shutting down LMCache", b"Gracefully shutting down")
#: What a line that is read holds. A test shows that they cover every message of the grammar.
NEEDLES: tuple[bytes, ...] = (
    b" LMCache ", b":lmcache.", b"_mp_connector)", b'{"kind":"',
    b"throughput: ", b"KV load failure", b"FOR_REMOTE_KVS", b"broadcast block", b"Initializing a V", b"assert ",
    b'", line ', b"rror", b"ERROR", b"WARN", b"Traceback (", b"xception", b"fault", b"illed", b"terminate called",
    b"kv_connector", b"connector with name", b"[shutdown]", b"Thread ", b"Process ", b".cpp:",
    b"Assertion `",
)  # fmt: skip
#: LMCache's messages by the first bytes of their bodies.
_BY_HEAD: dict[bytes, list[grammar.Message]] = {}
for _message in grammar.MESSAGES:
    for _start in _message.starts:
        _BY_HEAD.setdefault(_start[:4], []).append(_message)
#: LMCache's where a line has lost its beginning, or a launcher has put another in front of it.
_ANYWHERE = [message for message in grammar.MESSAGES if message.source != "raised"]
_OF_VLLM = [message for message in _ANYWHERE if message.source != "lmcache"]
_RAISED = [message for message in grammar.MESSAGES if message.source == "raised"]


class Scanner:
    """Of one input. Give it blocks of whole lines, in order; it answers every line that means something."""

    def __init__(self, file: str = "log") -> None:
        self._file = file
        self._number = 1
        self._debug = False
        self._tracebacks = Tracebacks()
        self._stacks = Stacks()
        #: {a body: its message and fields}
        self._bodies: dict[bytes, tuple[str, Fields]] = {}

    def scan(self, block: bytes) -> Iterator[LogLine]:
        text, numbers = log_formats.plain(block)
        first = self._number
        for number, line in self._candidates(text):
            at = first + (number if numbers is None else numbers[min(number, len(numbers) - 1)])
            yield from self._read(line[:LONGEST_LINE], at)
        self._number += block.count(b"\n")

    def end(self) -> Iterator[LogLine]:
        """The input has ended: tracebacks that were cut off."""
        for process, raised in self._tracebacks.cut():
            yield self._raised(raised, "", process, self._number, b"")
        stack = self._stacks.end()
        if stack is not None:
            yield self._stack(stack, self._number)

    def _candidates(self, block: bytes) -> Iterator[tuple[int, bytes]]:
        """(number in the block from 0, line) of each line with a needle, and of those that may go on in a traceback."""
        starts = _starts(block)
        number = counted = start = index = 0
        while True:
            if not self._tracebacks.open and not self._stacks.open:
                index = bisect_left(starts, start, index)
                if index == len(starts):
                    return
                start = starts[index]
            elif start >= len(block):
                return
            end = block.find(b"\n", start)
            end = len(block) if end < 0 else end
            number += block.count(b"\n", counted, start)
            counted = start
            yield number, block[start:end]
            start = end + 1

    def _read(self, text: bytes, number: int) -> Iterator[LogLine]:
        """Lines may be glued together: all messages of this one."""
        while True:
            start = text.find(_FRAME)
            level = _LEVEL.match(text, start) if start >= 0 else None
            if level is None:
                yield from self._unframed(text, number)
                return
            if level[1] == b"DEBUG" and not self._debug:
                self._debug = True
                yield LogLine(DEBUG, {}, None, "", self._file, number, b"")
            at = level.end()
            line = self._of_lmcache(text, level, number)
            if start > _STAMP + 24:
                yield from self._unframed(text[:start], number)
            if line is not None:
                yield line
            again = text.find(_FRAME, at)
            if again < 0 or not _LEVEL.match(text, again):
                return
            text = text[at:]

    def _of_lmcache(self, text: bytes, level: re.Match[bytes], number: int) -> LogLine | None:
        start, at = level.span()
        messages = _BY_HEAD.get(text[at : at + 4])
        if messages is not None:
            body = text[at:]
            known = self._bodies.get(body) or self._matched(messages, body)
            if known is not None:
                stamp = text[max(0, start - _STAMP) : start]
                return self._line(*known, stamp, _process(text[:start]), number, body)
        if level[1] in (b"INFO", b"DEBUG"):
            closing = text.startswith(_CLOSING, at)
            return self._line("closing", {}, b"", "", number, text[at:]) if closing else None
        process = _process(text[:start])
        self._tracebacks.take(process, text[at:])
        fields = {"level": level[1].decode().lower(), "logger": "lmcache", "place": ""}
        return self._line("logged", fields, text[max(0, start - _STAMP) : start], process, number, text[at:])

    def _matched(self, messages: list[grammar.Message], body: bytes) -> tuple[str, Fields] | None:
        """(name, fields) of a body. A request that waits is asked about on every step: its line comes again."""
        for message in messages:
            match = message.pattern.match(body)
            if match is not None:
                if len(self._bodies) >= _BODIES:
                    self._bodies.clear()
                self._bodies[body] = message.name, _fields(message, match)
                return self._bodies[body]
        return None

    def _unframed(self, text: bytes, number: int) -> Iterator[LogLine]:
        """A line of vLLM, of another logger, of a traceback, or one that has lost its beginning."""
        if b"\x1b" in text or b"[0" in text:
            text = without_colours(text)
        process = _process(text)
        head = _VLLM.search(text)
        if head is not None:
            body = text[head.end() :]
        elif process:
            body = text[text.find(b"pid=") :].partition(b") ")[2] or text
        else:
            body = log_formats.without_prefix(text)
        if self._stacks.open or b"Thread " in body or b"Process " in body:
            inside, stack = self._stacks.take(body)
            if stack is not None:
                yield self._stack(stack, number)
            if inside:
                return
        inside, raised = self._tracebacks.take(process, body)
        if raised is not None:
            yield self._raised(raised, _level(text, head), process, number, body)
        if inside:
            return
        cut = head is None and (b"lmcache" in text or b"LMCache" in text)
        for message in _ANYWHERE if cut else _OF_VLLM:
            if message.literal in text:
                match = message.pattern.search(body) or message.pattern.search(text)
                if match is not None:
                    yield self._line(message.name, _fields(message, match), b"", process, number, body)
                    return
        if b"non-default args" in text:
            yield self._line("settings", {}, b"", process, number, body)
            return
        if b"[shutdown]" in text:
            yield self._line("closing", {}, b"", process, number, body)
            return
        died = _DIED.search(body) if any(word in body for word in _DEATHS) else None
        if died is not None:
            yield self._line("died", {"text": _decoded(died["what"].strip())}, b"", process, number, body)
            return
        level = _level(text, head)
        named = self._tracebacks.by_name(process, body, anywhere=head is None)
        if named is not None:
            yield self._raised(named, level, process, number, body)
        elif level in ("", "info") and (b"kv_connector" in body or b"connector with name" in body):
            yield self._line(WHO, {}, b"", process, number, body)
        elif level in ("warning", "error", "critical"):
            fields = {"level": level, "logger": "vllm" if head else "", "place": _decoded(head[2]) if head else ""}
            yield self._line("logged", fields, b"", process, number, body)

    def _raised(self, raised: Raised, level: str, process: str, number: int, body: bytes) -> LogLine:
        return self._line("raised", {**with_meaning(raised), "level": level}, b"", process, number, body)

    def _stack(self, stack: Stack, number: int) -> LogLine:
        where = f"{stack.thread or 'a thread'} ({stack.state}) in {stack.frames[-1][2]}".encode()
        return self._line("stack", stack._asdict(), b"", stack.process, number, where)

    def _line(self, name: str, fields: Fields, stamp: bytes, process: str, number: int, body: bytes) -> LogLine:
        return LogLine(name, fields, seconds(stamp), process, self._file, number, body[:_LONGEST_BODY])


def _level(text: bytes, head: re.Match[bytes] | None) -> str:
    """Of vLLM's frame, or of another logger's; "" if the line has none."""
    if head is not None:
        return head[1].decode().lower()
    other = _OTHER.search(text)
    if other is None:
        return ""
    name = other["level"] or other["glog"] or other["usage"]
    return _LEVELS.get(name, name.decode().lower())


def _starts(block: bytes) -> list[int]:
    """Where lines with a needle begin, in order."""
    starts: set[int] = set()
    find, rfind = block.find, block.rfind
    for needle in NEEDLES:
        at = find(needle)
        while at >= 0:
            starts.add(rfind(b"\n", 0, at) + 1)
            end = find(b"\n", at)
            if end < 0:
                break
            at = find(needle, end)
    return sorted(starts)


def _fields(message: grammar.Message, match: re.Match[bytes]) -> Fields:
    """{field: count or text}"""
    return {
        field: int(value) if count else without_tokens(value.decode("utf-8", "replace"))
        for (field, count), value in zip(message.fields, match.groups(), strict=True)
        if value is not None
    }


def with_meaning(raised: Raised) -> Fields:
    """Fields of a line of the kind `raised`. meaning: what the grammar reads in the exception's text."""
    name, fields = _meaning(raised.text)
    return {**fields, **raised.fields, "meaning": name}


def _meaning(text: str) -> tuple[str, Fields]:
    line = text.encode()
    for message in _RAISED:
        match = message.pattern.search(line) if message.literal in line else None
        if match is not None:
            return message.name, _fields(message, match)
    return "", {}


def _process(prefix: bytes) -> str:
    """Of the last process that is named there: what stands before it is another line's end."""
    if b"pid=" not in prefix:
        return ""
    named = _PROCESS.findall(prefix)
    return _process_name(named[-1]) if named else ""


@lru_cache(maxsize=1024)
def _process_name(parts: tuple[bytes, bytes, bytes]) -> str:
    name, rank, pid = (part.decode("ascii", "replace") for part in parts)
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


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def scanned(log: bytes, file: str = "log") -> Iterator[LogLine]:
    """Every line that means something of a log in memory."""
    scanner = Scanner(file)
    yield from scanner.scan(log)
    yield from scanner.end()
