"""Test modes, dumps, reports and `kvfix replay` on vLLM's scheduler with LMCache 0.3.10, which has the bug KVF001."""

import json
import os
import re
import signal
import stat
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kvfix
from kvfix.connector_events import violations
from kvfix.ledger import Finding, events
from kvfix_tools import recording, replay
from kvfix_tools.lab.scenario import find
from tests import late
from tests.conftest import RELEASES, Once, run_forked
from tests.connector_events.conftest import Replayed


def play_all(path: str) -> dict[str, Any]:
    """Play the scenario in every mode. kvfix writes recorder files and reports into the folder `path`."""
    folder, scenario = Path(path), find("mismatch-in-tokens-to-load")
    answer: dict[str, Any] = {}
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1 as connector
    from vllm.v1.core.sched.scheduler import Scheduler

    wrapped = [(connector, "get_num_new_matched_tokens"), (Scheduler, "schedule"), (factory, "get_connector_class")]
    originals = [vars(owner)[name] for owner, name in wrapped]

    def play(mode: str | None, name: str, only: list[str] | None = None, **environment: str) -> Any:
        kvfix.revert()
        place = folder / name / f"kvfix-{os.getuid()}"
        os.environ.update(KVFIX_DUMP_DIR=str(place.parent), **environment)
        if mode:
            kvfix.apply(mode, only=[] if only is None else only)
        died = ""
        world = late.LabEngine(scenario.options)
        try:
            scenario.play(world)
        except late.EngineDied as error:
            died = str(error)
        for key in environment:
            del os.environ[key]
        files = sorted(place.iterdir()) if place.is_dir() else []
        return {
            "died": died,
            "files": [path.suffix for path in files],
            "folder": oct(stat.S_IMODE(place.stat().st_mode)) if files else "",
            "modes": sorted({oct(stat.S_IMODE(path.stat().st_mode)) for path in files}),
            "events": [[step, *event] for step, event in world.log],
        }

    def is_original() -> list[bool]:
        return [vars(owner)[name] is original for (owner, name), original in zip(wrapped, originals, strict=True)]

    answer["alone"] = play(None, "alone")
    answer["fix"] = play("fix", "fix")
    answer["observe"] = play("observe", "observe")
    in_observe = is_original()
    answer["bounded"] = bounded(play, folder)
    answer["check"] = play("check", "check")
    answer["strict"] = play("strict", "strict")
    listed = folder / "known"
    listed.write_text("# known\nKVR002 promised 256, but*\nKVR011\n")
    answer["suppressed"] = play("check", "suppressed", KVFIX_SUPPRESS=str(listed))
    answer["fixed"] = play("strict", "fixed", ["KVF001"])
    kvfix.revert()
    answer["reverted"] = in_observe, is_original()
    free = signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    signal.signal(signal.SIGUSR2, theirs := signal.default_int_handler)
    play("observe", "taken")
    answer["signals"] = free, signal.getsignal(signal.SIGUSR2) is theirs
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    kvfix.revert()
    answer["ready left"] = [path.name for path in folder.rglob("*.ready")]
    return answer


def bounded(play: Any, folder: Path) -> Any:
    """Exceed the recorder's limits. Return (events, bytes of the last file, number of its last event, files)."""
    play("observe", "bounded")
    from kvfix.connector_events import recorder
    from kvfix.session import EVENTS, session

    for number in range(3 * EVENTS):
        recorder.add(1, "planted", events.Granted("r" * 100, number))
    with mock.patch.object(recorder, "LARGEST", 200_000):
        for _ in range(recorder.FILES + 3):
            path = recorder.write("signal")
    text = Path(path).read_text()
    last = json.loads(text.splitlines()[-1])["external"]
    return len(session.events), len(text), last, len(list((folder / "bounded").rglob("*.jsonl")))


MISMATCH = "Mismatch in tokens to load: 256 vs 256 (tokens in lmcache) - 336 (tokens in vllm)"
CHANGED = "KVR002 promise-changed long: promised 256, but an earlier lookup promised 0; hit 256 - computed 336 = -80: "
CHANGED += "0 is due"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("every_mode")


@pytest.fixture(scope="module")
def played(folder: Path, once: Once) -> dict[str, Any]:
    return dict(once(play_all, RELEASES / "0.3.10", str(folder)))


def of_check(folder: Path, ending: str) -> list[Path]:
    return sorted((folder / "check").rglob(f"*{ending}"), key=lambda path: int(path.name.split("-")[3]))


@pytest.mark.parametrize(
    ("mode", "died", "recorders", "reports"),
    [
        ("alone", MISMATCH, 0, 0),
        ("fix", MISMATCH, 0, 0),
        ("observe", MISMATCH, 1, 0),  # one file, for the exception
        ("check", MISMATCH, 2, 2),  # two violations, each with a file and a report
        ("suppressed", MISMATCH, 0, 0),
        ("strict", f"kvfix {CHANGED}", 1, 1),  # kvfix raises at the first violation
        ("fixed", "", 0, 0),  # mode `strict` with the fix has no violation
    ],
)
def test_end_and_files_of_each_mode(mode: str, died: str, recorders: int, reports: int, played: dict[str, Any]) -> None:
    found = played[mode]
    assert found["died"].startswith(died)
    assert bool(found["died"]) is bool(died)
    assert mode in ("strict", "fixed") or found["events"] == played["alone"]["events"]
    assert (found["files"].count(".jsonl"), found["files"].count(".txt")) == (recorders, reports)
    assert (found["folder"], found["modes"]) == (("0o700", ["0o600"]) if found["files"] else ("", []))


def test_a_revert_restores_hooks_factory_and_signal(played: dict[str, Any]) -> None:
    """kvfix handles SIGUSR2 only if the process has no handler for SIGUSR2."""
    assert played["reverted"] == [[False] * 3, [True] * 3]
    assert (played["signals"], played["ready left"]) == ([True, True], [])


def test_memory_and_disk_are_bounded(played: dict[str, Any]) -> None:
    entries, size, last, files = played["bounded"]
    assert (entries, last, files) == (8192, 3 * 8192 - 1, 32)
    assert 100_000 < size <= 200_000


def test_the_report(folder: Path, played: dict[str, Any]) -> None:
    changed, died = of_check(folder, ".txt")
    text = changed.read_text()
    for part in (
        "kvfix: KVR002 promise-changed: request long\n  promised 256, but an earlier lookup promised 0",
        "in get_num_new_matched_tokens of LMCacheConnectorV1 (SCHEDULER), pid ",
        "The rule: The connector promises the same number of tokens in each lookup of an unchanged request.",
        "lookup at 336 computed tokens promises 256, but hit 256 - computed 336 = -80: 0 is due",
        "contradicts this earlier event:\n",
        "lookup at 336 computed tokens promises 0: hit 256 - computed 336 = -80, nothing to load",
        "admitted at 0 computed tokens, 336 more are computed",
        "KVF001 lookup-cache-ignores-computed fixes this, but is not applied in this process",
        "SUMMARY: kvfix KVR002 promise-changed request long: promised 256, but an earlier lookup promised 0",
    ):
        assert part in text, (part, text)
    assert text.count("SUMMARY:") == 1
    assert re.search(r"\nScheduler: \d running, \d waiting, \d+ of \d+ blocks free\n", text)
    assert "KVR011 exception-left-hook" in died.read_text()
    of_no_request = Finding("KVR012", "slow", "violated", "", "", events.Granted("", 0))
    assert "kvfix: KVR012 slow: the engine\n" in violations.compose(of_no_request, [], "", [], [], "")


def test_no_token_is_written(folder: Path, played: dict[str, Any]) -> None:
    """Each prompt has over eight tokens. No file has a list of more than eight numbers, so no file has a prompt."""
    for path in [*folder.rglob("*.jsonl"), *folder.rglob("*.txt")]:
        assert not re.search(r"(\d+, ?){8}", path.read_text()), path


def test_replay_gives_the_same_findings(folder: Path, played: dict[str, Any], replayed: Replayed) -> None:
    files = of_check(folder, ".jsonl")
    last = recording.read(files[-1])
    live = [recording.read(path).lines["finding"][0] for path in files]
    again = [each.finding for each in replay.judged(last)]
    assert [(found["code"], found["message"]) for found in live] == [(found.code, found.message) for found in again]
    output = replayed.text([files[-1]], 1)
    assert "lookup at 336 computed tokens promises 256, but hit 256 - computed 336 = -80: 0 is due" in output
    assert "2 violations" in output.splitlines()[-1]
    assert [found["code"] for found in replayed([files[-1]])["violated"]] == ["KVR002", "KVR011"]


def test_replay_without_the_beginning(folder: Path, played: dict[str, Any], tmp_path: Path, replayed: Replayed) -> None:
    whole = of_check(folder, ".jsonl")[0].read_text().splitlines()
    head = [line for line in whole if '"kind":"event"' not in line]
    stored = next(line for line in whole if '"event":"Stored"' in line)
    assert '"start":0,' in stored
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join([*head, stored.replace('"start":0,', '"start":64,')]))
    assert "0 violations, 1 events not checked" in replayed.text([cut])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("what\n", "line 1 is not a line of a recorder"),
        ('{"kind":"recorder","schema":99}\n', "the file has schema 99, and this kvfix reads 1"),
        ('{"kind":"recorder","schema":1}\n{"kind":"event","event":"RULES"}\n', "line 2 is not a line"),
        ('{"kind":"recorder","schema":1}\n{"kind":"event","event":"Granted","request":1}\n', "line 2 is not a line"),
        (None, "No such file"),
    ],
)
def test_replay_rejects_other_files(text: str | None, message: str, tmp_path: Path, replayed: Replayed) -> None:
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
    assert message in replayed.text([path], 2)


#: Recorder file of a real engine in mode `check` without fixes. The engine died of LMCache issue 2158 (KVF001).
CRASH = Path(__file__).with_name("recordings") / "crash-lmcache-0.3.10.jsonl"


@pytest.mark.parametrize(
    ("crash", "request_id", "option"),
    [(None, "long", "--no-fixes"), (None, "long", "--fixes"), (CRASH, "1-a2b47532", "--no-fixes")],
    ids=["its own", "its own, with the fix", "an engine's"],
)
def test_the_lab_plays_a_record_again(
    crash: Path | None, request_id: str, option: str, folder: Path, played: dict[str, Any], tmp_path: Path
) -> None:
    """Without the fix, the lab has the findings of the recording. With the fix, the lab has no finding."""
    path = crash or of_check(folder, ".jsonl")[-1]
    command = [sys.executable, "-m", "kvfix_tools.cli", "lab", "replay", str(path), "--json", option]
    done = run_forked([*command, "--lmcache-path", str(RELEASES / "0.3.10")], tmp_path)
    assert done.returncode == int(option == "--no-fixes"), done.stderr
    output = json.loads(done.stdout)
    assert (output["on_record"], output["short"]) == ([["KVR002", request_id], ["KVR011", request_id]], [])
    assert output["here"] == ([] if option == "--fixes" else output["on_record"])
