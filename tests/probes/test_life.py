"""Modes, dumps and reports on the real scheduler, with the LMCache that has the reported bug; and `kvfix replay`.

One process plays it in every mode (life.py).
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kvfix_tools import catalogue, recording, replay
from tests.conftest import RELEASES, Fresh

MISMATCH = "Mismatch in tokens to load: 256 vs 256 (tokens in lmcache) - 336 (tokens in vllm)"
CHANGED = "KVR002 promise-changed long: promised 256 where 0 was promised before: hit 256 - computed 336 -> 0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("life")


@pytest.fixture(scope="module")
def life(folder: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("life.py")
    done = Fresh().run([sys.executable, str(script), str(RELEASES / "0.3.10"), str(folder)])
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("mode", ["alone", "fix", "observe", "check", "suppressed"])
def test_only_strict_changes_how_it_ends(mode: str, life: dict[str, Any]) -> None:
    assert life[mode]["died"].startswith(MISMATCH)
    assert life[mode]["story"] == life["alone"]["story"]


def test_strict_raises_at_the_first_violation(life: dict[str, Any]) -> None:
    assert life["strict"]["died"] == f"kvfix {CHANGED}"


def test_with_the_fix_strict_has_nothing_to_raise(life: dict[str, Any]) -> None:
    assert life["fixed"]["died"] == ""
    assert ".txt" not in life["fixed"]["files"]


def test_what_each_mode_leaves(life: dict[str, Any]) -> None:
    """observe: a recorder file for the exception. check: one for each of both violations, and its report."""
    assert life["alone"]["files"] == life["fix"]["files"] == []
    assert life["observe"]["files"].count(".jsonl") == 1
    assert life["check"]["files"].count(".jsonl") == life["check"]["files"].count(".txt") == 2
    assert life["strict"]["files"].count(".txt") == 1
    assert life["suppressed"]["files"].count(".txt") == 0


def test_nobody_else_reads_it(life: dict[str, Any]) -> None:
    assert life["check"]["folder"] == "0o700"
    assert life["check"]["modes"] == ["0o600"]


def test_probes_come_and_go(life: dict[str, Any]) -> None:
    """Layers are never watched; a revert leaves the functions that were there."""
    assert all(life["fix is unwatched"])
    assert life["observe is unwatched"] == [False, False, False, False, True, True]
    assert all(life["same signatures"])
    assert life["reverted"] == [[True] * 6, True]


def test_the_signal_is_only_taken_if_it_is_free(life: dict[str, Any]) -> None:
    assert life["signal is free"]
    assert life["taken signal is theirs"]
    assert life["ready left"] == []


def test_memory_and_disk_are_bounded(life: dict[str, Any]) -> None:
    assert life["bounded"]["ring"] == 8192
    assert 100_000 < life["bounded"]["bytes"] <= 200_000
    assert life["bounded"]["last"]
    assert life["bounded"]["files"] == 32


def test_a_child_begins_with_an_empty_recorder(life: dict[str, Any]) -> None:
    assert life["forked"] == 0


def test_the_report(folder: Path, life: dict[str, Any]) -> None:
    changed, died = sorted((folder / "check").rglob("*.txt"), key=lambda path: int(path.name.split("-")[3]))
    text = changed.read_text()
    for part in (
        "kvfix: KVR002 promise-changed: request long\n  promised 256 where 0 was promised before",
        "in get_num_new_matched_tokens of LMCacheConnectorV1 (SCHEDULER), pid ",
        "The rule: Asked again about the same state, the connector answers the same.",
        "match(336) promises 256, but hit 256 - computed 336 = -80: 0 is due",
        "contradicts this one:\n",
        "match(336) promises 0: hit 256 - computed 336 = -80, nothing to load",
        "admitted at 0 computed tokens, 336 more are computed",
        "KVF001 lookup-cache-ignores-computed cures it, and is not applied here",
        "SUMMARY: kvfix KVR002 promise-changed request long: promised 256 where 0 was promised before",
    ):
        assert part in text, (part, text)
    assert text.count("SUMMARY:") == 1
    assert re.search(r"\nScheduler: \d running, \d waiting, \d+ of \d+ blocks free\n", text)
    assert "KVR011 exception-left-hook" in died.read_text()


def test_no_token_is_written(folder: Path, life: dict[str, Any]) -> None:
    """The longest list of numbers in any file is shorter than a prompt."""
    for path in [*folder.rglob("*.jsonl"), *folder.rglob("*.txt")]:
        assert not re.search(r"(\d+, ?){8}", path.read_text()), path


def test_replay_gives_the_same_verdicts(folder: Path, life: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted((folder / "check").rglob("*.jsonl"), key=lambda path: int(path.name.split("-")[3]))
    last = recording.read(files[-1])
    live = [recording.read(path).lines["finding"][0] for path in files]
    again = [told.finding for told in replay.judged(last)]
    assert [(found["code"], found["message"]) for found in live] == [(found.code, found.message) for found in again]
    assert replay.replay([files[-1]], json=False) == 1
    told = capsys.readouterr().out
    assert "match(336) promises 256, but hit 256 - computed 336 = -80: 0 is due" in told
    assert "2 violations" in told.splitlines()[-1]
    assert replay.replay([files[-1]], json=True) == 1
    assert [found["code"] for found in json.loads(capsys.readouterr().out)["findings"]] == ["KVR002", "KVR011"]


def test_replay_of_a_record_without_its_beginning_does_not_guess(
    folder: Path, life: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = next(iter((folder / "check").rglob("*.jsonl"))).read_text().splitlines()
    head = [line for line in whole if '"kind":"event"' not in line]
    late = [line for line in whole if '"event":"Stored"' in line]
    assert late
    hole = late[0].replace('"start":0,', '"start":64,')
    assert hole != late[0]
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join([*head, hole]))
    assert replay.replay([cut], json=False) == 0
    assert "0 violations, 1 not to be judged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("what\n", "line 1 is no line of a recorder"),
        ('{"kind":"recorder","schema":99}\n', "it is of schema 99, this kvfix reads 1"),
        ('{"kind":"recorder","schema":1}\n{"kind":"event","event":"RULES"}\n', "line 2 is no line"),
        ('{"kind":"recorder","schema":1}\n{"kind":"event","event":"Granted","request":1}\n', "line 2 is no line"),
        (None, "No such file"),
    ],
)
def test_replay_refuses_what_is_no_recorder_file(
    text: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
    assert replay.replay([path], json=False) == 2
    assert says in capsys.readouterr().err


def played_again(path: Path, option: str, fresh: Fresh) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvfix_tools.cli", "lab", "replay", str(path), "--json", option]
    done = fresh.run([*command, "--lmcache-path", str(RELEASES / "0.3.10")])
    assert done.returncode in (0, 1), done.stderr
    told = dict(json.loads(done.stdout))
    assert done.returncode == int(bool(told["here"]))
    assert told["short"] == []
    return told


@pytest.mark.parametrize("option", ["--no-fixes", "--fixes"])
def test_the_lab_plays_its_own_record_again(option: str, folder: Path, life: dict[str, Any], fresh: Fresh) -> None:
    """The same verdicts as on record; with the fix none."""
    last = max((folder / "check").rglob("*.jsonl"), key=lambda path: int(path.name.split("-")[3]))
    told = played_again(last, option, fresh)
    assert told["on_record"] == [["KVR002", "long"], ["KVR011", "long"]]
    assert told["here"] == ([] if option == "--fixes" else told["on_record"])


def test_the_lab_plays_an_engines_record_again(fresh: Fresh) -> None:
    """The reported crash of a real engine (tests/engine/run.py: REPORT), by its recorder in mode `check only=`."""
    told = played_again(Path(__file__).with_name("recordings") / "crash-lmcache-0.3.10.jsonl", "--no-fixes", fresh)
    assert told["on_record"] == [["KVR002", "1-a2b47532"], ["KVR011", "1-a2b47532"]]
    assert told["here"] == told["on_record"]


def test_explain_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert catalogue.explain("KVR002", json=False) == 0
    told = capsys.readouterr().out
    assert told.startswith("KVR002 promise-changed\n\nAsked again about the same state")
    assert "KVF001 lookup-cache-ignores-computed" in told
    assert catalogue.explain("promise-changed", json=True) == 0
    assert json.loads(capsys.readouterr().out)["fixes"] == ["KVF001"]
    assert catalogue.explain("KVR999", json=False) == 2
    assert "KVR002 (promise-changed)" in capsys.readouterr().err
