"""The words of a known problem somewhere in a short text: in prose, in a title, or in lines that no logger wrote so.

Only asked where reading line by line knows nothing: what is found here is never certain.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from kvfix_tools.diagnose import checks, findings, log_formats, problems, problems_cut
from kvfix_tools.diagnose.log_line import LogLine
from kvfix_tools.diagnose.signs import PLACE, Failed, Sign, Stuck, fits, in_words, is_pythons, longest, raised_in, tells
from kvfix_tools.diagnose.tracebacks import Raised

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.findings import Answer, LogRule
    from kvfix_tools.diagnose.problems import Problem

#: Bytes of an input that is short.
SHORT = 64 << 10
#: Characters of a sign, blanks not counted: so many that the text may be this problem; that it needs no more than them.
_SOME, _MANY = 16, 24
#: Of a general sign, where nothing else is known of the text; and what stands before it, or nothing.
_ENOUGH, _BEFORE = 14, ("", "#", "`", ":", "]", ")", '"', "'", ">", "-", "*")
#: Characters that a sign has beyond a text of Python's own.
_OWN = 10
#: A line at a level at which nothing has failed.
_NORMAL = re.compile(rb"(?!# ).{0,90}?(?:(?<![\w.])(?:INFO|DEBUG|EVENT|TRACE)\b|(?<!\S)I(?:\d{4}){1,2} \d\d:)")
#: An assertion in prose or in a piece of source, and names of functions around it; how many of these are tried.
_ASSERTED = re.compile(rb"\b(?:assert |AssertionError: (?=[\w.()]+ (?:[=!<>]=|[<>]|is|in|not) ))([^`\n#]{8,200})")
_NAME, _NAMES = re.compile(rb"\b_?[a-z]\w*_\w+"), 40
#: A sentence that says that one failed; names in what it asserts.
_SAYS, _OWN_NAMES = re.compile(r"(?i)\bassert(?:s|ion)?\b|\u65ad\u8a00"), re.compile(r"\w+(?:\.\w+)+|\w+_\w+")
#: An exception with its text in prose.
_EXCEPTION = re.compile(
    rb"(?<![\w.])(?P<kind>(?:[A-Za-z_]\w*\.)*(?:[A-Za-z_]\w*)?(?:Error|Exception))"
    rb"(?:: |\(\"(?=[^`\n]*\"\)))(?P<text>[^`\n]{4,300})"
)
#: That an object lacks an attribute, as a title says it without the exception's name.
_LACKS = re.compile(r"(?<!Error: )(?<![\w.'])'?([A-Z]\w{7,})['`]? (?:object )?has no attribute ['`\"](\w*_\w+)['`\"]")
#: An exception of which a sentence says the file and the line.
_AT = re.compile(r"\b([A-Z]\w*Error)\b[^\n]{0,40}?\b(?:at|in) `?((?:[\w-]+/)*\w+_\w+\.py):(\d+)")
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

    def weight(self, pasted: str, quoted: tuple[str, ...]) -> int:
        """How many characters of the sign the text has; 0: it is not there. quoted: what it quotes as a message."""
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
        return own + (len(self.function) if self.function in pasted else 0)

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
    best, most = None, 0
    for record, words, sign in _known():
        weight = words.weight(pasted, quoted) if not general or (words.function and words.function in pasted) else 0
        if weight > most and record.code not in found and record.concerns(log) and not _refuted(sign, words, first):
            best, most = Known(record, in_words(sign)), weight
    return best


def by_named_assertion(log: Diagnosis, of: str = "") -> tuple[LogRule, Answer] | None:
    """The finding that knows an assertion of which the text has the source and names the function.

    of: what the failure itself has of the assertion; then the function may be the one in which it stands."""
    for text in log.pasted:
        named = list(dict.fromkeys(name.decode() for name in _NAME.findall(text)))[:_NAMES]
        for asserted in _ASSERTED.findall(text):
            words = asserted.decode("utf-8", "replace").strip().rstrip(")")
            condition = checks.begun_by(words)
            functions = checks.functions_of(condition) if condition else set()
            known = [name for name in named if name in functions] or (sorted(functions) if of else [])
            if len(known) == 1 and condition in (of or condition):
                found = _asserting(log, condition, known)
                if found is not None:
                    return found
    return None


def by_assertion(log: Diagnosis) -> tuple[LogRule | Problem, Answer] | None:
    """The finding that knows an assertion of which the text has no more than the words; None: there is none."""
    for text in log.pasted:
        for asserted in _ASSERTED.findall(text):
            words = asserted.decode("utf-8", "replace").strip().rstrip(")")
            # Prose may go on behind it without a mark.
            condition = checks.begun_by(words) or words
            named = [name.decode() for name in list(dict.fromkeys(_NAME.findall(text)))[:_NAMES]]
            found = _asserting(log, condition, [*named, *sorted(checks.functions_of(condition))])
            if found is not None:
                return found
            raised = Raised("AssertionError", "", [], f"assert {condition}", False)
            record = problems_cut.raised(log, _raised(raised, asserted), None)
            if record is not None:
                return record, findings.Answer(f"the text names the assertion {condition}")
        described = checks.asserted_by_names(text.decode("utf-8", "replace"))
        if described is not None:
            function, condition = described
            known = _asserting(log, condition, [function])
            if known is not None:
                return known
    return _by_function(log)


def by_place(log: Diagnosis) -> tuple[LogRule, Answer] | None:
    """The finding that knows an exception by the file in which a sentence says that it was raised."""
    for text in log.pasted:
        for found in _AT.finditer(text.decode("utf-8", "replace")):
            line = _raised(Raised(found[1], "", [(found[2], int(found[3]), "")], "", False), found[0].encode())
            known = _looked(log, line)
            if known is not None:
                return known[0], known[1]._replace(sentence=f"the text names {found[0]}")
    return None


def _asserting(log: Diagnosis, condition: str, functions: list[str]) -> tuple[LogRule, Answer] | None:
    """The finding that knows this assertion in one of these functions."""
    for function in dict.fromkeys(functions):
        line = _raised(Raised("AssertionError", "", [("", 0, function)], f"assert {condition}", False), b"")
        known = _looked(log, line)
        if known is not None:
            return known
    return None


def _looked(log: Diagnosis, line: LogLine) -> tuple[LogRule, Answer] | None:
    """The first finding of exceptions that knows this one."""
    answers = ((rule, rule.look(log, line)) for rule in findings.rules().get("raised", ()))
    return next(((rule, answer) for rule, answer in answers if answer is not None), None)


def _only(log: Diagnosis, line: LogLine) -> Problem | None:
    """The record of this failure; None: there is none, or more than one."""
    of_this = [each for each in problems.at(line) if each.concerns(log)]
    return of_this[0] if len(of_this) == 1 else None


def _by_function(log: Diagnosis) -> tuple[LogRule | Problem, Answer] | None:
    """The finding of an assertion that a sentence names by its function alone: the only one that the releases have
    there, or of several the one whose own names the text has."""
    pasted = "\n".join(text.decode("utf-8", "replace") for text in log.pasted)
    for line in pasted.split("\n"):
        for function, conditions in checks.asserted_in().items() if _SAYS.search(line) else ():
            if not tells(function) or function not in line:
                continue
            said = {each: sum(name in pasted for name in _OWN_NAMES.findall(each)) for each in conditions}
            most = max(said.values())
            likely = [each for each, names in said.items() if names == most]
            if len(likely) > 1 or (len(said) > 1 and not most):
                continue
            sentence = f"the text says that an assertion failed in {function}"
            known = _asserting(log, likely[0], [function])
            if known is not None:
                return known[0], known[1]._replace(sentence=sentence)
            frames = [("", 0, function)]
            raised = _raised(Raised("AssertionError", "", frames, f"assert {likely[0]}", False), line.encode())
            record = _only(log, raised)
            if record is not None:
                return record, findings.Answer(sentence)
    return None


def by_exception(log: Diagnosis, particular: bool = False) -> tuple[Problem, LogLine] | None:
    """The record of an exception that a sentence names with its text, and that; None: no record knows one.

    particular: general records are none."""
    for text in log.pasted:
        for found in list(_EXCEPTION.finditer(text))[:_NAMES]:
            kind, words = found["kind"].decode(), found["text"].decode("utf-8", "replace").strip()
            line = _raised(Raised(kind, words, [], "", False), found[0])
            record = _only(log, line) or (None if particular else problems.general(line))
            if record is not None:
                return record, line
        for lacks in _LACKS.finditer(text.decode("utf-8", "replace")):
            words = f"'{lacks[1]}' object has no attribute '{lacks[2]}'"
            line = _raised(Raised("AttributeError", words, [], "", False), lacks[0].encode())
            record = _only(log, line)
            if record is not None:
                return record, line
    return None


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


def _raised(raised: Raised, body: bytes) -> LogLine:
    fields = {**raised.fields, "meaning": "", "level": "", "place": ""}
    return LogLine("raised", fields, None, "", "", 0, body)


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
