"""The type of a kind of line. `grammar.py` has LMCache's kinds, `grammar_vllm.py` vLLM's."""

from __future__ import annotations

import re
from typing import NamedTuple


class Message(NamedTuple):
    """One kind of line.

    starts: beginnings of the body after LMCache's frame; empty for anywhere in the line.
    literal: text that each line of this kind contains. pattern: its groups are the fields.
    source: `lmcache`, `vllm` or `kvfix` for their log lines, `raised` for the text of an exception.
    fields: (name, True if it is a count) of each group.
    """

    name: str
    starts: tuple[bytes, ...]
    literal: bytes
    pattern: re.Pattern[bytes]
    source: str
    fields: tuple[tuple[str, bool], ...]


MESSAGES: list[Message] = []

#: Groups that take digits only are counts; everything else is text.
_COUNT = re.compile(rb"\(\?P<(\w+)>(?:-\?)?\\d\+\)")
_ID = rb"(?P<request>[^\s,'\"()\[\]]+)"


def message(name: str, source: str, starts: str, literal: str, pattern: bytes) -> None:
    # At most 18 digits, because int() refuses very long numbers.
    compiled = re.compile(pattern.replace(b"<ID>", _ID).replace(rb"\d+)", rb"\d{1,18})"))
    heads = tuple(start.encode() for start in starts.split("|") if start)
    counts = _COUNT.findall(pattern)
    fields = tuple((field, field.encode() in counts) for field in compiled.groupindex)
    assert compiled.groups == len(fields), f"{name}: only named groups"
    MESSAGES.append(Message(name, heads, literal.encode(), compiled, source, fields))


def lmcache(name: str, starts: str, literal: str, pattern: bytes) -> None:
    message(name, "lmcache", starts, literal, pattern)
