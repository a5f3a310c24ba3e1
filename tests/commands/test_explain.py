import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvfix.fixes import RETIRED
from kvfix_tools import explain
from kvfix_tools.diagnose import problems
from kvfix_tools.search import candidates, search

ENTRIES = list(explain.entries())
RETIRED_CODES = {**RETIRED, **problems.knowledge().retired}
FINDINGS = {each.code: each for each in problems.catalogue() if each.on}  # a rule with `on` has no `signs`


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


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("assert slot_mapping == token_ids after a failed load", "KVF008"),
        ("the worker segfaults in swap_blocks of the OffloadingConnector", "KVD622"),
        ("no hits with tensor parallelism although PYTHONHASHSEED=0 is set", "KVF901"),
        ("a store leaves a hole, and tokens after the hole are never hit", "KVR007"),
        ("py-spy shows from_ipc_handle blocked for minutes", "KVD922"),
    ],
)
def test_a_description_finds_what_it_is_about(text: str, code: str) -> None:
    assert code in [each.code for each in candidates(text)]


def test_the_answer_names_three_candidates_and_claims_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert search("assert slot_mapping == token_ids after a failed load", json=False) == 0
    out = capsys.readouterr().out
    assert out.startswith("These entries have the most words in common with your text. Confirm an entry before")
    assert out.count("To confirm: ") == out.count("kvfix explain ") == 3
    assert search("assert slot_mapping", json=True) == 0
    found = json.loads(capsys.readouterr().out)["candidates"]
    assert [set(each) for each in found] == [{"code", "name", "title", "confirm"}] * 3


@pytest.mark.parametrize("text", ["", '"; DROP TABLE entry; --', "zzzzzz", "AND OR NOT NEAR(", "***"])
def test_any_text_is_answered(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert search(text, json=False) == 0
    assert capsys.readouterr().out


def test_a_text_a_file_and_standard_input_answer_alike(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    report, words = tmp_path / "report.md", "NIXL_ERR_BACKEND in register_memory"
    report.write_text(words)
    monkeypatch.setattr("sys.stdin", io.StringIO(words))
    answers = set()
    for text in (words, str(report), "-"):
        assert search(text, json=True) == 0
        answers.add(capsys.readouterr().out)
    assert len(answers) == 1
    monkeypatch.setattr(Path, "open", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    assert search(str(report), json=False) == 2
    assert capsys.readouterr().err == f"kvfix search: cannot read {report}: Permission denied\n"
