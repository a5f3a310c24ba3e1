"""A line of a log that matters for the diagnosis, and the line's text for reports."""

import re
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from kvfix_tools import redact

Fields = dict[str, Any]
#: A colour code. Pasted logs lose the escape character, and Docker's JSON writes this character as \u001b. A code
#: without this character must have a number, because the `[m` of `[multiproc_executor.py]` is no colour code.
ANSI = rb"(?:(?:\x1b|\\u001b)\[[0-9;]*m|\[[0-9;]+m)"
#: LMCache ends a line with ` (vllm_v1_adapter.py:1476:lmcache.integration.vllm.vllm_v1_adapter)`.
_TRAILER = re.compile(rb" ?(?:" + ANSI + rb")?\(([\w]+\.py):(\d+):([\w.]+)\)(?:" + ANSI + rb")?(?:\\n\x22.*|\s*)$")
_COLOURS = re.compile(ANSI)
#: Lists of token ids in dumps of requests. Reports omit these lists, because token ids reveal prompts.
_TOKEN_IDS = re.compile(r"\d+(?:, ?\d+){7,}")


class Evidence(NamedTuple):
    """A line of the input, with the text that reports show for the line."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class LogLine(msgspec.Struct, frozen=True):
    """A line that matters for the diagnosis.

    name: the kind of line, usually a name of a message in grammar.py. `raised` is an exception (tracebacks.py).
        `died` is a process that died without an exception. `logged` is any other error or warning.
    fields: the values in the message. time: seconds since 1970 by the log's clock.
    number: number of the line in its file, from 1. body: the message, cut to 16 kB.
    """

    name: str
    fields: Fields
    time: float | None
    process: str
    file: str
    number: int
    body: bytes

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.file, self.number, shown(self.body))

    @property
    def request(self) -> str:
        return str(self.fields.get("request", ""))


def without_colours(text: bytes) -> bytes:
    return _COLOURS.sub(b"", text)


def without_tokens(text: str) -> str:
    return _TOKEN_IDS.sub("<numbers left out>", text)


def statement_place(body: bytes) -> tuple[str, int] | None:
    """Return the file name and line number of the LMCache statement that logged this line."""
    match = _TRAILER.search(body) if b".py:" in body else None
    return (match[1].decode(), int(match[2][:9])) if match else None


@lru_cache(maxsize=256)
def without_place(body: bytes) -> str:
    """Return the message without the file and line of the logging statement."""
    return _TRAILER.sub(b"", body).decode("utf-8", "replace")


@lru_cache(maxsize=256)
def shown(body: bytes) -> str:
    """Return the message without colours, secrets, control characters, and the logging statement's file and line."""
    text = without_colours(_TRAILER.sub(b"", body)).decode("utf-8", "replace")
    text = redact.text(without_tokens(text))
    return "".join(sign if sign.isprintable() else " " for sign in text).strip()[:600]
