"""Patterns for the messages of log lines that kvfix understands, and the words by which kvfix finds these lines.

A pattern matches the wording of every release. `statements.json` lists the releases, places and levels of each logging
statement, and tests compare the file with the patterns. A number in a line becomes an int, any other value a str.
"""

import re
from pathlib import Path
from typing import NamedTuple

import msgspec
from ahocorasick_rs import BytesAhoCorasick, Implementation, MatchKind

from kvfix_tools.diagnose.log_line import Fields, without_tokens

#: `make knowledge` compiles `knowledge/*.toml` to this file.
FILE = Path(__file__).with_name("knowledge.json")
#: Kinds of lines that name vLLM's release.
RELEASE_IN = ("vllm_version", "vllm_server", "vllm_environment", "vllm_image")
#: A group that matches only digits is a count. All other groups are text.
_COUNT = re.compile(r"\(\?P<(\w+)>(?:-\?)?\\d\+\)")
#: `{name}` in a pattern is a count. _VALUE finds a part that is not fixed text, and _GROUP finds a group.
_COUNTED, _VALUE = re.compile(r"\{([a-z]\w*)\}"), re.compile(r"<ID>|<END>|\\.|\[(?:\\.|[^]\\])+\]")
_GROUP = re.compile(r"\([^()]*\)")
_PARTS = {
    "<ID>": r"(?P<request>[^\s,'\"()\[\]]+)",
    "<END>": r"(?=\s(?:\x1b?\[3m)?\(\w+\.py:\d+:|\s*$)",  # before the file of LMCache's statement, or the end
    r"\d+)": r"\d{1,18})",  # because int() refuses very long numbers
}


class Message(NamedTuple):
    """A kind of line, as knowledge/messages.toml defines it.

    literal: the longest fixed text of the pattern. Every line of this kind contains the literal.
    pattern: each named group is a field.
    source: `lmcache`, `vllm` or `kvfix` for a log line of this package, `raised` for the text of an exception.
    counts: names of the fields that are counts.
    """

    name: str
    literal: bytes
    pattern: re.Pattern[bytes]
    source: str
    counts: frozenset[str]

    def values(self, match: re.Match[bytes]) -> Fields:
        """Return {field: its count or text} for the groups that matched."""
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
    """Return the longest text that every match of the pattern contains. This text has no values, groups or repeats."""
    pattern = _VALUE.sub("\0", pattern)
    while "(" in pattern:
        pattern = _GROUP.sub("\0", pattern)
    return max(re.split(r".[?*+]+|[\0.]", pattern), key=len)


class Tables(msgspec.Struct):
    """The tables of messages.toml, connectors.toml and words.toml in knowledge/. problems.py reads the other files."""

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


#: Part of `[2026-11-21 01:41:27,007] LMCache INFO: `, with which LMCache 0.3.0 to 0.5.6 begins each line.
FRAME = b"] LMCache "
NEEDLES = tuple(needle.encode() for needle in TABLES.needles)
#: Find the needles in a line of another logger (no FRAME). LeftmostFirst is fast: it compares many bytes at once.
in_line = BytesAhoCorasick(
    NEEDLES, matchkind=MatchKind.LeftmostFirst, implementation=Implementation.DFA
).find_matches_as_indexes
