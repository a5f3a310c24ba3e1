"""Records of an exception without its frames, by its text, what it asserts, or its function where that is named.

Such a sign is not whole, so that nothing here is certain, and of several that fit equally well none is it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from kvfix_tools.diagnose import checks, problems
from kvfix_tools.diagnose.failures import HOOKS
from kvfix_tools.diagnose.signs import PLACE, Failed, fits, is_pythons, longest, pattern, raised_in, tells

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine
    from kvfix_tools.diagnose.problems import Problem

#: Letters of a message, without its values, from which on it is no other's.
_LETTERS = 10
#: Lines of what was pasted that are looked at.
_LINES = 200


class _Sign(NamedTuple):
    """letters: of its text and of what it asserts. function: in which it was raised, if its name says something. file:
    which has to be named beside it."""

    record: Problem
    sign: Failed
    letters: int
    function: str
    file: str


def raised(log: Diagnosis, line: LogLine, general: Problem | None) -> Problem | None:
    """The record of an exception whose frames were left out; None: there is none, or several.

    It fits by its text or what it asserts, or by its class and the function, where what was pasted names that.
    general: the record that says of it what may come of any code; the particular one has to have more words.
    """
    if line.name != "raised" or line.fields["fault"] or line.fields["frames"]:
        return None
    known = general.shows if general is not None else ()
    least = max((len(longest(sign.text)) for sign in known if fits(sign, line) is not None), default=0)
    pasted = b"\n".join(log.pasted).decode("utf-8", "replace")
    for other in log.failures.raised:  # tracebacks that were cut
        pasted += "\n".join(["", other.fields["source"], *(frame[2] for frame in other.fields["frames"][-2:])])
    asserting = checks.functions_of(line.fields["source"])
    found: list[tuple[tuple[bool, int], Problem]] = []
    for each in _failed():
        if asserting and each.function not in asserting and not (each.sign.text or each.sign.source):
            continue  # any failure of a function that has not asserted this
        named = bool(each.function) and each.function in pasted and each.file in pasted
        letters = each.letters + (len(each.function) if named else 0)
        if letters > (0 if named else max(least, _LETTERS)):
            sign = each.sign._replace(
                within="", through="", source="" if each.sign.source in pasted else each.sign.source
            )
            if fits(sign, line) is not None and each.record.concerns(log):
                found.append(((named, letters), each.record))
    return _only(found)


def in_prose(log: Diagnosis) -> Problem | None:
    """The record of an exception that a sentence names together with its function; None: there is none, or several."""
    lines = [line.decode("utf-8", "replace") for text in log.pasted for line in text.split(b"\n")][:_LINES]
    signs = [each for each in _failed() if each.function and any(each.file in line for line in lines)]
    quoted = any("assert " in line for line in lines)  # then that tells which
    fitting = (
        (each, line) for line in lines for each in signs if each.function in line and _is_named(each.sign, line, quoted)
    )
    return _only(
        [
            ((True, (each.letters if each.sign.source in line else 0) + len(each.function)), each.record)
            for each, line in fitting
            if each.record.concerns(log)
        ]
    )


def _is_named(sign: Failed, text: str, quoted: bool) -> bool:
    """Whether the text names this exception: `IndexError` in `_get_remote_rank`, `AssertionError` in `get_finished`."""
    if sign.text and not (longest(sign.text) in text and pattern(sign.text).search(text)):
        return False
    if sign.source.startswith("assert") and not (sign.text or quoted) and "AssertionError" in text:
        another = checks.asserted_by_names(text)
        return another is None or another[1] in sign.source
    return sign.source in text and bool(sign.text or sign.source or (sign.kind and sign.kind in text))


def _only(found: list[tuple[tuple[bool, int], Problem]]) -> Problem | None:
    """The record whose function is named, or with the most letters; None: there are several, or none."""
    most = max((fit for fit, _ in found), default=None)
    best = {record.code: record for fit, record in found if fit == most}
    return next(iter(best.values())) if len(best) == 1 else None


@lru_cache(maxsize=1)
def _failed() -> tuple[_Sign, ...]:
    particular = [each for each in problems.catalogue() if not each.general]
    made = []
    for record, sign in ((each, sign) for each in particular for sign in each.shows if isinstance(sign, Failed)):
        place, within = raised_in(sign)
        functions = {within} - {""} or checks.functions_of(sign.source)
        text = "" if is_pythons(sign.text) and (sign.within or sign.through) else sign.text
        letters = sum(map(len, PLACE.split(text)[::2])) + len(sign.source)
        telling = sorted(filter(tells, functions)) or [""]
        file = place.rpartition("/")[2]
        for function in telling:
            is_any = function in HOOKS and not (text or sign.source)  # of every connector
            if file or not is_any:
                made.append(_Sign(record, sign, letters, function, file if is_any else ""))
    return tuple(made)
