"""Patterns of the log lines that kvfix understands (for the body of a message), and the words that such lines contain.

A pattern matches the wording of every release. `statements.json` lists the releases, places and levels of each logging
statement, and tests compare it with the patterns. Numbers become int, other values str.
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
#: Groups that take digits only are counts; everything else is text.
_COUNT = re.compile(r"\(\?P<(\w+)>(?:-\?)?\\d\+\)")
#: In a pattern, `{name}` is a count. A value or an escaped character; a group.
_COUNTED, _VALUE = re.compile(r"\{([a-z]\w*)\}"), re.compile(r"<ID>|<END>|\\.|\[(?:\\.|[^]\\])+\]")
_GROUP = re.compile(r"\([^()]*\)")
_PARTS = {
    "<ID>": r"(?P<request>[^\s,'\"()\[\]]+)",
    "<END>": r"(?=\s(?:\x1b?\[3m)?\(\w+\.py:\d+:|\s*$)",  # before the place of LMCache's statement, or the end
    r"\d+)": r"\d{1,18})",  # because int() refuses very long numbers
}


class Message(NamedTuple):
    """One kind of line, from knowledge/messages.toml.

    literal: the longest text of the pattern that each line of this kind contains.
    pattern: its groups are the fields.
    source: `lmcache`, `vllm` or `kvfix` for their log lines, `raised` for the text of an exception.
    counts: names of the fields that are counts.
    """

    name: str
    literal: bytes
    pattern: re.Pattern[bytes]
    source: str
    counts: frozenset[str]

    def values(self, match: re.Match[bytes]) -> Fields:
        """Return {field: count or text} of the groups that matched."""
        found: Fields = {}
        for field, value in zip(self.pattern.groupindex, match.groups(), strict=True):
            if value is not None:
                text = value.decode("utf-8", "replace")
                found[field] = int(value) if field in self.counts else without_tokens(text) if "," in text else text
        return found


def _message(source: str, name: str, pattern: str) -> Message:
    pattern = _COUNTED.sub(r"(?P<\1>\\d+)", pattern)
    whole = pattern
    for short, long in _PARTS.items():
        whole = whole.replace(short, long)
    compiled = re.compile(whole.encode("latin-1"))
    return Message(name, _longest_text(pattern).encode(), compiled, source, frozenset(_COUNT.findall(pattern)))


def _longest_text(pattern: str) -> str:
    """Return the longest part of a pattern that each match contains: no value, no group, no repeat."""
    pattern = _VALUE.sub("\0", pattern)
    while "(" in pattern:
        pattern = _GROUP.sub("\0", pattern)
    return max(re.split(r".[?*+]+|[\0.]", pattern), key=len)


class Knowledge(msgspec.Struct):
    """The tables of `knowledge/messages.toml` and `knowledge/connectors.toml`. problems.py has the records."""

    messages: dict[str, dict[str, str]]
    connectors: dict[str, tuple[str, ...]]
    files: dict[str, str]


KNOWLEDGE = msgspec.json.decode(FILE.read_bytes(), type=Knowledge)
MESSAGES = [
    _message(source, name, pattern)
    for source, patterns in KNOWLEDGE.messages.items()
    for name, pattern in patterns.items()
]
_literals_in = BytesAhoCorasick(
    [message.literal for message in MESSAGES], implementation=Implementation.DFA
).find_matches_as_indexes


def containing(text: bytes) -> list[Message]:
    """Return the messages whose literal is in the text, in the order of MESSAGES."""
    return [MESSAGES[number] for number in sorted({number for number, _, _ in _literals_in(text, overlapping=True)})]


# Every line that matters contains one of these needles. Lines without a needle are not parsed: one search for all
# needles is much faster than parsing a line. Records of known problems add no needle, because kvfix searches for them
# in lines of errors and warnings only.

#: `[2026-11-21 01:41:27,007] LMCache INFO: `, the same in 0.3.0 to 0.5.6.
FRAME = b"] LMCache "
#: A test shows that these needles cover every message of the grammar.
NEEDLES: tuple[bytes, ...] = (
    b" LMCache ", b":lmcache.", b"_mp_connector)", b'{"kind":"',
    b"throughput: ", b"KV load failure", b"FOR_REMOTE_KVS", b"broadcast block", b"Initializing a V", b"assert ",
    b"server version ", b"\xe2\x96\x88  version ", b"vLLM Version", b"vllm/vllm-openai:v",
    b'", line ', b'.py", ', b"KV offloading: EAGLE",
    b"rror", b"ERROR", b"WARN", b"Traceback (", b"xception", b"fault", b"illed", b"terminate called",
    b"kv_connector", b"connector with name", b"[shutdown]", b"Thread ", b"Process ", b".cpp:",
    b"Assertion `", b"undefined symbol", b"shared object", b"GLIBC", b"CXXABI_", b"FATAL", b"core dumped", b"Aborted",
    b"double free", b"free(): ", b"malloc(): ", b"corrupted ", b"code 137", b"Exit Code: ",
    b"cannot import name", b"received by PID", b"backtrace (tid", b"Ping timed out", b"panicked at", b"allocate mask",
    b"KV Transfer m", b"startup complete", b"init engine (", b"500 Internal", b"Cannot access data ",
    b"with signal ", b"Check failed", b"what(): ", b"Fatal: ", b"retry count exceeded",
)  # fmt: skip
#: Finds the needles in a line without LMCache's frame. LeftmostFirst compares many bytes at once.
in_line = BytesAhoCorasick(
    NEEDLES, matchkind=MatchKind.LeftmostFirst, implementation=Implementation.DFA
).find_matches_as_indexes
