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
from kvfix_tools.diagnose.signs import Failed, Logged, implied
from tests.diagnose.lines import NEWEST, codes, diagnose, version
from tests.diagnose.sign_logs import LMCACHE, VLLM, shown

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
        if sign == Failed(text=sign.text) and Logged(sign.text) in problem.shows:
            continue  # a text alone: as a line of a logger it is looked at below
        assert second(problem, shown(problem, sign)) == [], sign


def test_ranges_that_meet() -> None:
    assert meet({"lmcache": ">=0.4"}, {"lmcache": "<0.5"})
    assert meet({"lmcache": ">=0.4"}, {"vllm": "<0.5"})
    assert meet({"vllm": "<0.32"}, {"vllm": "<=0.20"})
    assert not meet({"vllm": "<0.32"}, {"vllm": ">=0.32"})
    assert not meet({"lmcache": ">=0.3.10,<0.3.13"}, {"lmcache": ">=0.4.1"})


#: "Please install mooncake ...": vLLM's connectors and LMCache's say the same but for the last words.
INSTALL = (
    'Traceback (most recent call last):\n  File "/opt/any.py", line 7, in f\nImportError: Please install mooncake by '
    "following the instructions at https://any.org/build.md to run "
)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        # both texts are of one loop: with this reason it is the one that failed before
        ("Failed to process mem alloc loop: Operation cannot be accomplished in current state", "KVD691"),
        ("Failed to process mem alloc loop: gone", "KVD259"),
        (f"{INSTALL}VLLM with MooncakeTransferEngine.", "KVD509"),
        (f"{INSTALL}vLLM with MooncakeStoreConnector.", "KVD509"),
        (f"{INSTALL}vLLM with MooncakeConnector.", "KVD890"),
        ("pulling kv_caches for ['7'] failed: Timeout waiting for P side ready", "KVD501"),
        ("pulling kv_caches for ['7'] failed: Mooncake transfer engine returned -1", "KVD502"),
        ("pulling kv_caches for ['7'] failed: gone", "KVD261"),
    ],
)
def test_the_record_that_says_more_is_the_finding(text: str, code: str) -> None:
    frame = VLLM if text.startswith("pulling") else LMCACHE
    log = "".join(f"(EngineCore pid=9) {line}\n" for line in text.splitlines())
    assert codes(diagnose(log if text.startswith(INSTALL) else frame.format(level="ERROR", text=text))) == [code]


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
