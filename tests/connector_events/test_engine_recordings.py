"""Test how kvfix joins the recordings of one engine's processes. The tests split one recording by role and rank."""

import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

import kvfix
from kvfix.connector_events import recorder
from kvfix.ledger import events as ev
from kvfix_tools import engine_recordings, recording, replay
from kvfix_tools.lab.fuzz.schedule import draw
from tests import late
from tests.conftest import RELEASES, Once
from tests.connector_events.conftest import Replayed

#: {node: (seconds by which its monotonic clock is ahead, seconds by which its wall clock is ahead)}
CLOCKS = {"n0": (0.0, 0.0), "n1": (5000.0, -3.0), "n2": (-700.0, 40.0)}
Lines = dict[str, Any]


def recorded(connector: str) -> str:
    os.environ["KVFIX_DUMP_DIR"] = tempfile.mkdtemp(prefix="kvfix-test-")
    kvfix.apply("check")
    assert late.play(draw(3, connector, plain=True)).counts["loaded_tokens"] > 0
    return Path(recorder.write("exit")).read_text()


def on_node(
    path: Path, head: Lines, connectors: list[Lines], events: list[Lines], node: str, clocks: tuple[float, float]
) -> Path:
    """Write a recorder file of a process on `node`. clocks: seconds by which monotonic and wall clock are ahead."""
    mono, wall = (int(seconds * 1e9) for seconds in clocks)

    def moved(line: Lines) -> Lines:
        ahead = {"mono": mono, "wall": wall, "stepped": mono}
        return {**line, **{name: line[name] + more for name, more in ahead.items() if name in line}}

    head = {**moved(head), "node": node, "boot": f"boot of {node}", "began": 7}
    path.write_text("\n".join(map(json.dumps, [head, *map(moved, [*connectors, *events])])) + "\n")
    return path


def assert_between(clock: Any, true: float) -> None:
    """Assert that the clock's bounds contain the estimate and `true`. true: seconds by which the clock is ahead."""
    assert clock.low <= clock.ahead <= clock.high
    assert clock.low <= int(true * 1e9) <= clock.high


class Split:
    """Splits one recording into a file for the scheduler and a file for each rank, like files of separate processes."""

    def __init__(self, text: str) -> None:
        """Give all connectors one engine name, because the lab may give the two roles different names."""
        self._lines: list[Lines] = [json.loads(line) for line in text.splitlines()]
        self._connectors: dict[str, Lines] = {
            line["role"]: {**line, "engine": "e", "replica": 0}
            for line in self._lines
            if line["kind"] == "connector" and line["role"]
        }

    def events(self, role: str) -> list[Lines]:
        number = self._connectors[role]["number"]
        return [line for line in self._lines if line["kind"] == "event" and line["connector"] == number]

    def whole(self, path: Path) -> Path:
        lines = [self._connectors.get(line.get("role", ""), line) for line in self._lines]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        return path

    def write(self, path: Path, role: str, rank: int, node: str, events: list[Lines], **more: Any) -> Path:
        connector = {**self._connectors[role], "rank": rank, "ranks": 2, **more}
        head = {**self._lines[0], "pid": 99 if role == "SCHEDULER" else 100 + rank}
        return on_node(path, head, [connector], events, node, CLOCKS[node])


@pytest.fixture(scope="module", params=["v1", "mp"])
def split(request: pytest.FixtureRequest, once: Once) -> Split:
    return Split(once(recorded, RELEASES / "0.5.6", request.param))


@pytest.fixture
def files(split: Split, tmp_path: Path) -> dict[str, Path]:
    parts = {"scheduler": ("SCHEDULER", 0, "n0"), "0": ("WORKER", 0, "n1"), "1": ("WORKER", 1, "n2")}
    return {name: split.write(tmp_path / f"{name}.jsonl", *part, split.events(part[0])) for name, part in parts.items()}


def engine_of(paths: list[Path]) -> engine_recordings.Engine:
    (engine,) = engine_recordings.engines([recording.read(path) for path in paths])
    return engine


def test_a_whole_engine(files: dict[str, Path], split: Split, replayed: Replayed) -> None:
    """kvfix uses the scheduler's events to check each rank's loads, so no verdict is "unknown"."""
    found = replayed(files.values())
    assert (found["violated"], found["unknown"], found["missing"]) == ([], 0, [])
    assert found["unknown_loads"] == {"0": 0, "1": 0}
    assert [line["event"] for line in split.events("SCHEDULER")].count("LoadDue") > 2
    assert {each["verdict"] for each in replayed([files["0"]])["findings"]} == {"unknown"}


def test_both_roles_in_one_process(split: Split, tmp_path: Path) -> None:
    engine = engine_of([split.whole(tmp_path / "whole.jsonl")])
    assert list(engine.workers) == [0]
    compared = engine.compared[0]
    assert compared.pairs
    assert (compared.differs, compared.unknown) == ([], 0)


def test_the_order_comes_from_the_ledger(files: dict[str, Path], split: Split) -> None:
    """If kvfix sorted by wall clocks, a rank's loads would be before the scheduler's steps, or long after the steps."""
    engine = engine_of(list(files.values()))
    for boot, clock in engine.clocks.items():
        assert_between(clock, CLOCKS[boot.rpartition(" ")[2]][0] - CLOCKS["n0"][0])
    for request in {line["request"] for line in split.events("WORKER")}:
        history = engine.history(request)
        for part in engine.parts:
            own = [entry.event for one, entry in history if one is part]
            assert own == [entry.event for entry in part.entries if entry.event.request == request]
        due = [(at, part) for at, (part, entry) in enumerate(history) if isinstance(entry.event, ev.LoadDue)]
        scheduler = [at for at, part in due if part.is_scheduler]
        ranks = [at for at, part in due if part.rank == 1]
        assert all(here < there for here, there in zip(scheduler, ranks, strict=True))


@pytest.mark.parametrize(
    ("left_out", "ranks", "says"),
    [
        ("1", [1], "rank 1: no recording was given, so its loads are unknown"),
        ("scheduler", [], "scheduler: no recording was given"),
    ],
)
def test_a_missing_recording_makes_loads_unknown(
    left_out: str, ranks: list[int], says: str, files: dict[str, Path], replayed: Replayed
) -> None:
    del files[left_out]
    found = replayed(files.values())
    assert (found["violated"], found["missing"], found["unknown"] > 0) == ([], ranks, left_out == "scheduler")
    assert says in replayed.text(files.values())


def test_a_load_that_one_rank_lost(files: dict[str, Path], split: Split, tmp_path: Path, replayed: Replayed) -> None:
    lines = split.events("WORKER")
    lost = [at for at, line in enumerate(lines) if line["event"] == "LoadDue"][1]
    request = lines[lost]["request"]
    files["1"] = split.write(tmp_path / "1.jsonl", "WORKER", 1, "n2", lines[:lost] + lines[lost + 1 :])
    (found,) = replayed(files.values())["violated"]
    assert (found["code"], found["request"]) == ("KVR013", request)
    assert "rank 1 did not start the scheduled load of tokens" in found["message"]
    text = replayed.text(files.values(), 1)
    assert "SUMMARY: kvfix KVR013 rank-loads-otherwise" in text
    assert "[rank 0, pid 100 on n1]" in text


@pytest.mark.parametrize("part", [slice(4), slice(-4, None)], ids=["ends early", "begins late"])
def test_events_that_a_recorder_has_lost_are_unknown(
    part: slice, files: dict[str, Path], split: Split, tmp_path: Path, replayed: Replayed
) -> None:
    files["1"] = split.write(tmp_path / "1.jsonl", "WORKER", 1, "n2", split.events("WORKER")[part])
    found = replayed(files.values())
    assert found["violated"] == []
    assert found["unknown_loads"]["0"] == 0
    assert found["unknown_loads"]["1"] > 0


def test_overlapping_recordings_of_a_process_are_merged(files: dict[str, Path], split: Split, tmp_path: Path) -> None:
    lines = split.events("SCHEDULER")
    early = split.write(tmp_path / "e.jsonl", "SCHEDULER", 0, "n0", lines[: len(lines) * 2 // 3])
    late = split.write(tmp_path / "l.jsonl", "SCHEDULER", 0, "n0", lines[len(lines) // 3 :])
    assert engine_of([late, early, files["0"]]).scheduler.entries == engine_of([files["scheduler"]]).scheduler.entries


def test_a_damaged_bundle(files: dict[str, Path], tmp_path: Path, replayed: Replayed) -> None:
    bundle = tmp_path / "here.tar.gz"
    with tarfile.open(bundle, "w:gz") as archive:
        archive.add(files["scheduler"], "kvfix-dump-1/recorder-1.jsonl")
        archive.add(files["0"], "kvfix-dump-1/recorder-2.jsonl")
    assert replayed([bundle, files["1"]])["missing"] == []
    bundle.write_bytes(bundle.read_bytes()[:200])
    assert "here.tar.gz: the bundle is damaged or cut off" in replayed.text([bundle], 2)


def test_engines_are_distinguished(files: dict[str, Path], split: Split, tmp_path: Path, replayed: Replayed) -> None:
    other = split.write(tmp_path / "o.jsonl", "WORKER", 1, "n0", split.events("WORKER"), engine="other")
    recordings = [recording.read(path) for path in [*files.values(), other]]
    assert sorted(engine.name for engine in engine_recordings.engines(recordings)) == ["e.0", "other.0"]
    again = split.write(tmp_path / "a.jsonl", "WORKER", 1, "n0", split.events("WORKER"))
    assert "two recordings are of the same rank" in replayed.text([*files.values(), again], 2)


def test_without_common_events_wall_clocks_are_compared(files: dict[str, Path], split: Split, tmp_path: Path) -> None:
    files["1"] = split.write(tmp_path / "1.jsonl", "WORKER", 1, "n2", [])
    clock = engine_of(list(files.values())).clocks["boot of n2"]
    assert (clock.low, clock.high) == (None, None)
    assert clock.ahead == int((CLOCKS["n2"][0] - CLOCKS["n2"][1]) * 1e9)
    assert replay.judged_engine(engine_of(list(files.values()))) == []


def sequence(text: str) -> list[ev.Event]:
    """Return an event per character. "A": request A loads. "a": request a stores. "2": B is aborted. "-": ignored."""
    made: list[ev.Event] = []
    for letter in text:
        if letter == "-":
            made.append(ev.Granted("x", 0))
        elif letter.isdigit():
            made.append(ev.Finished(chr(ord("@") + int(letter)), True))
        else:
            made.append(ev.LoadDue(letter, 0, 64) if letter.isupper() else ev.Stored(letter, 64, 128, 64))
    return made


#: (case, scheduler's events, rank's events, paired events, [(differing request, RankDiffers.told)], unknown loads)
CASES = [
    ("the same", "AaBb", "AaBb", "AaBb", [], 0),
    ("other events between", "-Aa--B-b", "A-aBb-", "AaBb", [], 0),
    ("a load was lost", "ABC", "AC", "AC", [("B", True)], 0),
    ("a load of its own", "AC", "ABC", "AC", [("B", False)], 0),
    ("another load", "ABC", "AXC", "AC", [("B", True), ("X", False)], 0),
    ("a store was kept back", "AaBbC", "ABbC", "ABbC", [], 0),
    ("its record begins later", "ABCD", "CD", "CD", [], 2),
    ("its record ends earlier", "ABCD", "AB", "AB", [], 2),
    ("the scheduler's begins later", "CD", "ABCD", "CD", [], 0),
    ("nothing is on record", "ABCD", "", "", [], 4),
    ("the same load again", "AXBXC", "AXBXC", "AXBXC", [], 0),
    ("one of two equal loads", "AXXB", "AXB", "AB", [("X", True)], 0),
    ("equal loads at the end: which is lost?", "AXX", "AX", "AX", [], 1),
    ("only what is there twice", "XX", "X", "", [], 2),
    ("a load is missing, its request is aborted", "AB2C", "AC", "AC", [], 1),
    ("another one is aborted", "AB4C", "AC", "AC", [("B", True)], 0),
    ("aborted only after a later load that the rank did", "ABC2D", "ACD", "ACD", [("B", True)], 0),
    ("of its own, and aborted", "A2C", "ABC", "AC", [("B", False)], 0),
    ("another order: not one engine", "AB", "BA", "", [], 2),
]


@pytest.mark.parametrize(("what", "due", "started", "pairs", "differs", "unknown"), CASES, ids=[c[0] for c in CASES])
def test_compare(what: str, due: str, started: str, pairs: str, differs: list[tuple[str, bool]], unknown: int) -> None:
    scheduler, worker = sequence(due), sequence(started)
    found = engine_recordings.compare(1, scheduler, worker)
    assert "".join(due[here] for here, _ in found.pairs) == "".join(started[there] for _, there in found.pairs) == pairs
    assert [(event.request, event.told) for _, event in found.differs] == differs
    assert {event.rank for _, event in found.differs} <= {1}
    assert found.unknown == unknown
