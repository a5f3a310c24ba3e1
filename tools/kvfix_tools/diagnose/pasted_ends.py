"""A paste that ends within the line of a known problem. Asked where nothing else is known, and never certain."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kvfix_tools.diagnose import problems
from kvfix_tools.diagnose.signs import PLACE, Failed, Logged, fits, is_pythons

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine
    from kvfix_tools.diagnose.problems import Problem

#: Letters from which on the beginning of a message is no other's; letters of a value that is cut.
_LETTERS, _VALUE = 20, 200


def by_its_end(log: Diagnosis, first: LogLine | None) -> tuple[Problem, str] | None:
    """(the record whose message the last line begins, that line); None: there is none, or several.

    first: the failure, if it is known; a record of another exception, or of another place, it is not.
    """
    asserted = _by_its_assertion(log, first)
    if asserted is not None:
        return asserted
    for text in log.pasted:
        lines = [line for line in text.decode("utf-8", "replace").split("\n") if line.strip(" `")]
        last = lines[-1].rstrip() if lines else ""
        fitting = [
            (_begun(parts, last), each) for parts, each, sign in _messages() if each.concerns(log) and _may(sign, first)
        ]
        most = max((letters for letters, _ in fitting), default=0)
        best = {each.code: each for letters, each in fitting if letters == most}
        if most >= _LETTERS and len(best) == 1 and not any(each.general or each.quotes for each in best.values()):
            return next(iter(best.values())), last
    return None


def _by_its_assertion(log: Diagnosis, first: LogLine | None) -> tuple[Problem, str] | None:
    """The record whose assertion, in this function, the traceback's last line begins, and that line."""
    if first is None or first.name != "raised" or first.fields["text"]:
        return None
    source = str(first.fields["source"])
    if len(source) < _LETTERS or not source.startswith("assert "):
        return None
    found = {
        each.code: each
        for each in problems.catalogue()
        for sign in each.shows
        if isinstance(sign, Failed) and sign.within and sign.source.startswith(source)
        if fits(sign._replace(source=""), first) is not None and each.concerns(log)
    }
    return (next(iter(found.values())), source) if len(found) == 1 else None


def _may(sign: Logged | Failed, first: LogLine | None) -> bool:
    """Whether the sign may be of this failure, its text left out."""
    if first is None or first.name != "raised" or not first.fields["class"]:
        return True
    return isinstance(sign, Failed) and fits(sign._replace(text=""), first) is not None


def _begun(parts: list[str], line: str) -> int:
    """Letters of the message that the line ends in, values not counted; 0: it ends in something else."""
    at = line.find(parts[0][:_LETTERS])
    if at < 0:
        return 0
    rest = line[at:]
    if len(rest) < len(parts[0]):
        return len(rest) if parts[0].startswith(rest) else 0
    if not rest.startswith(parts[0]):
        return 0
    letters, rest = len(parts[0]), rest[len(parts[0]) :]
    for part in parts[1:]:
        value, found, after = rest.partition(part) if part else (rest, "", "")
        if not found:
            return letters if len(value) <= _VALUE else 0
        letters, rest = letters + len(part), after
    return letters


@lru_cache(maxsize=1)
def _messages() -> list[tuple[list[str], Problem, Logged | Failed]]:
    """(the parts of its message between values, the record, the sign) of those that begin with words of their own."""
    return [
        (parts, record, sign)
        for record in problems.catalogue()
        for sign in record.shows
        if isinstance(sign, Logged | Failed) and not is_pythons(sign.text)
        if len((parts := PLACE.split(sign.text)[::2])[0]) >= _LETTERS
    ]
