"""An exception or an assertion that a text names: by its text, its place, its function, and no traceback.

Only asked where reading line by line knows nothing: what is found here is never certain.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose import checks, findings, problems, problems_cut
from kvfix_tools.diagnose.log_line import LogLine
from kvfix_tools.diagnose.signs import tells
from kvfix_tools.diagnose.tracebacks import Raised

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.findings import Answer, LogRule
    from kvfix_tools.diagnose.problems import Problem

#: An assertion in prose or in a piece of source, and names of functions around it; how many of these are tried.
_ASSERTED = re.compile(rb"\b(?:assert |AssertionError: (?=[\w.()]+ (?:[=!<>]=|[<>]|is|in|not) ))([^`\n#]{8,200})")
_NAME, _NAMES = re.compile(rb"\b_?[a-z]\w*_\w+"), 40
#: Where an assertion goes on in the next line.
_OF_ONE = re.compile(rb"(?<=AssertionError:)\s*\n\s+|\n\s+(?=(?:[=!<>]=|[<>]|and|or|in|is|not) )")
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


def by_assertion_in_function(log: Diagnosis, of: str = "") -> tuple[LogRule, Answer] | None:
    """The finding that knows an assertion of which the text has the source and names the function.

    of: what the failure itself has of the assertion; then the function may be the one in which it stands."""
    for text in log.pasted:
        for condition, named, functions, is_known in _assertions(text):
            known = [name for name in named if name in functions] or (functions if of else [])
            if is_known and len(known) == 1 and condition in (of or condition):
                found = _asserting(log, condition, known)
                if found is not None:
                    return found
    return None


def by_assertion(log: Diagnosis) -> tuple[LogRule | Problem, Answer] | None:
    """The finding that knows an assertion of which the text has no more than the words; None: there is none."""
    for text in log.pasted:
        for condition, named, functions, _ in _assertions(text):
            found = _asserting(log, condition, [*named, *functions])
            if found is not None:
                return found
            raised = Raised("AssertionError", "", [], f"assert {condition}", False)
            record = problems_cut.raised(log, _raised(raised, condition.encode()), None)
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


def by_exception(log: Diagnosis, particular: bool = False) -> Answer | None:
    """The record of an exception that a sentence names with its text; None: no record knows one.

    particular: general records are none."""
    for text in log.pasted:
        for found in list(_EXCEPTION.finditer(text))[:_NAMES]:
            kind, words = found["kind"].decode(), found["text"].decode("utf-8", "replace").strip()
            line = _raised(Raised(kind, words, [], "", False), found[0])
            record = _only(log, line) or (None if particular else problems.general(line))
            if record is not None:
                return _named(record, line)
        for lacks in _LACKS.finditer(text.decode("utf-8", "replace")):
            words = f"'{lacks[1]}' object has no attribute '{lacks[2]}'"
            line = _raised(Raised("AttributeError", words, [], "", False), lacks[0].encode())
            record = _only(log, line)
            if record is not None:
                return _named(record, line)
    return None


def _named(record: Problem, line: LogLine) -> Answer:
    sentence = f"the text names {line.evidence.text[:200]}"
    return findings.Answer(sentence, request="", verdict="unknown", record=record)


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


def _assertions(text: bytes) -> Iterator[tuple[str, list[str], list[str], bool]]:
    """(condition, names in the text that may be functions, functions of the releases that assert it, whether any does)

    Prose may go on behind a condition without a mark: one that the releases have ends where theirs does."""
    named = list(dict.fromkeys(name.decode() for name in _NAME.findall(text)))[:_NAMES]
    for asserted in _ASSERTED.findall(_OF_ONE.sub(b" ", text)):
        words = _closed(asserted.decode("utf-8", "replace").strip())
        condition = checks.begun_by(words)
        yield condition or words, named, sorted(checks.functions_of(condition or words)), bool(condition)


def _closed(condition: str) -> str:
    """Without the brackets at its end that a sentence opened."""
    while condition.endswith(")") and condition.count(")") > condition.count("("):
        condition = condition[:-1].rstrip()
    return condition


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


def _raised(raised: Raised, body: bytes) -> LogLine:
    fields = {**raised.fields, "meaning": "", "level": "", "place": ""}
    return LogLine("raised", fields, None, "", "", 0, body)
