"""`kvfix look` and the watchdog explain hangs planted in a real engine. A healthy engine under load has no finding."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from kvfix.ledger import liveness, standstill
from kvfix.ledger.standstill import Look, Verdict
from kvfix_tools import recording
from kvfix_tools.doctor import servers as lmcache_server
from kvfix_tools.dump import processes
from kvfix_tools.look import command, looking
from tests.conftest import RELEASES, Once
from tests.engine import start
from tests.engine.start import ENGINE, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
#: Maximum seconds until a hang has begun and is explained.
LIMIT = 150
LOOKS = 12
#: SHORT: ten short prompts. ONE_STEP: a token budget with which the scheduler looks up all ten prompts in one step.
SHORT = [(prompt(70, seed), 4) for seed in range(31, 41)]
ONE_STEP = {"max_num_batched_tokens": 1024}
#: For the bug of KVF208, each request of BOTH loads 8 of 20 blocks. The second request has priority and needs 8 more.
STORED = [(prompt(256, seed), 1) for seed in (21, 22)]
BOTH = [(prompt(280, 21), 4), (prompt(512, 22), 4)]
TWENTY = {"num_gpu_blocks_override": 21, "max_model_len": 640, "scheduling_policy": "priority"}


class Hang(NamedTuple):
    """A hang. code, message: parts of the expected verdict. kvfix skips `fix`, which would prevent the hang."""

    code: str
    message: str
    rounds: list[Any] = [SHORT, SHORT]
    engine: dict[str, Any] = {}
    in_process: bool = False
    fix: str = ""


HANGS = {
    "lookup_thread_ends": Hang(
        "KVD203",
        "the scheduler waits 3 s for each lookup; rank 0 does not answer: its thread for lookups has ended",
        engine=ONE_STEP,  # in one step, ten lookups wait 3 s each. Without ONE_STEP, a step has only five lookups
        in_process=True,
        fix="KVF015",
    ),
    "server_stops": Hang("KVD204", "the LMCache server "),
    "load_is_lost": Hang("KVD208", "waits for a load that no worker has"),
    "hook_waits": Hang("KVD213", "has been in start_load_kv for at least "),
    "locked_out": Hang("KVD202", "1 request is loaded and waits behind r2-", rounds=[STORED, BOTH], engine=TWENTY),
}
#: Hangs that tests/engine_state/test_watchdog.py also plays. All other hangs need another process or a long step.
SHOWN_IN_THE_LAB = ("server_stops", "hook_waits", "locked_out")


@pytest.fixture(scope="module")
def transfer() -> Iterator[dict[str, Any]]:
    """Yield the kv_transfer_config of an LMCache server. Each test has its own model, so tests share no stored KV."""
    with start.server() as transfer:
        yield transfer


def hangs(
    what: str, transfer: dict[str, Any], folder: Path, until: Callable[[int], bool], environment: dict[str, str]
) -> start.Ran:
    """Run an engine with this hang. Kill the engine once `until` returns True."""
    hang = HANGS[what]
    here = psutil.Process().children(recursive=True)
    servers = [each for each in here if "server" in (words := each.cmdline()) and "--chunk-size" in words]

    def do(pid: int) -> None:
        end = time.monotonic() + LIMIT
        try:
            while not (folder / "spoil").exists():
                assert time.monotonic() < end, "the engine does not start"
                time.sleep(0.2)
            while not until(pid):
                assert time.monotonic() < end, f"the engine does not hang: {(folder / 'log').read_text()[-1500:]}"
                time.sleep(0.2)
        finally:
            with suppress(ProcessLookupError):  # the engine has ended and did not hang
                os.killpg(pid, signal.SIGKILL)
            for each in servers:
                each.resume()

    planted = {"KVFIX_TEST_HANG": what, "KVFIX_TEST_SERVER": " ".join(str(each.pid) for each in servers), **environment}
    return start.run(
        folder, False, start.v1(64) if hang.in_process else transfer, rounds=hang.rounds, environment=planted,
        engine={**ENGINE, **hang.engine}, when=("Initializing a V1 LLM engine", do),
        before={1: [["spoil"], *([["one_by_one", BOTH]] if what == "locked_out" else [])]},
    )  # fmt: skip


def continued(file: str) -> Any:
    """Return the result of `kvfix lab continue` for this file of `kvfix look --save`."""
    from kvfix_tools.lab import continue_state

    return continue_state.continued(Path(file)).as_json({})


@pytest.mark.parametrize("what", HANGS)
def test_look_explains_a_hang(what: str, transfer: dict[str, Any], tmp_path: Path, once: Once) -> None:
    found: list[Verdict] = []
    saved = tmp_path / "look.json"

    def looked(pid: int) -> bool:
        # engine_of(pid) would also find the other engines that the test process has started
        looks = command.enough(looking.Looker(processes.tree(pid), full=True))
        assert all(each.get("kvfix") is None for each in looks[-1].processes)  # kvfix is not in the engine
        found[:] = standstill.verdicts(looks)
        if found:
            servers = lmcache_server.of(looks[-1].processes)
            assert [each["answers"] for each in servers] == ([] if HANGS[what].in_process else [what != "server_stops"])
            command.save_state(str(saved), looks[-1], found)
        return bool(found)

    hangs(what, transfer, tmp_path, looked, {"KVFIX": "off"})
    assert found[0].code == HANGS[what].code, found
    assert HANGS[what].message in found[0].message
    if what == "locked_out":
        lab = once(continued, RELEASES / "0.5.6", str(saved))
        assert "which needs 8 blocks; 4 are free" in lab["as_released"]["stuck"]
        assert lab["with_fixes"] == {"ended": 2, "requests": 2, "stuck": "", "also": []}
        assert lab["differs"] == []


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[start.LONG] if what in SHOWN_IN_THE_LAB else []) for what in HANGS]
)
def test_the_watchdog_explains_a_hang(what: str, transfer: dict[str, Any], tmp_path: Path) -> None:
    skip = f" skip={HANGS[what].fix}" if HANGS[what].fix else ""
    log, report = tmp_path / "log", "State, stacks and events"
    environment = {"KVFIX": f"observe{skip}", "KVFIX_WATCHDOG": "8"}
    ran = hangs(what, transfer, tmp_path, lambda _: report in log.read_text(), environment)
    (line,) = [line for line in ran.log.splitlines() if report in line]
    assert f" {HANGS[what].code} " in line, line
    assert HANGS[what].message in line
    (bundle,) = ran.dumps("standstill")
    lines = recording.read(bundle).lines
    assert {each["pid"] for each in lines["stacks"]} == {each["pid"] for each in lines["state"]}
    assert sorted(each["process"] for each in lines["state"]) == ["EngineCore", "VllmWorker-0"]


def test_a_healthy_engine(transfer: dict[str, Any], tmp_path: Path) -> None:
    looks: list[Look] = []
    decided: list[Look] = []
    servers: list[dict[str, Any]] = []
    clients: set[int] = set()

    def do(pid: int) -> None:
        until = time.monotonic() + 200
        while time.monotonic() < until and not (looks and _busy(looks[-1])):
            time.sleep(0.5)
            looker = looking.Looker(looking.with_vllm(processes.tree(pid), pid), full=False)
            looks[:] = [looker.look()]
        for _ in range(LOOKS):
            looks.append(looker.look())
            if liveness.engines(looks[-1].processes):
                servers[:] = lmcache_server.of(looks[-1].processes)
                clients.update(lmcache_server.client_of(each["pid"]) for each in servers)
        decided.extend(command.enough(looker))
        (tmp_path / "stop").touch()  # the engine repeats requests until this file exists, so all looks find requests

    when = ("Initializing a V1 LLM engine", do)
    ran = start.run(tmp_path, False, transfer, calm=start.CROWD, flags=str(tmp_path), when=when)
    assert all(each == ran.answer["rounds"][0] for each in ran.answer["rounds"])
    inside = [each for each in looks if liveness.engines(each.processes)]
    assert len(inside) > LOOKS // 2
    assert sum(map(_busy, inside)) > 2
    (engine,) = liveness.engines(inside[-1].processes)
    assert engine.sees_transfers
    assert [each["class"] for each in engine.connectors] == ["LMCacheMPConnector"]
    for first, second in pairwise(inside):
        assert standstill.verdicts([first, second]) == []
    assert standstill.verdicts(decided) == []
    (server_of_it,) = servers
    assert server_of_it["answers"]
    assert 0 < server_of_it["used_bytes"] < server_of_it["total_bytes"]
    assert server_of_it["objects"] > 0
    assert clients - {0}
    assert clients - {0} <= {each["pid"] for look in inside for each in look.processes}
    assert f"LMCache server ({server_of_it['pid']}): L1 " in lmcache_server.line(server_of_it)


def _busy(look: Look) -> bool:
    return any(engine.requests for engine in liveness.engines(look.processes))
