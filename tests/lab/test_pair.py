"""Two engines with NIXL pull, NIXL push or Mooncake: healthy schedules are clean, and each planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvfix_tools.lab.options import Options
from tests.conftest import RELEASES, Once
from tests.lab import pair_fuzzed
from tests.lab.pair_fuzzed import Plant

PULL, PUSH, MOONCAKE = "nixl-pull", "nixl-push", "mooncake"
#: (connector, rule) -> fault
FAULTS: dict[tuple[str, str], Plant] = {}
#: Requests whose prefill and decode begin together.
AT_ONCE = {PULL: "", PUSH: "", MOONCAKE: "b"}
#: What happens in schedules with faults.
HAPPENED = {
    PULL: ("leases", "malformed", "restarts", "sent_again", "aborted_loading"),
    PUSH: ("at_once", "leases", "malformed", "restarts", "sent_again", "asked_again"),
    MOONCAKE: ("malformed", "restarts", "sent_again", "at_once"),
}


def fault(rule: str, *connectors: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        FAULTS.update(dict.fromkeys([(connector, rule) for connector in connectors], plant))
        return plant

    return register


@fault("LAB001", PULL)
def reads_come_from_the_next_block(pair: Any) -> None:
    pair_fuzzed.read_the_next_block(pair.decode.connector.workers[0].adapter.nixl_wrapper)


@fault("LAB001", PUSH)
def writes_come_from_the_next_block(pair: Any) -> None:
    agent = pair.prefill.connector.workers[0].adapter.nixl_wrapper
    make = agent.make_prepped_xfer
    agent.make_prepped_xfer = lambda kind, mine, here, theirs, there, **more: make(
        kind, mine, [each + 1 for each in here], theirs, there, **more
    )


@fault("LAB001", MOONCAKE)
def writes_go_into_the_next_block(pair: Any) -> None:
    pair_fuzzed.write_into_the_next_block(pair)


@fault("LAB003", PUSH)
def registrations_are_lost(pair: Any) -> None:
    pair.decode.connector.workers[0].adapter._do_send_reg_notif = lambda *_: None


@fault("LAB020", PULL, MOONCAKE)
def blocks_stay_when_they_are_sent(pair: Any) -> None:
    pair.prefill.scheduler._free_blocks = lambda request: None


@fault("LAB021", PULL)
def the_thread_for_handshakes_dies(pair: Any) -> None:
    def listener() -> None:
        raise KeyError

    pair.network.listeners["prefill:5600"] = listener


@fault("LAB022", PUSH)
def a_registration_is_kept(pair: Any) -> None:
    pair.prefill.connector.workers[0].adapter._pending_d_registrations["r-00000009"] = {}


@fault("LAB025", MOONCAKE)
def a_coroutine_raises(pair: Any) -> None:
    async def record_send_reqs(metadata: Any) -> None:
        raise KeyError

    pair.prefill.connector.workers[0].adapter.record_send_reqs = record_send_reqs


@fault("LAB026", MOONCAKE)
def prefills_are_taken_for_aborted(pair: Any) -> None:
    scheduler = pair.prefill.connector.scheduler_side
    scheduler.request_finished = lambda request, blocks: (False, None)


@fault("KVR015", PULL)
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


@fault("KVR017", PULL)
def leases_are_over_at_once(pair: Any) -> None:
    pair_fuzzed.leases_are_over_at_once(pair)


@fault("KVR018", PULL)
def a_request_is_sent_twice(pair: Any) -> None:
    admit = pair.router._admit

    def admit_both(engine: Any, name: str, tokens: list[int], most: int, params: dict[str, Any]) -> None:
        admit(engine, name, tokens, most, dict(params))
        if engine is pair.decode:
            admit(engine, f"{name}-again", tokens, most, dict(params))

    pair.router._admit = admit_both


@fault("KVR020", PUSH)
def what_is_over_is_still_written(pair: Any) -> None:
    pair_fuzzed.leases_are_over_at_once(pair)
    pair.prefill.connector.workers[0].adapter._evict_finished_inbox.put = lambda _: None


@fault("KVR021", PUSH)
def leases_are_over_once_it_is_written(pair: Any) -> None:
    worker = pair.prefill.connector.workers[0].adapter
    reap = worker._reap_expired_send_leases

    def reap_too_much(sent: set[str]) -> None:
        worker._reqs_to_send.update(dict.fromkeys(worker._sending_transfers, 0.0))
        reap(sent)

    worker._reap_expired_send_leases = reap_too_much


@fault("KVR021", MOONCAKE)
def what_is_sent_is_free_at_once(pair: Any) -> None:
    adapter = pair.prefill.connector.workers[0].adapter
    build = adapter._build_transfer_params

    async def built(ready: Any, *more: Any) -> Any:
        answer = await build(ready, *more)
        adapter.finished_sending_reqs.update(sent.p_req_id for _, sent in ready)
        return answer

    adapter._build_transfer_params = built


@fault("KVR022", PUSH)
def decode_forgets_what_it_waits_for(pair: Any) -> None:
    worker = pair.decode.connector.workers[0].adapter
    send = worker._do_send_reg_notif

    def sends(request: str, registration: Any) -> None:
        send(request, registration)
        worker._recving_metadata.pop(request, None)

    worker._do_send_reg_notif = sends


def planted(connector: str, rule: str) -> dict[str, Any]:
    return pair_fuzzed.three_requests(connector, FAULTS[connector, rule], AT_ONCE[connector])


@pytest.mark.parametrize(("connector", "at_once"), [*AT_ONCE.items(), (PUSH, "abc")])
def test_without_a_fault(connector: str, at_once: str, once: Once) -> None:
    done = once(sound, RELEASES / "0.5.6", connector, at_once)
    assert done["found"] == []
    assert done["counts"]["loaded_tokens"] >= 310 - 96  # the second prompt may hit the first one's blocks
    assert connector == MOONCAKE or done["counts"]["leases"] == 3


def sound(connector: str, at_once: str) -> dict[str, Any]:
    return pair_fuzzed.three_requests(connector, at_once=at_once)


@pytest.mark.parametrize(("connector", "rule"), FAULTS)
def test_each_rule_finds_what_is_planted(connector: str, rule: str, once: Once) -> None:
    assert rule in once(planted, RELEASES / "0.5.6", connector, rule)["found"]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("connector", "mode"), [(PULL, "fix"), (PUSH, "check"), (MOONCAKE, "check")])
def test_fuzzed_schedules_are_clean_with_the_fixes(connector: str, mode: str, plain: bool, once: Once) -> None:
    done = once(pair_fuzzed.fuzzed, RELEASES / "0.5.6", connector, plain, mode)
    pair_fuzzed.assert_clean(done, "loaded_tokens", *(() if plain else HAPPENED[connector]))


def aborted_while_it_waits(fixes: bool) -> list[str]:
    """Return the findings, with kvfix's own reports, if decode's request is aborted and prefill never hears of it."""
    from kvfix_tools.lab.fuzz.fuzz import play
    from kvfix_tools.lab.fuzz.schedule import Schedule
    from kvfix_tools.lab.runner import applied

    timeout = {"push_registration_timeout": 5.0}
    options = Options(connector=PUSH, num_blocks=40, max_num_batched_tokens=64, extra=timeout)
    steps = [("fail", "notice", 1), ("ask_at_once", "r", 0, 64, 5, 1), ("step",), ("abort", 0), ("step",)]
    with applied(fixes, "check"):
        return sorted({finding.code for finding in play(Schedule(options, tuple(steps))).violations})


def test_what_is_kept_until_its_end_is_not_left(once: Once) -> None:
    """Decode's blocks are prefill's to write into until the registration ends (KVF322); as released, for ever."""
    assert once(aborted_while_it_waits, RELEASES / "0.5.6", True) == []
    assert "KVR009" in once(aborted_while_it_waits, RELEASES / "0.5.6", False)
