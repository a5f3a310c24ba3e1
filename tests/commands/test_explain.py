"""`kvfix explain`: everything that has a code, by its code and by its name."""

import json

import pytest

from kvfix.fixes import RETIRED
from kvfix_tools import explain
from kvfix_tools.diagnose import problems

ENTRIES = list(explain.entries())
RETIRED_CODES = {**RETIRED, **problems.knowledge().retired}
#: Findings with a function.
FINDINGS = {each.code: each for each in problems.catalogue() if each.on}


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.code for entry in ENTRIES])
def test_each_is_found_by_code_and_name(entry: explain.Entry, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.explain(entry.code.lower(), json=False) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{entry.code} {entry.name}")
    assert explain.explain(entry.code, json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["code"] == entry.code
    rule = FINDINGS.get(entry.code)
    if rule is not None:
        assert all(part in text for part in (rule.title, "\nCause: ", *rule.fixes))
        assert facts["fixes"] == list(rule.fixes)
    first = next(each for each in ENTRIES if each.name == entry.name)  # some findings have the name of their fix
    assert explain.explain(entry.name.upper(), json=False) == 0
    assert capsys.readouterr().out.startswith(f"{first.code} ")


def test_no_code_is_used_twice() -> None:
    assert len({entry.code for entry in ENTRIES}) == len(ENTRIES) > 100


def test_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.explain("KVX001", json=True) == 2
    assert capsys.readouterr().err == "kvfix explain: no fix, rule or finding is called 'KVX001'.\n"
    assert explain.explain("hash-differ-by-process", json=False) == 2
    assert capsys.readouterr().err.endswith("'hash-differ-by-process'. Did you mean hash-differs-by-process?\n")


@pytest.mark.parametrize("code", RETIRED_CODES)
def test_a_retired_code_is_explained_and_not_used_again(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code not in {entry.code for entry in ENTRIES}
    assert explain.explain(code.lower(), json=False) == 0
    assert capsys.readouterr().out == f"{code} is retired: {RETIRED_CODES[code]}.\n"
    assert explain.explain(code, json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"code": code, "retired": RETIRED_CODES[code]}
