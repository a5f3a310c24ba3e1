"""One line of a log has one remedy: no sign of a record yields a second finding.

A second one is due only where the two are of releases that do not meet: the log here names none, a real one does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from packaging.specifiers import SpecifierSet

from kvfix_tools.diagnose import problems
from kvfix_tools.diagnose.problems import Problem
from kvfix_tools.diagnose.signs import Sign
from tests.diagnose.lines import codes, diagnose
from tests.diagnose.sign_logs import shown

_VERSION = re.compile(r"\d[\w.]*")


def meet(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return True if a release is in both ranges: then the lowest release of one range is in the other."""
    for dist in one.keys() & other.keys():
        bounds = ["0", *_VERSION.findall(one[dist]), *_VERSION.findall(other[dist])]
        ranges = [SpecifierSet(each[dist], prereleases=True) for each in (one, other)]
        if not any(all(bound in each for each in ranges) for bound in bounds):
            return False
    return True


def second(problem: Problem, log: str) -> list[str]:
    """Codes of findings in this log of one line that are due to nothing."""
    found = [code for code in codes(diagnose(log)) if code != problem.code]
    known = {each.code: each for each in problems.catalogue()}
    records = {code: known.get(code) for code in found}
    return [code for code, record in records.items() if record is None or meet(problem.releases, record.releases)]


@pytest.mark.parametrize("problem", problems.catalogue(), ids=lambda problem: str(problem.name))
def test_a_line_is_one_record(problem: Problem) -> None:
    for sign in problem.shows:
        if sign == Sign("raised", text=sign.text) and Sign("logged", text=sign.text) in problem.shows:
            continue  # a text alone: as a line of a logger it is looked at below
        assert second(problem, shown(problem, sign)) == [], sign
