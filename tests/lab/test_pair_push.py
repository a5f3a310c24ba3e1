"""Two engines where prefill writes into decode's blocks: what is sound comes out clean, and each rule finds a fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.conftest import RELEASES, Once
from tests.lab import pair_fuzzed

OPTIONS = Options(connector="nixl-push", block_size=16, num_blocks=40, max_num_batched_tokens=64)
Plant = Callable[[Any], None]
FAULTS: dict[str, Plant] = {}


def fault(rule: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        FAULTS[rule] = plant
        return plant

    return register


@fault("LAB001")
def writes_come_from_the_next_block(pair: Any) -> None:
    agent = pair.prefill.connector.workers[0].adapter.nixl_wrapper
    make = agent.make_prepped_xfer
    agent.make_prepped_xfer = lambda kind, mine, here, theirs, there, **more: make(
        kind, mine, [each + 1 for each in here], theirs, there, **more
    )


@fault("LAB003")
def registrations_are_lost(pair: Any) -> None:
    pair.decode.connector.workers[0].adapter._do_send_reg_notif = lambda *_: None


@fault("LAB022")
def a_registration_is_kept(pair: Any) -> None:
    pair.prefill.connector.workers[0].adapter._pending_d_registrations["r-00000009"] = {}


@fault("KVR020")
def what_is_over_is_still_written(pair: Any) -> None:
    worker = pair.prefill.connector.workers[0].adapter
    start = worker.start_load_kv

    def start_load_kv(metadata: Any) -> None:
        start(metadata)
        worker._reqs_to_send.update(dict.fromkeys(worker._reqs_to_send, 0.0))

    worker.start_load_kv = start_load_kv
    worker._evict_finished_inbox.put = lambda _: None


@fault("KVR021")
def leases_are_over_once_it_is_written(pair: Any) -> None:
    worker = pair.prefill.connector.workers[0].adapter
    reap = worker._reap_expired_send_leases

    def reap_too_much(sent: set[str]) -> None:
        worker._reqs_to_send.update(dict.fromkeys(worker._sending_transfers, 0.0))
        reap(sent)

    worker._reap_expired_send_leases = reap_too_much


@fault("KVR022")
def decode_forgets_what_it_waits_for(pair: Any) -> None:
    worker = pair.decode.connector.workers[0].adapter
    send = worker._do_send_reg_notif

    def sends(request: str, registration: Any) -> None:
        send(request, registration)
        worker._recving_metadata.pop(request, None)

    worker._do_send_reg_notif = sends


def planted(rule: str, at_once: bool) -> dict[str, Any]:
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.lab_engine import EngineDied
    from kvfix_tools.lab.pair import Pair

    with runner.quiet():
        pair = Pair(OPTIONS)
        if rule:
            FAULTS[rule](pair)
        with suppress(EngineDied):
            ask = pair.ask_at_once if at_once else pair.ask
            ask("a", prompt(100), 5)
            ask("b", prompt(150), 5)
            pair.step(3)
            ask("c", prompt(60, seed=1), 5)
            pair.run()
            pair.step(3)
            pair.expect_all_ended()
    return {"found": sorted({each.code for each in pair.findings}), "counts": dict(pair.counts)}


@pytest.mark.parametrize("at_once", [False, True])
def test_without_a_fault(at_once: bool, once: Once) -> None:
    done = once(planted, RELEASES / "0.5.6", "", at_once)
    assert done["found"] == []
    assert done["counts"]["leases"] == 3
    assert done["counts"]["loaded_tokens"] >= 310 - 96  # the second prompt may hit the first one's blocks


@pytest.mark.parametrize("rule", sorted(FAULTS))
def test_each_rule_finds_what_is_planted(rule: str, once: Once) -> None:
    assert rule in once(planted, RELEASES / "0.5.6", rule, False)["found"]


@pytest.mark.parametrize("plain", [True, False])
def test_fuzzed_schedules_are_clean_with_the_fixes(plain: bool, once: Once) -> None:
    done = once(pair_fuzzed.fuzzed, RELEASES / "0.5.6", "nixl-push", plain, "check")
    assert done["violations"] == []
    assert not done["nothing"]
    assert done["same"]
    if not plain:
        drawn = "at_once", "leases", "malformed", "restarts", "sent_again", "asked_again"
        assert all(done["counts"][each] for each in drawn)


def aborted_while_it_waits(fixes: bool) -> list[str]:
    """What is found, kvfix's own reports too, where decode's request is aborted and prefill never hears of it."""
    from kvfix_tools.lab.fuzz import play
    from kvfix_tools.lab.runner import applied
    from kvfix_tools.lab.schedule import Schedule

    options = dataclasses.replace(OPTIONS, extra={"push_registration_timeout": 5.0})
    steps = [("fail", "notice", 1), ("ask_at_once", "r", 0, 64, 5, 1), ("step",), ("abort", 0), ("step",)]
    with applied(fixes, "check"):
        return sorted({finding.code for finding in play(Schedule(options, tuple(steps))).violations})


def test_what_is_kept_until_its_end_is_not_left(once: Once) -> None:
    """Decode's blocks are prefill's to write into until the registration ends (KVF322); as released, for ever."""
    assert once(aborted_while_it_waits, RELEASES / "0.5.6", True) == []
    assert "KVR009" in once(aborted_while_it_waits, RELEASES / "0.5.6", False)
