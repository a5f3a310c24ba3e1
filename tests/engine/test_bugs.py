"""Without kvfix, vLLM engines with LMCache die, leak, are slow or give wrong output. With kvfix, all engines work."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvfix_tools import recording
from tests.conftest import release
from tests.engine import start
from tests.engine.start import CROWD, Ran, prompt, server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

APPLY = pytest.mark.parametrize("apply", [False, True], ids=["as released", "with kvfix"])
ONE = prompt(300, 1)
#: Request `running` leaves too few blocks for request `waiting`. serve.py aborts `waiting` while `running` still runs.
ABORT: dict[str, Any] = {"running": (prompt(760, 9), 230), "waiting": (ONE, 2), "steps": 4, "extra_args": None}
#: `kvfix dump` reports this text while the scheduler runs this hook of the connector.
STANDS = "in get_num_new_matched_tokens of LMCacheConnectorV1 for "
#: In round 1, LMCache stores ONE. In round 2, vLLM computes ONE's first 96 tokens, then looks up the whole prompt.
ON_TOP = [[(ONE, 5)], [(ONE[:96], 1), (ONE, 5)]]
run = partial(start.run, environment=start.ONE_PROCESS)


def died(ran: Ran, text: str) -> bool:
    """Return True if the engine died. The log of a dead engine must contain `text`."""
    if ran.written is not None:
        return False
    assert text in ran.log, ran.log[-3000:]
    return True


@APPLY
def test_preempt_min_retrieve(apply: bool, tmp_path: Path) -> None:
    ran = run(tmp_path, apply, start.v1(32, min_retrieve_tokens=100_000), rounds=[CROWD])
    assert died(ran, "Preempted request") is not apply
    assert ran.findings() == (set() if apply else {"KVD103"})
    if apply:
        assert ran.answer["preemptions"] > 0


@APPLY
def test_aborted_while_waiting_then_max_load_unaligned(apply: bool, tmp_path: Path) -> None:
    transfer = start.v1(64, max_tokens_per_load=128)
    ran = run(tmp_path, apply, transfer, rounds=ON_TOP, before={1: [["abort_waiting", ABORT]]})
    kept = [line for line in ran.notes if line["what"] == "kept"]
    assert any(line["lookups"] for line in kept), "the request that was aborted had no hit"
    assert (kept[-1]["load_specs"], kept[-1]["priorities"], kept[-1]["lookups"]) == ((0, 0, 0) if apply else (1, 1, 1))
    assert died(ran, "Mismatch in tokens to load: 128 vs 192 (tokens in lmcache) - 96 (tokens in vllm)") is not apply
    assert ran.findings() == (set() if apply else {"KVD102"})
    if apply:
        assert ran.count("load") > 0
        assert ran.answer["rounds"][0][0] == ran.answer["rounds"][1][1]


@pytest.fixture(scope="module")
def newest_server() -> Iterator[dict[str, Any]]:
    with server() as transfer:
        yield transfer


@pytest.fixture(scope="module")
def server_of_046() -> Iterator[dict[str, Any]]:  # vLLM's copy of the MP connector needs LMCache 0.4.4 to 0.4.6
    with server(release("0.4.6")) as transfer:
        yield transfer


@APPLY
def test_statistics_of_an_aborted_request(apply: bool, tmp_path: Path, newest_server: dict[str, Any]) -> None:
    """A client aborts a request that asks LMCacheMPConnector for statistics. Any client can send this request."""
    asks = {"kv_transfer_params": {"cached_token_stats": True}}
    abort = {**ABORT, "steps": 0, "running": (prompt(100, 9), 30), "extra_args": asks}
    ran = start.run(
        tmp_path, apply, newest_server, rounds=[[(ONE, 2)]], before={0: [["abort_waiting", abort]]},
        engine={**start.ENGINE, "max_num_seqs": 1}, environment={"KVFIX_TEST_HANG": "abort_comes_first"},
    )  # fmt: skip
    assert died(ran, "Request tracker for request_id") is not apply
    assert ("EngineDeadError" in ran.log) is not apply
    assert ran.findings() == (set() if apply else {"KVD110"})


@APPLY
def test_polls_of_a_waiting_request_in_vllms_own_copy(apply: bool, tmp_path: Path, server_of_046) -> None:  # type: ignore[no-untyped-def]
    """While a request waits for blocks, each lookup adds its hit to the stored count. So LMCache stores too little."""
    long, other = prompt(900, 21 + apply), prompt(640, 23 + apply)  # the cases share one server
    rounds = [[(long[:512], 1)], [(other, 40), (long, 2)], [(long, 2)]]
    upstream = {"LMCACHE_USE_UPSTREAM_MP": "1"}
    ran = start.run(tmp_path, apply, server_of_046, rounds=rounds, lmcache=release("0.4.6"), environment=upstream)
    assert "Force use builtin LMCacheMPConnectorUpstream" in ran.log
    assert [line["tokens"] for line in ran.notes if line["what"] == "grant"] == [512, 896 if apply else 512]
    assert ran.count("load") == 2
    assert ran.findings() == {"KVD777"}  # KVD777 reports a risk: LMCache 0.4.6 guesses the KV layout of vLLM 0.32
    assert ran.answer["rounds"][1][1] == ran.answer["rounds"][2][0]


@APPLY
def test_a_worker_that_does_not_answer_lookups(apply: bool, tmp_path: Path) -> None:
    """KVF015 pauses the lookups after timeouts. Without KVF015, a dump shows a scheduler that waits for a lookup."""
    dumps: list[dict[str, Any]] = []

    def stands_in_the_lookup(pid: int) -> None:
        for number in range(0 if apply else 8):
            (tmp_path / str(number)).mkdir()
            dumps.append(start.dump(pid, tmp_path / str(number)))
            if any(row["hook"].startswith(STANDS) for row in dumps[-1]["processes"]):
                return

    transfer = start.v1(64, lookup_timeout_ms=300)
    environment = {**start.ONE_PROCESS, "KVFIX_TEST_HANG": "lookup_thread_waits"}
    environment |= {} if apply else {"KVFIX": "observe only="}
    # `kvfix dump` reads the environment with which a process was started, so the dumped process must not be a fork.
    ran = run(
        tmp_path, apply, transfer, rounds=[CROWD], environment=environment, before={0: [["spoil"]]},
        when=("Timeout occurred for rank", stands_in_the_lookup), forked=apply,
    )  # fmt: skip
    assert ran.answer["rounds"]
    waits = ran.log.count("Timeout occurred for rank")
    assert waits <= 10 if apply else waits > 10
    assert ("worker did not answer two lookups in time" in ran.log) is apply
    if not apply:
        assert any(row["hook"].startswith(STANDS) for row in dumps[-1]["processes"]), dumps
        recorders = [recording.read(path) for path in ran.dumps("signal")]
        assert any(type(entry.event).__name__ == "TimedOut" for found in recorders for entry in found.entries)


def test_a_preempted_request_whose_worker_is_in_the_schedulers_process(tmp_path: Path) -> None:
    """vLLM preempts and resumes a prefill. The repeated request loads KV. Only with kvfix, the answers are equal."""

    def twice(seed: int) -> list[list[tuple[list[int], int]]]:
        other, preempted = (prompt(300, seed), 60), (prompt(900, seed + 1), 8)
        return [[other, preempted], [preempted]]

    ran = run(
        tmp_path, False, start.v1(64), rounds=[*twice(31), *twice(41)], before={2: [["apply"]]},
        engine={**start.ENGINE, "max_num_batched_tokens": 64},
    )  # fmt: skip
    assert {process["pid"] for process in ran.processes().values()} == {ran.pid}
    assert [count > 0 for count in ran.answer["preempted"]] == [True, False, True, False]
    granted = [line["tokens"] for line in ran.notes if line["what"] == "grant"]
    assert granted.count(896) == 2, granted
    assert ran.count("load") > 0
    (_, first), (again,), (_, other), (other_again,) = ran.answer["rounds"]
    assert again != first
    assert other_again == other
