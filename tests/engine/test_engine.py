"""In real engines, kvfix runs in EngineCore and worker, prevents LMCache issue 2158's crash, and changes no answer."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import release
from tests.engine import start
from tests.engine.start import CROWD, REPORT, ROUNDS, Ran, server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

EARLY = "0.3.10"
#: The error message of LMCache issue 2158. The token counts are those of start.REPORT, a small version of the issue.
MISMATCH = (
    "AssertionError: Mismatch in tokens to load: 256 vs 256 (tokens in lmcache) - 288 (tokens in vllm) - 0 "
    "(full lmcache hits subtracts last token to recalculate logits) for request"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run plain vLLM without a connector. The other three engines must give the same outputs."""
    return start.run(tmp_path_factory.mktemp("plain"), apply=False, transfer=None, environment=start.ONE_PROCESS)


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run the newest LMCache, with kvfix in mode `check`. In round 5, the fake GPU connector spoils the KV."""
    more: dict[str, Any] = {"rounds": [*ROUNDS, CROWD], "before": {4: [["spoil"]]}, "mode": "check"}
    return start.run(tmp_path_factory.mktemp("v1"), apply=True, transfer=start.v1(64), **more)


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run LMCache 0.3.10, which has the bug of issue 2158. kvfix applies the fix. The processes are not forks."""
    return start.run(tmp_path_factory.mktemp("early"), True, start.v1(256), lmcache=release(EARLY), forked=False)


@pytest.fixture(scope="module")
def multi_process(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run LMCacheMPConnector, with kvfix in mode `check`. KVFIX_TEST_FAULTS makes kvfix raise in every hook."""
    with server() as transfer:
        more = {"mode": "check", "environment": {"KVFIX_TEST_FAULTS": "1"}}
        return start.run(tmp_path_factory.mktemp("mp"), apply=True, transfer=transfer, **more)


def assert_same_outputs(ran: Ran, plain: Ran) -> None:
    assert ran.answer["preemptions"] > 0
    assert plain.answer["preemptions"] > 0
    assert ran.count("grant") > 0
    assert ran.count("load") > 0
    assert ran.answer["rounds"][: len(ROUNDS)] == plain.answer["rounds"]


def test_kvfix_diagnose_finds_nothing(plain: Ran, in_process: Ran, early: Ran, multi_process: Ran) -> None:
    assert [ran.findings() for ran in (plain, in_process, early, multi_process)] == [set()] * 4


def assert_arrived(ran: Ran, verdict: str, mode: str = "fix") -> None:
    """Assert that kvfix runs in EngineCore and worker, although only the parent process has called kvfix.apply()."""
    found = ran.processes()
    assert found["SCHEDULER"]["process"] == "EngineCore"
    assert "Worker" in found["WORKER"]["process"]
    assert len({ran.pid, found["SCHEDULER"]["pid"], found["WORKER"]["pid"]}) == 3
    for process in found.values():
        assert process["choice"] == mode
        assert {row["code"]: row["verdict"] for row in process["status"]}["KVF001"] == verdict


def test_in_process_connector(in_process: Ran, plain: Ran) -> None:
    assert_arrived(in_process, "fixed-upstream", "check")
    assert_same_outputs(in_process, plain)


def test_check_finds_nothing_and_has_recorded_all(in_process: Ran) -> None:
    for part in in_process.assert_healthy().parts:
        assert (part.recording.head["mode"], part.recording.head["violations"]) == ("check", {})
        assert part.line["trusted"]
        wanted = {"LoadDue", "Stored", "Finished"}
        wanted |= {"Asked", "Granted", "Scheduled", "Preempted"} if part.is_scheduler else set()
        assert wanted <= {type(entry.event).__name__ for entry in part.entries}


def test_spoiled_loads_change_the_outputs(in_process: Ran, plain: Ran) -> None:
    assert in_process.answer["rounds"][4] != plain.answer["rounds"][3]


def test_multi_process_connector(multi_process: Ran, plain: Ran) -> None:
    assert_arrived(multi_process, "fixed-upstream", "check")
    assert_same_outputs(multi_process, plain)


def test_faults_in_all_hooks_are_logged_once(multi_process: Ran) -> None:
    logged = [line for line in multi_process.log.splitlines() if "a fault of kvfix itself" in line]
    assert len(logged) == len({line.partition("[pid ")[2].partition("]")[0] for line in logged}) == 2, logged
    assert all("planted" in line for line in logged)


class TestTheReportedCrash:
    """Reproduce the crash of LMCache issue 2158 in a whole engine."""

    def test_as_released_the_engine_dies(self, tmp_path: Path) -> None:
        ran = start.run(tmp_path, apply=False, transfer=start.v1(256), lmcache=release(EARLY), rounds=[REPORT])
        assert ran.written is None
        assert MISMATCH in ran.log
        assert "EngineDeadError" in ran.log
        assert ran.findings() == {"KVD101"}
        for process in ran.processes().values():  # kvfix is installed, but does nothing without a configuration
            assert process["choice"] is None
            assert {row["code"]: row["verdict"] for row in process["status"]}["KVF001"] == "applicable"

    def test_with_kvfix_it_serves(self, early: Ran, plain: Ran) -> None:
        assert_arrived(early, "applied")
        assert MISMATCH not in early.log
        assert_same_outputs(early, plain)

    def test_the_log_names_the_fix_once_in_each_process(self, early: Ran) -> None:
        logged = [line for line in early.log.splitlines() if "applied to" in line and "KVF001" in line]
        assert len(logged) == len({line.partition("[pid ")[2].partition("]")[0] for line in logged}) == 2, logged
