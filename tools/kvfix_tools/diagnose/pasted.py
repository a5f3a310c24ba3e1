"""The words of a known problem somewhere in a short text: in prose, in a title, or in lines that no logger wrote so.

Only asked where reading line by line knows nothing: what is found here is never certain.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from kvfix_tools.diagnose import log_formats, problems
from kvfix_tools.diagnose.log_line import LogLine
from kvfix_tools.diagnose.signs import PLACE, Failed, Sign, Stuck, fits, in_words, is_pythons, longest, raised_in, tells

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.problems import Problem

#: Bytes of an input that is short.
SHORT = 64 << 10
#: Characters of a text of few lines.
_FEW = 4 << 10
#: Characters of a sign, blanks not counted: so many that the text may be this problem; that it needs no more than them.
_SOME, _MANY = 16, 24
#: Of a general sign, where nothing else is known of the text; and what stands before it, or nothing.
_ENOUGH, _BEFORE = 14, ("", "#", "`", ":", "]", ")", '"', "'", ">", "-", "*")
#: Characters that a sign has beyond a text of Python's own.
_OWN = 10
#: A line at a level at which nothing has failed.
_NORMAL = re.compile(rb"(?!# ).{0,90}?(?:(?<![\w.])(?:INFO|DEBUG|EVENT|TRACE)\b|(?<!\S)I(?:\d{4}){1,2} \d\d:)")
#: What a text quotes as a message.
QUOTED = re.compile(rb"(?<!`)`([^`\n]{12,300})`(?!`)")
#: Blanks and marks of Markdown: where they stand depends on who pasted it.
_BLANKS = re.compile(r"[\s`]+")


class _Words(NamedTuple):
    """Of a sign, without blanks. text: its parts between values. also: what the text has to hold too, if those are few.

    function: in which it failed. common: a general record has this text, so that any code may raise it. pythons: it is
    Python's or the system's own.
    """

    text: tuple[str, ...]
    source: str
    also: tuple[str, ...]
    function: str
    common: bool
    pythons: bool
    kind: str

    def weight(self, pasted: str, quoted: tuple[str, ...], within: set[str]) -> int:
        """How many characters of the sign the text has; 0: it is not there. quoted: what it quotes as a message.

        within: functions of the failure's own traceback."""
        if any(part not in pasted for part in (*self.text, self.source)) or not self._in_order(pasted):
            return 0
        own = sum(map(len, self.text)) + len(self.source)
        if own < _SOME or (self.common and not self.function):
            return 0
        if self.source and not self.text and not self._failed(pasted):
            return 0
        too_few = own < _MANY and not self._is_quoted(quoted)
        if (too_few or self.common or self.pythons) and not all(each in pasted for each in self.also):
            return 0
        if not self.function:
            return own
        # Of two with the same words the one without a function, where the text does not show it.
        return own + (len(self.function) if self.function in pasted or self.function in within else -1)

    def _is_quoted(self, quoted: tuple[str, ...]) -> bool:
        return bool(self.text) and any(each.startswith(self.text[0]) for each in quoted)

    def _failed(self, pasted: str) -> bool:
        """Whether the text says that this line of code failed, and does not only quote code with it."""
        if self.function:
            return self.source.startswith("assert") or self.kind in pasted
        return any(f"{before}{self.source}" in pasted for before in self._heads())

    def _heads(self) -> tuple[str, ...]:
        """What stands before code that failed: its exception, a log's head, or, before an assertion, a sentence."""
        heads = (self.kind, f"{self.kind}:", f"{self.kind}in", "]:", "]")
        return (*heads, "with", "(", "/", "of", "by", "hits") if self.source.startswith("assert") else heads

    def _in_order(self, pasted: str) -> bool:
        return len(self.text) < 2 or re.search(".{0,600}?".join(map(re.escape, self.text)), pasted) is not None


def stripped(text: bytes) -> bytes:
    """What is kept of a short input: no line that its logger calls normal."""
    return b"\n".join(log_formats.without_head(line) for line in text.split(b"\n") if not _NORMAL.match(line))


class Known(NamedTuple):
    """words: its sign, as it looks in a log."""

    record: Problem
    words: str


def known_by_words(log: Diagnosis, general: bool) -> Known | None:
    """Of the records that may concern it the one whose sign has the most words in what was pasted; None: none has.

    general: whether a general record knows the failure; then the text has to name the function too."""
    pasted = "".join(_squeezed(text) for text in log.pasted)
    quoted = tuple(_squeezed(each) for text in log.pasted for each in QUOTED.findall(text))
    found = {each.rule.code for each in log.findings}
    first = log.failures.first
    within = {function for _, _, function in first.fields.get("frames", ())} if first is not None else set()
    best, most = None, 0
    for record, words, sign in _known():
        may_be = not general or (words.function and words.function in pasted)
        weight = words.weight(pasted, quoted, within) if may_be else 0
        if weight > most and record.code not in found and record.concerns(log) and not _refuted(sign, words, first):
            best, most = Known(record, in_words(sign)), weight
    return best


def general_by_words(log: Diagnosis) -> Known | None:
    """The general record with the longest sign at the beginning of a line or a quotation; None: there is none."""
    pasted = "\n".join(text.decode("utf-8", "replace") for text in log.pasted)
    for words, record in _general():
        at = pasted.find(words)
        while at >= 0:
            if pasted[:at].rpartition("\n")[2].rstrip(" ")[-1:] in _BEFORE:
                return Known(record, words)
            at = pasted.find(words, at + 1)
    return None


def headless(log: Diagnosis) -> Known | None:
    """The general record with the longest sign that begins a line of few, which has no logger's head."""
    lines = [line.strip() for text in log.whole for line in text.decode("utf-8", "replace").splitlines()]
    if sum(map(len, lines)) > _FEW:
        return None
    known = (Known(record, words) for words, record in _general() if any(line.startswith(words) for line in lines))
    return next(known, None)


def _refuted(sign: Sign, words: _Words, line: LogLine | None) -> bool:
    """Whether the words are this exception's own, and its class or its frames are others than those of the sign."""
    if line is None or line.name != "raised" or not isinstance(sign, Failed):
        return False
    fields = line.fields
    if fields["frames"] and not (fields["type"] or fields["text"]):
        return False  # cut before its exception: its last frame is any on the way there
    own = _BLANKS.sub("", f"{fields['text']}{fields['source']}")
    if own and any(part not in own for part in (*words.text, words.source)):
        return False
    return bool(fields["type"] and sign.kind not in ("", fields["type"])) or (
        bool(fields["frames"]) and fits(sign._replace(kind="", text="", source=""), line) is None
    )


@lru_cache(maxsize=8)
def _squeezed(text: bytes) -> str:
    return _BLANKS.sub("", text.decode("utf-8", "replace"))


@lru_cache(maxsize=1)
def _known() -> tuple[tuple[Problem, _Words, Sign], ...]:
    return tuple(
        (record, _words(sign), sign)
        for record in problems.catalogue()
        if not record.general and not record.quotes
        for sign in record.shows
        if not isinstance(sign, Stuck)
    )


@lru_cache(maxsize=1)
def _general() -> list[tuple[str, Problem]]:
    """(a sign, its record) of general records whose sign says enough, the longest first."""
    signs = ((longest(sign.text), each) for each in problems.catalogue() if each.general for sign in each.shows)
    return sorted((sign for sign in signs if len(sign[0]) >= _ENOUGH), key=lambda sign: -len(sign[0]))


def _words(sign: Sign) -> _Words:
    file, function = raised_in(sign)
    named = tells(function)
    where = getattr(sign, "within", "") if not function else function if named or not file else file.rpartition("/")[2]
    also = [where.strip("/")]
    if isinstance(sign, Failed):
        also += [sign.kind, sign.through.strip("/")]
    parts = PLACE.split(sign.text.rstrip("."))[::2]  # a sentence's end; before a value a dot is a part of the name
    text = tuple(filter(None, (_BLANKS.sub("", each) for each in parts)))
    source = _BLANKS.sub("", sign.source) if isinstance(sign, Failed) else ""
    common = bool(sign.text) and any(
        len(sign.text) < len(each) + _OWN and (each in sign.text or sign.text in each) for each in _common()
    )
    kind = getattr(sign, "kind", "")
    named_in = function if named else ""
    return _Words(text, source, tuple(filter(None, also)), named_in, common, is_pythons(sign.text), kind)


@lru_cache(maxsize=1)
def _common() -> tuple[str, ...]:
    signs = (sign for record in problems.catalogue() if record.general for sign in record.shows)
    return tuple(filter(None, (longest(sign.text) for sign in signs)))
