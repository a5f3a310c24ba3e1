"""Turn the output of log collectors into plain lines. Some programs write JSON, and some quote or escape lines.

Most lines keep the prefix that `kubectl logs`, journald or Docker Compose added, because the parsers search inside a
line. For lines that continue a traceback, `without_prefix` removes the prefix.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

#: JSON logs of Docker, journald, structlog, Kubernetes and Loki's exporter have the message under one of these keys.
_MESSAGE = ("log", "MESSAGE", "message", "msg", "event", "line", "text", "body", "textPayload")
_TRACEBACK = ("exc_info", "exception", "stack_trace", "stack", "traceback")
#: The beginning of a JSON object. A prefix of grep (`engine.log:190174:`) or a pod's name may precede the object.
_JSON = re.compile(rb"\s*(?:\S{1,300}?:\d+:|\[?[\w./-]{1,200}\]? )?\{")
_QUOTE = re.compile(rb"(?m)^(?:> ?)+")
#: Prefixes that kubectl (`--prefix`, `--timestamps`), journald, syslog, Docker Compose and CRI add to a line.
_PREFIX = re.compile(
    rb"(?:\[pod/[^\]\s]+\] )?"
    rb"(?:[\w.-]{1,60}(?: std(?:out|err))? {0,30}\| ?)?"
    rb"(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?[ \t](?:std(?:out|err) [FP] )?)?"
    rb"(?:[^\s\d]{3,8} [ \d]\d \d\d:\d\d:\d\d \S+ [\w./@-]+(?:\[\d+\])?: )?"
)
#: A message that begins with a level or with a process.
_LEVELLED = re.compile(rb"(?:\(\w+ [^)]*pid=|\[\d{4}-)|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
#: A traceback that is a single line with escaped newlines contains this text.
_ESCAPED = b"\\n  File "
_ANY_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)
#: The plain lines, and the index of each plain line's original line, or None if no line was split.
Plain = tuple[bytes, list[int] | None]


def shape(prefix: bytes) -> bytes:
    """Return the prefix of a line with every digit replaced by 0, because digits differ from line to line."""
    return prefix.translate(_ANY_DIGIT)


def plain(block: bytes) -> Plain:
    """Return the lines of a block without the JSON, quotes and escapes that a collector added."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    if b'{"' in block[:8192] and _is_json(block):
        return _taken_apart(block, _without_json)
    if _ESCAPED in block:
        return _taken_apart(block, _unescaped)
    if b"\n> " in block[:4096] or block.startswith(b"> "):
        block = _QUOTE.sub(b"", block)
    return block, None


def without_prefix(line: bytes) -> bytes:
    return _PREFIX.sub(b"", line, count=1)


def _is_json(block: bytes) -> bool:
    first = [line for line in block[:65536].split(b"\n") if line.strip()][:5]
    return sum(_message(line) is not None for line in first) * 2 > len(first)


def _message(line: bytes) -> str | None:
    """Return the message and the traceback in a JSON line, or None for any other line."""
    start = _JSON.match(line)
    if start is None:
        return None
    try:
        data = msgspec.json.decode(line[start.end() - 1 :])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if not isinstance(data, dict) or "kind" in data:  # kvfix's own recorder writes lines with `kind`
        return None
    text = next((data[name] for name in _MESSAGE if isinstance(data.get(name), str)), None)
    if text is None:
        return None
    trace = next((data[name] for name in _TRACEBACK if isinstance(data.get(name), str)), "")
    return "\n".join(part for part in (_level(data, text), trace) if part)


def _level(data: dict[str, Any], text: str) -> str:
    """Put the level of the JSON object in front of the message, unless the message begins with a level."""
    level = str(data.get("level") or data.get("levelname") or data.get("severity") or "").upper()
    known = level in ("WARNING", "ERROR", "CRITICAL", "FATAL", "WARN")
    return f"{level} {text}" if known and not _LEVELLED.match(text.encode("utf-8", "replace")) else text


def _taken_apart(block: bytes, parts: Callable[[bytes], list[bytes]]) -> Plain:
    """Split each line of a block with the function `parts`, which returns the lines inside a line."""
    lines: list[bytes] = []
    numbers: list[int] = []
    for number, line in enumerate(block.split(b"\n")):
        found = parts(line)
        lines += found
        numbers += [number] * len(found)
    return b"\n".join(lines), numbers


def _without_json(line: bytes) -> list[bytes]:
    text = _message(line)
    return [line] if text is None else text.rstrip("\n").encode("utf-8", "surrogatepass").split(b"\n")


def _unescaped(line: bytes) -> list[bytes]:
    r"""Split a traceback that Python's repr printed as one line with \n and \"."""
    return line.replace(b'\\"', b'"').split(b"\\n") if _ESCAPED in line else [line]
