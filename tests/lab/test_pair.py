"""Two engines with NixlConnector: what is sound comes out clean, with loads, and each rule finds what is planted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.conftest import RELEASES, Once
from tests.lab import pair_fuzzed

OPTIONS = Options(connector="nixl-pull", block_size=16, num_blocks=40, max_num_batched_tokens=64)
Plant = Callable[[Any], None]
FAULTS: dict[str, Plant] = {}


def fault(rule: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        FAULTS[rule] = plant
        return plant

    return register


@fault("LAB001")
def reads_come_from_the_next_block(pair: Any) -> None:
    agent = pair.decode.connector.workers[0].adapter.nixl_wrapper
    make = agent.make_prepped_xfer
    agent.make_prepped_xfer = lambda kind, mine, here, theirs, there, **more: make(
        kind, mine, here, theirs, [each + 1 for each in there], **more
    )


@fault("LAB020")
def blocks_stay_when_they_are_sent(pair: Any) -> None:
    pair.prefill.scheduler._free_blocks = lambda request: None


@fault("LAB021")
def the_thread_for_handshakes_dies(pair: Any) -> None:
    def listener() -> None:
        raise KeyError

    pair.network.listeners["prefill:5600"] = listener


@fault("KVR015")
def what_is_sent_is_reported_again(pair: Any) -> None:
    called, sent = pair.prefill.connector.workers[0].called, set()
    results = called.get_transfer_results

    def get_transfer_results(ended: set[str]) -> Any:
        answer = results(ended)
        again = set(sent)
        sent.update(answer.finished_sending)
        answer.finished_sending.update(again)
        return answer

    called.get_transfer_results = get_transfer_results


@fault("KVR017")
def leases_are_over_at_once(pair: Any) -> None:
    worker = pair.prefill.connector.workers[0].adapter
    start = worker.start_load_kv

    def start_load_kv(metadata: Any) -> None:
        start(metadata)
        worker._reqs_to_send.update(dict.fromkeys(worker._reqs_to_send, 0.0))

    worker.start_load_kv = start_load_kv


@fault("KVR018")
def a_request_is_sent_twice(pair: Any) -> None:
    admit = pair.router._admit

    def admit_both(engine: Any, name: str, tokens: list[int], most: int, params: dict[str, Any]) -> None:
        admit(engine, name, tokens, most, dict(params))
        if engine is pair.decode:
            admit(engine, f"{name}-again", tokens, most, dict(params))

    pair.router._admit = admit_both


def planted(rule: str) -> dict[str, Any]:
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.lab_engine import EngineDied
    from kvfix_tools.lab.pair import Pair

    with runner.quiet():
        pair = Pair(OPTIONS)
        if rule:
            FAULTS[rule](pair)
        with suppress(EngineDied):
            pair.ask("a", prompt(100), 5)
            pair.ask("b", prompt(150), 5)
            pair.step(3)
            pair.ask("c", prompt(60, seed=1), 5)
            pair.run()
            pair.step(3)
            pair.expect_all_ended()
    return {"found": sorted({each.code for each in pair.findings}), "counts": dict(pair.counts)}


def test_without_a_fault(once: Once) -> None:
    done = once(planted, RELEASES / "0.5.6", "")
    assert done["found"] == []
    assert done["counts"]["leases"] == 3
    assert done["counts"]["loaded_tokens"] >= 310 - 96  # the second prompt may hit the first one's blocks


@pytest.mark.parametrize("rule", sorted(FAULTS))
def test_each_rule_finds_what_is_planted(rule: str, once: Once) -> None:
    assert rule in once(planted, RELEASES / "0.5.6", rule)["found"]


@pytest.mark.parametrize("plain", [True, False])
def test_fuzzed_schedules_are_clean_with_the_fixes(plain: bool, once: Once) -> None:
    done = once(pair_fuzzed.fuzzed, RELEASES / "0.5.6", "nixl-pull", plain)
    assert done["violations"] == []
    assert not done["nothing"]
    assert done["same"]
    if not plain:
        assert all(
            done["counts"][each] for each in ("leases", "malformed", "restarts", "sent_again", "aborted_loading")
        )
