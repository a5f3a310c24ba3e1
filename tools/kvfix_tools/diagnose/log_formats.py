"""Log text as people paste it, to plain lines: JSON of Docker and of JSON loggers, quotes, HTML, terminal wrapping.

Prefixes of `kubectl logs`, journald or Docker Compose stay in most lines: who reads a line searches in it. They are
removed where a line continues a traceback (`without_prefix`).
"""

from __future__ import annotations

import html
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from ahocorasick_rs import BytesAhoCorasick, Implementation, MatchKind

from kvfix_tools.diagnose import boxed, wrapped
from kvfix_tools.diagnose.wrapped import Plain

if TYPE_CHECKING:
    from collections.abc import Callable

#: Names of the message in a JSON log: Docker, journald, structlog and Kubernetes, Loki's exporter.
_MESSAGE = ("log", "MESSAGE", "message", "msg", "event", "line", "text", "body", "textPayload")
#: A tracebacks's own field in JSON loggers.
_TRACEBACK = ("exc_info", "exception", "stack_trace", "stack", "traceback")
#: An object, also in what grep found (`engine.log:190174:{...`), or behind the name of a pod.
_JSON = re.compile(rb"\s*(?:\S{1,300}?:\d+:|\[?[\w./-]{1,200}\]? )?\{")
_QUOTE = re.compile(rb"(?m)^(?:> ?)+")
#: In front of lines: kubectl (`--prefix`, `--timestamps`), journald and syslog, Docker Compose, CRI.
_PREFIX = re.compile(
    rb"(?:\[pod/[^\]\s]+\] )?"
    rb"(?:[\w.-]{1,60}(?: std(?:out|err))? {0,30}\| ?)?"
    rb"(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?[ \t](?:std(?:out|err) [FP] )?)?"
    rb"(?:[^\s\d]{3,8} [ \d]\d \d\d:\d\d:\d\d \S+ [\w./@-]+(?:\[\d+\])?: )?"
)
#: What vLLM's logger, glog and torch put in front of each line; twice in a line, the break between was lost.
_HEAD = re.compile(
    rb"(?:\(\w+[^()\n]{0,60}pid=\d+[^()\n]{0,40}\) )*(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) +"
    rb"(?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[?[^\[\]\s]{1,80}:\d+\]"
    rb"|(?<![\w\]])[IWEF](?:\d{4}){1,2} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.]+:\d+\]|\[rank\d+\]: "
)
#: What word processors, chats and web pages make of quotes and blanks.
_TYPOGRAPHY = {
    "\u201c".encode(): b'"', "\u201d".encode(): b'"', "\u2018".encode(): b"'", "\u2019".encode(): b"'",
    "\u00a0".encode(): b" ",
}  # fmt: skip
#: A traceback in one line, a frame in it, and the exception behind the source of its last frame.
_TRACE_IN_ONE = re.compile(rb"Traceback \(most recent call last\):\s+File \"")
_WHOLE_FRAME = re.compile(rb'File "[^"\n]{1,400}", line \d+, in (?:<\w+>|\w+)')
_ENDS = re.compile(
    rb"\s(?:[A-Za-z_]\w*\.)*(?:[A-Za-z_]\w*)?(?:Error|Exception|Interrupt|Exit|Timeout|Empty|Full)(?:: |\s*$)"
)
#: What few blocks hold: a traceback in one string, panics of Rust, boxes of rich. All in one search, whose words are
#: so long that it skips most of a block.
_ESCAPED, _BOXED = {0, 1}, {4, 5}
_odd = BytesAhoCorasick(
    (b'\\n  File "', b'\\n  File \\"', b"' panicked at ", b") panicked at ", *boxed.NEEDLES),
    matchkind=MatchKind.LeftmostFirst, implementation=Implementation.DFA,
).find_matches_as_indexes  # fmt: skip
#: Bytes of an input from which on it is no paste, in which a terminal's lines are joined.
_PASTED = 128 << 10


def plain(block: bytes, before: int = 0) -> Plain:
    """A block of whole lines without what was put around them. before: bytes of the same input before it."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    if b"^M\n" in block:  # as an editor shows them
        block = block.replace(b"^M\n", b"\n")
    if b'{"' in block[:8192] and _is_json(block):
        return _taken_apart(block, _without_json)
    odd = {number for number, _, _ in _odd(block)}
    if odd & _ESCAPED:
        return _taken_apart(block, _unescaped)
    if b"\n> " in block[:4096] or block.startswith(b"> "):
        block = _QUOTE.sub(b"", block)
    if b"&" in block and (b"&gt;" in block or b"&quot;" in block or b"&#" in block):
        block = html.unescape(block.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    if odd & _BOXED:
        return boxed.opened(block)
    if odd:
        block = wrapped.panics(block)
    if before + len(block) >= _PASTED:
        return Plain(block)
    for typed, meant in _TYPOGRAPHY.items():
        block = block.replace(typed, meant)
    parted = _taken_apart(block, _parted)
    return parted if parted.text.count(b"\n") > block.count(b"\n") else wrapped.joined(block)


def without_prefix(line: bytes) -> bytes:
    found = _PREFIX.match(line)
    return line[found.end() :] if found is not None else line


def without_head(line: bytes) -> bytes:
    """A line without what a logger puts in front, or a launcher."""
    found = _HEAD.match(line)
    return line[found.end() :].lstrip(b" ") if found is not None else without_prefix(line)


def _is_json(block: bytes) -> bool:
    """Most of the first lines are objects with a message."""
    first = [line for line in block[:65536].split(b"\n") if line.strip()][:5]
    return sum(_message(line) is not None for line in first) * 2 > len(first)


def _message(line: bytes) -> str | None:
    """The message of a JSON line, with its traceback; None: it is no such line."""
    start = _JSON.match(line)
    if start is None:
        return None
    try:
        data = msgspec.json.decode(line[start.end() - 1 :])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if not isinstance(data, dict) or "kind" in data:  # kvfix's own recorder
        return None
    text = next((data[name] for name in _MESSAGE if isinstance(data.get(name), str)), None)
    if text is None:
        return None
    trace = next((data[name] for name in _TRACEBACK if isinstance(data.get(name), str)), "")
    return "\n".join(part for part in (_level(data, text), trace) if part)


def _level(data: dict[str, Any], text: str) -> str:
    """With the logger's level in front, where the message does not have one itself."""
    level = str(data.get("level") or data.get("levelname") or data.get("severity") or "").upper()
    if level in ("WARNING", "ERROR", "CRITICAL", "FATAL", "WARN") and not wrapped.BEGINS.match(
        text.encode("utf-8", "replace")
    ):
        return f"{level} {text}"
    return text


def _taken_apart(block: bytes, parts: Callable[[bytes], list[bytes]]) -> Plain:
    """parts: of one line, the lines that it is made of."""
    lines: list[bytes] = []
    numbers: list[int] = []
    for number, line in enumerate(block.split(b"\n")):
        found = parts(line)
        lines += found
        numbers += [number] * len(found)
    return Plain(b"\n".join(lines), numbers)


def _without_json(line: bytes) -> list[bytes]:
    text = _message(line)
    return [line] if text is None else text.rstrip("\n").encode("utf-8", "surrogatepass").split(b"\n")


def _parted(line: bytes) -> list[bytes]:
    """Lines that somebody pasted without their breaks."""
    if _TRACE_IN_ONE.search(line):
        return _trace_parted(line)
    starts = [found.start() for found in _HEAD.finditer(line)] if len(line) > wrapped.NARROWEST else []
    if len(starts) < 2:
        return [line]
    *first, last = (line[start:end] for start, end in pairwise([0, *starts[1:], len(line)]))
    return [*(each.rstrip(b" ") for each in first), last]


def _unescaped(line: bytes) -> list[bytes]:
    r"""A traceback that somebody printed in one line, as Python's repr has it, with \n and \" in it."""
    return line.replace(b'\\"', b'"').split(b"\\n") if b"\\n  File " in line else [line]


def _trace_parted(line: bytes) -> list[bytes]:
    """A traceback in one line: its header, each frame and its source, and the exception."""
    before, header, rest = line.partition(b"Traceback (most recent call last):")
    found = [before + header]
    for part in re.split(rb"\s+(?=File \")", rest)[1:]:
        frame = _WHOLE_FRAME.match(part)
        if frame is None:
            found.append(b"  " + part)
            continue
        source, exception = part[frame.end() :].strip(), b""
        ends = _ENDS.search(b" " + source)
        if ends is not None:
            source, exception = source[: ends.start()].rstrip(), source[ends.start() :]
        found += [b"  " + frame[0], b"    " + source]
        if exception:
            found.append(exception)
    return found
