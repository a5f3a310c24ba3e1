"""One line of a log has one remedy: no sign of a record yields a second finding.

A second one is due only where the two are of releases that do not meet: the log here names none, a real one does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from packaging.specifiers import SpecifierSet

from kvfix_tools.diagnose import problems
from kvfix_tools.diagnose.problem import Problem
from kvfix_tools.diagnose.signs import Failed, Logged, implied
from tests.diagnose.lines import NEWEST, codes, diagnose, version
from tests.diagnose.sign_logs import LMCACHE, VLLM, shown

_VERSION = re.compile(r"\d[\w.]*")


def meet(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether a release is in both ranges: if one is, then the lowest of either is."""
    for dist in one.keys() & other.keys():
        bounds = ["0", *_VERSION.findall(one[dist]), *_VERSION.findall(other[dist])]
        ranges = [SpecifierSet(each[dist], prereleases=True) for each in (one, other)]
        if not any(all(bound in each for each in ranges) for bound in bounds):
            return False
    return True


def second(problem: Problem, log: str) -> list[str]:
    """Codes of findings in this log of one line that are due to nothing."""
    found = [code for code in codes(diagnose(log)) if code != problem.code]
    records = {code: problems.find(code) for code in found}
    return [code for code, record in records.items() if record is None or meet(problem.releases, record.releases)]


@pytest.mark.parametrize("problem", problems.catalogue(), ids=lambda problem: str(problem.name))
def test_a_line_is_one_record(problem: Problem) -> None:
    for sign in problem.shows:
        if sign == Failed(text=sign.text) and Logged(sign.text) in problem.shows:
            continue  # a text alone: as a line of a logger it is looked at below
        assert second(problem, shown(problem, sign)) == [], sign


def test_ranges_that_meet() -> None:
    assert meet({"lmcache": ">=0.4"}, {"lmcache": "<0.5"})
    assert meet({"lmcache": ">=0.4"}, {"vllm": "<0.5"})
    assert meet({"vllm": "<0.32"}, {"vllm": "<=0.20"})
    assert not meet({"vllm": "<0.32"}, {"vllm": ">=0.32"})
    assert not meet({"lmcache": ">=0.3.10,<0.3.13"}, {"lmcache": ">=0.4.1"})


def test_the_statement_that_goes_on_is_the_finding() -> None:
    """Both texts are of one loop: with this reason it is the one that failed before."""
    text = "Failed to process {what} loop: {why}"
    for why, code in (("Operation cannot be accomplished in current state", "KVD691"), ("gone", "KVD259")):
        line = LMCACHE.format(level="ERROR", text=text.format(what="mem alloc", why=why))
        assert codes(diagnose(line)) == [code]


def test_a_better_record_of_other_releases_hides_none() -> None:
    """KVD960 says more exactly what the line is, but is of LMCache before 0.3.10.post1."""
    text = "Failed to initialize/re-establish remote connection: 'NoneType' object cannot be interpreted as an integer"
    line = LMCACHE.format(level="ERROR", text=text)
    assert codes(diagnose(version("0.3.9"), line)) == ["KVD960"]
    assert codes(diagnose(version(NEWEST), line)) == ["KVD860"]


def test_which_sign_says_more() -> None:
    assert implied(Logged("failed for <key>: <error>"), Logged("failed for <key>: Broken pipe"))
    assert not implied(Logged("failed for <key>: Broken pipe"), Logged("failed for <key>: <error>"))
    assert not implied(Logged("failed"), Failed(text="failed"))


def test_each_import_of_mooncake_is_its_own() -> None:
    """vLLM's connectors and LMCache's say the same but for the last words."""
    head = "Please install mooncake by following the instructions at https://any.org/build.md to run"
    for words, code in (
        ("VLLM with MooncakeTransferEngine.", "KVD509"),
        ("vLLM with MooncakeStoreConnector.", "KVD509"),
        ("vLLM with MooncakeConnector.", "KVD890"),
    ):
        log = f'Traceback (most recent call last):\n  File "/opt/any.py", line 7, in f\nImportError: {head} {words}\n'
        assert codes(diagnose("".join(f"(EngineCore pid=9) {line}\n" for line in log.splitlines()))) == [code]


def test_a_pull_of_mooncake_is_what_its_error_says() -> None:
    text = "pulling kv_caches for ['7'] failed: {why}"
    for why, code in (
        ("Timeout waiting for P side ready", "KVD501"),
        ("Mooncake transfer engine returned -1", "KVD502"),
        ("gone", "KVD261"),
    ):
        assert codes(diagnose(VLLM.format(level="ERROR", text=text.format(why=why)))) == [code]
