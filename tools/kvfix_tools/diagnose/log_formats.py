"""Log text as people paste it, to plain lines: JSON of Docker and of JSON loggers, quotes, HTML, terminal wrapping.

Prefixes of `kubectl logs`, journald or Docker Compose stay in most lines: who reads a line searches in it. They are
removed where a line continues a traceback (`without_prefix`).
"""

from __future__ import annotations

import html
import re
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

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
#: What a line of a log begins with; a piece that a terminal cut off does not.
_BEGINS = re.compile(
    rb"(?:\x1b\[[0-9;]*m)*(?:\(\w+ [^)]*pid=|\[\d{4}-|\[pod/|\d{4}-\d\d-\d\d"
    rb"|(?:[A-Z]{3,8} )?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b"
    rb"|Traceback |  File |\{|(?:assert|raise|return) |[A-Z][a-z]{2} [ \d]\d \d\d:|[IWEF](?:\d{4}){1,2} "
    rb"|(?:Value|Runtime|Assertion|Key|Index|Type|Attribute|Import|ModuleNotFound|FileNotFound|Permission|OS|Memory"
    rb"|Timeout|Connection|NotImplemented)Error\b)"
)
#: What vLLM's logger, glog and torch put in front of each line; twice in a line, the break between was lost.
_HEAD = re.compile(
    rb"(?:\(\w+[^()\n]{0,60}pid=\d+[^()\n]{0,40}\) )*(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) +"
    rb"(?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[?[^\[\]\s]{1,80}:\d+\]"
    rb"|(?<![\w\]])[IWEF](?:\d{4}){1,2} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.]+:\d+\]|\[rank\d+\]: "
)
#: Of the marks that Python puts below what raised, and of blank lines.
_MARKS = frozenset(b" ~^")
_ANY_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)
#: What word processors, chats and web pages make of quotes and blanks.
_TYPOGRAPHY = {
    "\u201c".encode(): b'"', "\u201d".encode(): b'"', "\u2018".encode(): b"'", "\u2019".encode(): b"'",
    "\u00a0".encode(): b" ",
}  # fmt: skip
#: A terminal is at least so wide, and at most.
_NARROWEST, _WIDEST = 40, 400
#: A terminal's lines are joined in blocks that are smaller: in all of what somebody pastes.
_PASTED = 128 << 10


class Plain(NamedTuple):
    """numbers: of each line in the input; None: they follow one another."""

    text: bytes
    numbers: list[int] | None = None


def plain(block: bytes) -> Plain:
    """A block of whole lines without what was put around them."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    if b'{"' in block[:8192] and _is_json(block):
        return _taken_apart(block, _without_json)
    if b"\\n  File " in block:
        return _taken_apart(block, _unescaped)
    if b"\n> " in block[:4096] or block.startswith(b"> "):
        block = _QUOTE.sub(b"", block)
    if b"&" in block and (b"&gt;" in block or b"&quot;" in block or b"&#" in block):
        block = html.unescape(block.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    if len(block) >= _PASTED:
        return Plain(block)
    for typed, meant in _TYPOGRAPHY.items():
        block = block.replace(typed, meant)
    parted = _taken_apart(block, _parted)
    return parted if parted.text.count(b"\n") > block.count(b"\n") else _unwrapped(block)


def without_prefix(line: bytes) -> bytes:
    found = _PREFIX.match(line)
    return line[found.end() :] if found is not None else line


def without_head(line: bytes) -> bytes:
    """A line without what a logger puts in front, or a launcher."""
    found = _HEAD.match(line)
    return line[found.end() :].lstrip(b" ") if found is not None else without_prefix(line)


def shape(prefix: bytes) -> bytes:
    """What stands in front of a line, with any digits: a launcher's are others in each."""
    return prefix.translate(_ANY_DIGIT)


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
    if level in ("WARNING", "ERROR", "CRITICAL", "FATAL", "WARN") and not _BEGINS.match(
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
    starts = [found.start() for found in _HEAD.finditer(line)] if len(line) > _NARROWEST else []
    if len(starts) < 2:
        return [line]
    *first, last = (line[start:end] for start, end in pairwise([0, *starts[1:], len(line)]))
    return [*(each.rstrip(b" ") for each in first), last]


def _unescaped(line: bytes) -> list[bytes]:
    r"""A traceback that somebody printed in one line, as Python's repr has it, with \n and \" in it."""
    return line.replace(b'\\"', b'"').split(b"\\n") if b"\\n  File " in line else [line]


def _unwrapped(block: bytes) -> Plain:
    """Lines that a terminal has wrapped, in one again."""
    lines = block.split(b"\n")
    width = _width(lines)
    if not width:
        return Plain(block)
    joined: list[bytes] = []
    numbers: list[int] = []
    continued = False
    for number, line in enumerate(lines):
        if continued and line and not _BEGINS.match(line):
            joined[-1] += line
        else:
            joined.append(line)
            numbers.append(number)
        continued = len(line) == width
    return Plain(b"\n".join(joined), numbers)


def _width(lines: list[bytes]) -> int:
    """The width at which a terminal has cut lines; 0: it has not."""
    longest = max(map(len, lines))
    if not _NARROWEST <= longest <= _WIDEST:
        return 0
    at = [number for number, line in enumerate(lines[:-1]) if len(line) == longest]
    # Marks below a line of source end where it ends.
    plain = [number for number in at if not any(set(line) <= _MARKS for line in lines[number : number + 2])]
    cut = [number for number in plain if not _BEGINS.match(lines[number + 1])]
    # One line may be the longest by chance; with several, or where a word goes on in the next line, it is cut.
    lengths = Counter(map(len, lines))
    return longest if cut and (len(cut) >= 2 or (lengths[longest] == 1 and _goes_on(lines, cut[0]))) else 0


def _goes_on(lines: list[bytes], number: int) -> bool:
    here, there = lines[number][-1:], lines[number + 1][:1]
    first, second = (shape(line.partition(b" ")[0]) for line in lines[number : number + 2])
    if first and first == second:
        return False  # the same prefix of a launcher, or its clock: two lines
    if here.islower() and there.isupper() and not lines[number].rpartition(b" ")[2].count(b"."):
        return False  # a sentence that begins, after a word
    of_name = there.isalnum() or there in b"_.:/" or lines[number + 1][:2].strip(b"-").isalnum()
    return (here.isalnum() or here in b"_.:/-") and of_name
