"""`kvfix search`: candidates for a description that is no log."""

import io
import json
from pathlib import Path

import pytest

from kvfix_tools.search import candidates, search


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


def test_a_text_a_file_and_standard_input_answer_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "NIXL_ERR_BACKEND in register_memory"
    file = tmp_path / "report.md"
    file.write_text(words)
    monkeypatch.setattr("sys.stdin", io.StringIO(words))
    answers = []
    for text in (words, str(file), "-"):
        assert search(text, json=True) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("text", ["", '"; DROP TABLE entry; --', "zzzzzz", "AND OR NOT NEAR(", "***"])
def test_any_text_is_answered(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert search(text, json=False) == 0
    assert capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    file = tmp_path / "report"
    file.write_text("x")
    monkeypatch.setattr(Path, "open", refused)
    assert search(str(file), json=False) == 2
    assert capsys.readouterr().err == f"kvfix search: cannot read {file}: Permission denied\n"
