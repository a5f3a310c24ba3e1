"""Schedules that the fuzzer found, with what must come of each: failed loads, a kv_producer, pairs of engines."""

from __future__ import annotations

from typing import Any

import pytest

from kvfix.ledger.events import LoadFailed, Scheduled, Stored
from kvfix_tools.lab.fuzz.schedule import Schedule, draw
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.runner import applied
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import RELEASES, Once

NEWEST = RELEASES / "0.5.6"
#: What was not drawn yet when the schedule was found.
LACKS = ("drafter", "policy", "pause", "sessions", "use_layerwise", "new_weights", "ranks", "roles", "offloading")


def stored_after_a_failed_load() -> list[list[int]]:
    """A load fails with asynchronous scheduling, and the request starts again in the same blocks after an empty step.

    `make healthy` found it: the first chunk was never stored (KVR007).
    """
    events = [event for _, event in late.play(draw(824, "v1", lacks=LACKS)).log if event.request == "r71"]
    failed = next(place for place, event in enumerate(events) if isinstance(event, LoadFailed))
    return [[event.start, event.end] for event in events[failed:] if isinstance(event, Stored)][:2]


def test_the_first_chunk_after_a_failed_load_is_stored(once: Once) -> None:
    """KVF007: it is remembered for as many steps as are in flight, also where one of them computes nothing."""
    assert once(stored_after_a_failed_load, NEWEST, fixes=True) == [[0, 32], [32, 96]]


def beyond_the_blocks() -> list[str]:
    """With drafts and asynchronous scheduling a request that vLLM has rolled back goes on where its last drafts ended.

    It has all of its tokens: beyond its blocks. The lab finds that, and is not ended by it.
    """
    options = Options(num_blocks=18, async_scheduling=True, drafter="eagle", drafts=1, save_last=True)
    steps = (("stored_elsewhere", 0, 64), ("admit", "r", 0, 64, 2), ("fail_load", 0, 0))
    return [str(found) for found in late.play(Schedule(options, steps)).violations]


def test_a_step_beyond_the_blocks_of_its_request(once: Once) -> None:
    released, fixed = once.both(beyond_the_blocks, NEWEST)
    assert any("its blocks end at" in found for found in released)
    assert fixed == []


def computed_beside_a_failed_load() -> list[int]:
    """Return the computed tokens of `other` at each of its steps. The load of `r`, which shares its blocks, fails."""
    begin = (("admit", "other", 0, 90, 20), *[("step",)] * 4, ("stored_elsewhere", 0, 128), ("admit", "r", 0, 140, 1))
    schedule = Schedule(Options(connector="mp-in-tree"), (*begin, ("fail_load", 1, 1)))
    log = [event for _, event in late.play(schedule).log]
    assert any(isinstance(event, LoadFailed) and event.request == "r" for event in log)
    return [event.computed for event in log if isinstance(event, Scheduled) and event.request == "other"]


def test_a_failed_load_of_another_request_computes_nothing_anew(once: Once) -> None:
    """KVF103 and KVF110 wrap one function: the failed blocks are reported without those that the load did not write."""
    computed = once(computed_beside_a_failed_load, RELEASES / "0.4.6", fixes=True)
    assert computed == sorted(computed)
    assert len(computed) >= 20


def cached_chunks() -> list[int]:
    """A request is preempted in its decode phase. vLLM has all of its prompt, and LMCache by then half of it.

    Chunks that are cached: before, when some were evicted, and when it has ended.
    """
    options = Options(kv_role="kv_producer", block_size=16, chunk_size=16, num_blocks=40, max_num_batched_tokens=512)
    engine = late.LabEngine(options)
    engine.admit("r", prompt(128), max_tokens=8)
    engine.step(3)
    before = len(engine.cache)
    engine.evict(4)
    evicted = len(engine.cache)
    engine.preempt("r")
    engine.run()
    return [before, evicted, len(engine.cache)]


@pytest.mark.parametrize("name", ["0.4.6", "0.5.6"])
def test_a_resumed_request_of_a_kv_producer_leaves_no_hole(name: str, once: Once) -> None:
    """Its worker stores tokens that its metadata exclude from the store (0.5.6 vllm_v1_adapter.py:1152)."""
    assert once.both(cached_chunks, RELEASES / name) == [[8, 4, 8]] * 2


def aborted_while_it_waits(fixes: bool) -> list[str]:
    """Return the findings, with kvfix's own reports, if decode's request is aborted and prefill never hears of it."""
    timeout = {"push_registration_timeout": 5.0}
    options = Options(connector="nixl-push", num_blocks=40, max_num_batched_tokens=64, extra=timeout)
    steps = [("fail", "notice", 1), ("ask_at_once", "r", 0, 64, 5, 1), ("step",), ("abort", 0), ("step",)]
    with applied(fixes, "check"):
        return sorted({finding.code for finding in late.play(Schedule(options, tuple(steps))).violations})


def test_what_is_kept_until_its_end_is_not_left(once: Once) -> None:
    """Decode's blocks are prefill's to write into until the registration ends (KVF322); as released, for ever."""
    assert once(aborted_while_it_waits, NEWEST, True) == []
    assert "KVR009" in once(aborted_while_it_waits, NEWEST, False)


def held_up() -> list[Any]:
    """Seconds of both engines before and after a lookup of decode's that times out, and decode's own."""
    from kvfix_tools.lab.engine.engine_core import STEP
    from kvfix_tools.lab.engine.request_events import LOOKUP_TIMEOUT

    pair = late.Pair(
        Options(connector="nixl-multi", multi=("decode",), lmcache_first=True, num_blocks=40, chunk_size=32)
    )
    pair.on("decode", "lookups_fail", 1)
    before, steps = pair.seconds, 0
    pair.router.ask_decode("a", prompt(100), 5)
    while not pair.decode.counts["lookups_unanswered"]:
        pair.step()
        steps += 1
    waited = round(pair.seconds - before - steps * STEP, 3)
    return [waited == LOOKUP_TIMEOUT, pair.decode.request_events.seconds == pair.seconds]


def test_a_lookup_that_times_out_holds_up_both(once: Once) -> None:
    """The clock of both engines runs: leases end, and the next lookup begins after this one."""
    assert once(held_up, NEWEST) == [True, True]
