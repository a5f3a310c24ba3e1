"""Log lines that were pasted without their prefix: a whole log statement of a release, or an exception.

A line without a prefix counts only in a log, or in an input with few other lines. In a manifest, in documentation or in
the log of another program, the same words are not a message of an engine.
"""

from __future__ import annotations

import enum
import re
from functools import lru_cache

from kvfix_tools.diagnose import checks, grammar, log_formats, statements
from kvfix_tools.diagnose.tracebacks import Part, by_name


class Headless(enum.IntEnum):
    """The lines without a logger's prefix that count: none, only whole messages, or all lines of a log."""

    NONE = 1
    WHOLE = 2
    ALL = 3


#: Maximum number of other lines in an input of pasted messages.
FEW = 5
#: Minimum number of letters in a statement, without its values, to recognize the statement.
_TELLS = 16
_VALUE = "\0"
#: A heading of a page, or a comment of a file with settings.
_HEADING = re.compile(rb"\s*#{1,6} \S")


def are_few_others(lines: list[bytes]) -> bool:
    """Return True if at most FEW lines of an input are neither log lines, nor traceback lines, nor messages."""
    others, in_traceback = 0, False
    for line in lines:
        if _HEADING.match(line):
            return False
        part = Part(log_formats.without_prefix(line))
        in_traceback = part.sure or (in_traceback and part.indented)
        if part.text and not in_traceback and by_name(part.text, anywhere=False) is None and kind(part.text) is None:
            others += 1
            if others > FEW:
                return False
    return True


@lru_cache(maxsize=1024)
def kind(body: bytes) -> str | None:
    """Return the kind of line (grammar, or "logged") if this body is a whole statement of a release, else None."""
    text = " ".join(body.decode("utf-8", "replace").split())
    for name, longest, pattern in _statements():
        if longest in text and pattern.fullmatch(text):
            return name
    return None


@lru_cache(maxsize=1)
def _statements() -> list[tuple[str, str, re.Pattern[str]]]:
    """Return (kind of line, longest part without a value, pattern) of each statement of the releases."""
    read = {message.name for message in grammar.MESSAGES if message.source in ("lmcache", "vllm")}
    templates = [
        (row.message, statements.sample(row.template, _VALUE))
        for rows in statements.known().values()
        for row in rows
        if row.message in read
    ]
    templates += [
        ("logged", statements.sample(check.text, _VALUE))
        for _, table in checks.known().values()
        for *_, check in table
        if not check.kind
    ]
    made = []
    for name, template in dict.fromkeys(templates):
        parts = " ".join(template.strip().partition("\n")[0].split()).split(_VALUE)
        longest = max(parts, key=len)
        if sum(map(len, parts)) >= _TELLS:
            made.append((name, longest, re.compile(".{0,600}?".join(map(re.escape, parts)))))
    return made
