"""Patterns for the log messages that kvfix understands, and the words by which kvfix finds the messages in a log.

A pattern matches a message in all releases. `statements.json` lists the releases, places and levels of each logging
statement, and tests compare `statements.json` with the patterns.
"""

import re
from pathlib import Path
from typing import NamedTuple

import msgspec
from ahocorasick_rs import BytesAhoCorasick, Implementation, MatchKind

from kvfix_tools.diagnose.log_line import Fields, without_tokens

#: `make knowledge` compiles `knowledge/*.toml` into this file.
FILE = Path(__file__).with_name("knowledge.json")
#: Kinds of lines that name vLLM's release.
RELEASE_IN = ("vllm_version", "vllm_server", "vllm_environment", "vllm_image")
#: Finds the groups that match only digits. kvfix turns the values of these groups into ints.
_COUNT = re.compile(r"\(\?P<(\w+)>(?:-\?)?\\d\+\)")
#: `{name}` in a pattern is a count. _VALUE finds a part of a pattern that is not fixed text. _GROUP finds a group.
_COUNTED, _VALUE = re.compile(r"\{([a-z]\w*)\}"), re.compile(r"<ID>|<END>|\\.|\[(?:\\.|[^]\\])+\]")
_GROUP = re.compile(r"\([^()]*\)")
_PARTS = {
    "<ID>": r"(?P<request>[^\s,'\"()\[\]]+)",
    "<END>": r"(?=\s(?:\x1b?\[3m)?\(\w+\.py:\d+:|\s*$)",  # before LMCache's ` (file.py:7:...)`, or at the line's end
    r"\d+)": r"\d{1,18})",  # because int() refuses very long numbers
}


class Message(NamedTuple):
    """A kind of line, as knowledge/messages.toml defines it.

    literal: the longest fixed text of the pattern. Every line of this kind contains this text.
    pattern: a regular expression, whose named groups are the fields.
    source: the package that logs the line (`lmcache`, `vllm` or `kvfix`), or `raised` for the text of an exception.
    counts: names of the fields whose values are counts.
    """

    name: str
    literal: bytes
    pattern: re.Pattern[bytes]
    source: str
    counts: frozenset[str]

    def values(self, match: re.Match[bytes]) -> Fields:
        """Return the fields of all groups that matched, with an int for a count and a str for a text."""
        found: Fields = {}
        for field, value in zip(self.pattern.groupindex, match.groups(), strict=True):
            if value is not None and field in self.counts:
                found[field] = int(value)
            elif value is not None:
                text = value.decode("utf-8", "replace")
                found[field] = without_tokens(text) if "," in text else text
        return found


def _message(source: str, name: str, pattern: str) -> Message:
    pattern = _COUNTED.sub(r"(?P<\1>\\d+)", pattern)
    whole = pattern
    for short, long in _PARTS.items():
        whole = whole.replace(short, long)
    compiled = re.compile(whole.encode("latin-1"))
    return Message(name, _longest_text(pattern).encode(), compiled, source, frozenset(_COUNT.findall(pattern)))


def _longest_text(pattern: str) -> str:
    """Return the longest fixed text in the pattern, outside values, groups and repeats."""
    pattern = _VALUE.sub("\0", pattern)
    while "(" in pattern:
        pattern = _GROUP.sub("\0", pattern)
    return max(re.split(r".[?*+]+|[\0.]", pattern), key=len)


class Tables(msgspec.Struct):
    """The tables of messages.toml, connectors.toml and words.toml in knowledge/. problems.py reads the other tables."""

    messages: dict[str, dict[str, str]]
    connectors: dict[str, tuple[str, ...]]
    files: dict[str, str]
    needles: tuple[str, ...]
    died: tuple[str, ...]
    deaths: tuple[str, ...]
    echoes: tuple[str, ...]
    bare: tuple[tuple[str, str], ...]
    owners: dict[str, str]


TABLES = msgspec.json.decode(FILE.read_bytes(), type=Tables)
MESSAGES = [
    _message(source, name, pattern)
    for source, patterns in TABLES.messages.items()
    for name, pattern in patterns.items()
]
_literals_in = BytesAhoCorasick(
    [message.literal for message in MESSAGES], implementation=Implementation.DFA
).find_matches_as_indexes


def containing(text: bytes) -> list[Message]:
    """Return the messages whose literal is in the text, in the order of MESSAGES."""
    return [MESSAGES[number] for number in sorted({number for number, _, _ in _literals_in(text, overlapping=True)})]


#: A part of the prefix `[2026-11-21 01:41:27,007] LMCache INFO: ` of each line that LMCache 0.3.0 to 0.5.6 logs.
FRAME = b"] LMCache "
NEEDLES = tuple(needle.encode() for needle in TABLES.needles)
#: Finds NEEDLES in a line without FRAME. LeftmostFirst compares many bytes at once, so the search is fast.
in_line = BytesAhoCorasick(
    NEEDLES, matchkind=MatchKind.LeftmostFirst, implementation=Implementation.DFA
).find_matches_as_indexes
