"""Diagnose logs of real engines on the CPU (tests/engine/start.py). In-process LMCache has a fake GPU connector.

planted.tar.xz has logs of engines with and without a planted fault (tests/engine/planted_logs.toml).
`python -m tests.engine.planted_logs FOLDER --pack` makes this archive.
"""

import io
import os
import sys
import tarfile
from pathlib import Path

import pytest

from kvfix.ledger.events import Stored
from kvfix_tools.diagnose import advice, command
from kvfix_tools.diagnose.diagnosis import Diagnosis, diagnosed
from tests.conftest import RELEASES, ForkServer
from tests.diagnose.lines import LOGS, codes, diagnose_files, real
from tests.engine.planted_logs import CASES, Case

ARCHIVE = LOGS / "planted.tar.xz"


def diagnose(*names: str) -> Diagnosis:
    return diagnose_files(*(LOGS / f"{name}.log.gz" for name in names))


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["crash-0.3.10"], ["KVD101"]),  # a small version of LMCache issue 2158, with LMCache 0.3.10
        (["healthy-0.5.6-debug"], []),  # at log level DEBUG; the log has only the first requests
        (["min-retrieve-0.5.6"], ["KVD103"]),  # six requests that preempt one another, with min_retrieve_tokens
        (["deaf-0.5.6"], ["KVD203"]),  # the worker answers no lookups
        # LMCache fails to start in the worker. The lookups of three requests time out.
        (["degraded-0.5.6"], ["KVD393", "KVD207", "KVD203"]),
        # LMCache in multi-process mode: a working engine, a server in the wrong mode, and an engine without a server.
        (["mp-0.5.6", "mp-0.5.6.server"], []),
        (["mode-0.5.6", "mode-0.5.6.server"], ["KVD206", "KVD116"]),
        (["mode-0.5.6.server"], ["KVD206"]),
        (["no-server-0.5.6"], ["KVD116"]),
    ],
    ids=lambda value: "+".join(value) or "nothing",
)
def test_real_logs(names: list[str], found: list[str]) -> None:
    diagnosis = diagnose(*names)
    assert codes(diagnosis) == found
    if "server" not in names[0]:
        assert diagnosis.releases.one("vllm") == "0.32.0"
        assert diagnosis.releases.one("lmcache") == names[0].split("-")[-1 if "debug" not in names[0] else 1]


@pytest.mark.parametrize("names", [["healthy-0.5.6", "crash-0.3.10"], ["crash-0.3.10", "healthy-0.5.6"]])
def test_an_engine_that_was_upgraded_has_one_log(names: list[str]) -> None:
    """The log names two LMCache releases. The remedy is for the release whose engine crashed."""
    diagnosis = diagnosed(b"".join(real(name) * (5 if "healthy" in name else 1) for name in names))
    assert codes(diagnosis) == ["KVD101"]
    remedy, alone = (advice.remedy(each, each.findings[0]) for each in (diagnosis, diagnose("crash-0.3.10")))
    assert remedy == alone
    assert "KVF001" in remedy.now


def test_a_recording_is_left_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, bundle = LOGS / "recorder.jsonl", tmp_path / "kvfix-dump-7.tar.gz"
    with tarfile.open(bundle, "w:gz") as archive:
        archive.add(file, "kvfix-dump-7/a.jsonl")
    for path in (file, bundle):
        assert command.main([str(path)]) == 2
        assert f"{path} contains a kvfix recording. Run: kvfix replay {path}\n" in capsys.readouterr().err
    assert command.main([str(file), str(LOGS / "healthy-0.5.6.log.gz")]) == 0
    assert f"note: {file} contains a kvfix recording" in capsys.readouterr().out


def test_the_history_of_a_crash() -> None:
    found = diagnose("crash-0.3.10").findings[0]
    assert found.sentence == "granted 256, but hit 256 - computed 288 = -32; vLLM had 288 computed tokens"
    assert found.violated[0].message == "granted 256, promised 0"
    assert [event.what for event in found.history] == [
        "lookup at 0 computed tokens promises 0: hit 0 - computed 0 = 0",
        "tokens 0 to 256 stored",
        "lookup at 288 computed tokens promises 0: hit 256 - computed 288 = -32, nothing to load",
        "vLLM allocates blocks and grants 256 external tokens",
        "update_state_after_alloc raises AssertionError: Mismatch in tokens to load: 256 vs 256 (tokens in lmcache) - "
        "288 (tokens in vllm) - 0 (full lmcache hits subtracts last token to recalculate logits) for request "
        "1-aa3dc6b7",
    ]


def test_why_a_worker_goes_on_without_lmcache() -> None:
    """LMCache logs the reason as a traceback inside one message, so the message has several lines."""
    found = diagnose("degraded-0.5.6").findings[1]
    assert found.sentence == "LMCache failed to start: RuntimeError: No supported cpu connector found."
    assert [line.line for line in found.evidence] == [90, 89]


def test_a_debug_log_hides_nothing() -> None:
    diagnosis = diagnose("healthy-0.5.6-debug")
    assert diagnosis.debug
    assert diagnosis.hidden() == []
    assert diagnosis.counts["storing"] > 0
    events = [event for history in diagnosis.ledger.histories.values() for event in history.events]
    assert sum(isinstance(event, Stored) for event in events) == diagnosis.counts["storing"]


def test_the_innermost_frames_of_a_deep_fault_are_kept() -> None:
    """faulthandler prints the innermost frame first. The process crashed in this frame."""
    rows = "".join(f'  File "/opt/app/x.py", line {number} in f{number}\n' for number in range(1, 91))
    log = diagnosed(f"Fatal Python error: Segmentation fault\n\nThread 7 (most recent call first):\n{rows}\n".encode())
    assert log.failures.raised[0].fields["frames"][-1] == ("/opt/app/x.py", 1, "f1")


with tarfile.open(ARCHIVE) as archive:
    PACKED = {name.partition("/")[0] for name in archive.getnames()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("planted")
    with tarfile.open(ARCHIVE) as packed:
        packed.extractall(to, filter="data")
    return to


@pytest.mark.parametrize("case", [case for case in CASES if case.name in PACKED], ids=lambda case: case.name)
def test_the_first_finding_is_the_planted_fault(case: Case, folder: Path) -> None:
    found = diagnose_files(*sorted((folder / case.name).iterdir()))
    assert next((each.rule.code for each in found.findings if not each.is_note), "") == case.code


def test_every_planted_fault_has_a_healthy_twin() -> None:
    names = {case.name: case for case in CASES}
    planted = [case for case in CASES if case.truth]
    assert [case.name for case in planted if names[case.twin].truth] == []
    assert {case.twin for case in planted if case.name in PACKED} <= PACKED
    assert sum(case.name in PACKED and bool(case.code) for case in planted) >= 30


def played(seeds: int) -> list[tuple[list[str], str, int]]:
    """Play a random schedule without faults for each seed. Return violated rules, LMCache's log, and loaded tokens."""
    os.environ["LMCACHE_LOG_LEVEL"] = "DEBUG"
    sys.stderr = log = io.StringIO()  # before LMCache creates log handlers, which keep this stderr
    from kvfix_tools.lab import runner

    runner.prepare(None)
    from kvfix_tools.lab.fuzz.fuzz import play
    from kvfix_tools.lab.fuzz.schedule import draw

    found = []
    for seed in range(seeds):
        done = play(draw(seed, "v1", plain=True))
        violated = [each.code for each in done.findings if each.verdict == "violated" and each.code != "KVR009"]
        found.append((violated, log.getvalue(), done.counts["loaded_tokens"]))
        log.seek(0)
        log.truncate()
    return found


@pytest.mark.parametrize("release", ["0.3.12", "0.4.3", "0.5.6"])
def test_what_is_right_in_the_lab_is_right_in_its_log(release: str, fork_server: ForkServer) -> None:
    healthy = [(log, loaded) for violated, log, loaded in fork_server(played, RELEASES / release, 12) if not violated]
    assert len(healthy) > 3
    judged = 0
    for log, _ in healthy:
        diagnosis = diagnosed(log.encode())
        assert [found.rule.code for found in diagnosis.findings] == [], [found.sentence for found in diagnosis.findings]
        assert diagnosis.debug
        judged += diagnosis.counts["due"]
    assert judged > 0
    assert sum(loaded for _, loaded in healthy) > 0
