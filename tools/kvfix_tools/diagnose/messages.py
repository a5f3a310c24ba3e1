"""Kinds of lines, as they are written down: `grammar.py` has LMCache's, `grammar_vllm.py` vLLM's."""

from __future__ import annotations

import re
from typing import NamedTuple


class Message(NamedTuple):
    """One kind of line.

    starts: what the body begins with where LMCache's frame is before it; empty: anywhere in the line.
    literal: without it the line is not of this kind. pattern: its groups are the fields (name, is it a count).
    source: whose line it is: `lmcache` (by logging), `vllm`, `kvfix`; `raised`: the text of an exception.
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
    # 18 digits: int() refuses a very long number, and no count is that long.
    compiled = re.compile(pattern.replace(b"<ID>", _ID).replace(rb"\d+)", rb"\d{1,18})"))
    heads = tuple(start.encode() for start in starts.split("|") if start)
    counts = _COUNT.findall(pattern)
    fields = tuple((field, field.encode() in counts) for field in compiled.groupindex)
    assert compiled.groups == len(fields), f"{name}: only named groups"
    MESSAGES.append(Message(name, heads, literal.encode(), compiled, source, fields))


def lmcache(name: str, starts: str, literal: str, pattern: bytes) -> None:
    message(name, "lmcache", starts, literal, pattern)
