"""`kvfix explain`: everything that has a code, by its code and by its name."""

from __future__ import annotations

import json

import pytest

from kvfix_tools import explain

ENTRIES = list(explain.entries())


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.code for entry in ENTRIES])
def test_each_is_found_by_code_and_name(entry: explain.Entry, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.explain(entry.code.lower(), json=False) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{entry.code} {entry.name}")
    assert explain.explain(entry.code, json=True) == 0
    assert json.loads(capsys.readouterr().out)["code"] == entry.code
    first = next(each for each in ENTRIES if each.name == entry.name)  # some findings have the name of their fix
    assert explain.explain(entry.name.upper(), json=False) == 0
    assert capsys.readouterr().out.startswith(f"{first.code} ")


def test_no_code_is_used_twice() -> None:
    assert len({entry.code for entry in ENTRIES}) == len(ENTRIES) > 100


def test_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.explain("KVX001", json=True) == 2
    error = capsys.readouterr().err
    assert all(f"{entry.code} ({entry.name})" in error for entry in ENTRIES)
