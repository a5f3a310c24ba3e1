"""Play schedules that the fuzzer found. The schedules cover failed loads, a kv_producer, ranks and pairs of engines."""

from typing import Any

import pytest

from kvfix.ledger.events import LoadFailed, Scheduled, Stored
from kvfix_tools.lab import steps as do
from kvfix_tools.lab.fuzz.schedule import Schedule, draw
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.runner import applied, played
from kvfix_tools.lab.scenario import find
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import answers
from tests.lab.planted import steps, until

#: Options that the fuzzer could not draw yet when it found the first schedule below.
LACKS = ("drafter", "policy", "pause", "sessions", "use_layerwise", "new_weights", "ranks", "roles", "offloading")


@answers([[0, 32], [32, 96]], fixes=True)
def test_the_first_chunk_after_a_failed_load_is_stored() -> list[list[int]]:
    """KVF007 must remember a failed load until all steps in flight have ended, even if a step computes nothing."""
    events = [event for _, event in late.play(draw(824, "v1", lacks=LACKS)).log if event.request == "r71"]
    failed = next(place for place, event in enumerate(events) if isinstance(event, LoadFailed))
    return [[event.start, event.end] for event in events[failed:] if isinstance(event, Stored)][:2]


@answers([True, True], [False, False])
def test_a_step_beyond_the_blocks_of_its_request() -> list[bool]:
    """Play a step that needs more blocks than the request has. Return [the lab reports the step, a rule is broken]."""
    options = Options(num_blocks=18, async_scheduling=True, drafter="eagle", drafts=1, save_last=True)
    steps = (("stored_elsewhere", 0, 64), ("admit", "r", 0, 64, 2), ("fail_load", 0, 0))
    violations = [str(found) for found in late.play(Schedule(options, steps)).violations]
    return [any("the request has blocks for" in found for found in violations), bool(violations)]


@answers([True, True], release="0.4.6", fixes=True)
def test_a_failed_load_of_another_request_computes_nothing_anew() -> list[bool]:
    """`other` shares blocks with `r`, whose load fails. KVF103 and KVF110 must not make `other` recompute tokens."""
    begin = (("admit", "other", 0, 90, 20), *[("step",)] * 4, ("stored_elsewhere", 0, 128), ("admit", "r", 0, 140, 1))
    schedule = Schedule(Options(connector="mp-in-tree"), (*begin, ("fail_load", 1, 1)))
    log = [event for _, event in late.play(schedule).log]
    assert any(isinstance(event, LoadFailed) and event.request == "r" for event in log)
    computed = [event.computed for event in log if isinstance(event, Scheduled) and event.request == "other"]
    return [computed == sorted(computed), len(computed) >= 20]


@pytest.mark.parametrize("release", ["0.4.6", "0.5.6"])
@answers([8, 4, 8], [8, 4, 8], also="release")
def test_a_resumed_request_of_a_kv_producer_leaves_no_hole() -> list[int]:
    """For a kv_producer, LMCache ignores `can_save` (vllm_v1_adapter.py 0.5.6:1152) and stores evicted chunks again."""
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


@pytest.mark.parametrize(("is_fixed", "answer"), [(True, [False, False]), (False, [True, True])])
@answers(also="answer")
def test_blocks_kept_until_the_registration_ends_are_no_leak(is_fixed: bool) -> list[bool]:
    """With KVF322, decode frees an aborted request's blocks after a timeout. Without KVF322, the blocks leak."""
    timeout = {"push_registration_timeout": 5.0}
    options = Options(connector="nixl-push", num_blocks=40, max_num_batched_tokens=64, extra=timeout)
    steps = [("fail", "notice", 1), ("ask_at_once", "r", 0, 64, 5, 1), ("step",), ("abort", 0), ("step",)]
    with applied(is_fixed, "check"):
        codes = {finding.code for finding in late.play(Schedule(options, tuple(steps))).violations}
    return ["KVR009" in codes, bool(codes)]


@answers([True, True])
def test_a_lookup_timeout_advances_both_clocks() -> list[bool]:
    """While one engine waits for a lookup, the clocks of both engines advance, so a lease can end during the wait."""
    options = Options(connector="nixl-multi", multi=("decode",), lmcache_first=True, num_blocks=40, chunk_size=32)
    pair = late.Pair(options)
    pair.on("decode", "lookups_fail", 1)
    before, steps = pair.seconds, 0
    pair.ask_decode("a", prompt(100), 5)
    while not pair.decode.counts["lookups_unanswered"]:
        pair.step()
        steps += 1
    waited = round(pair.seconds - before - steps * late.STEP, 3)
    return [waited == late.LOOKUP_TIMEOUT, pair.decode.request_events.seconds == pair.seconds]


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "by layers": {"lmcache": {"use_layerwise": True}},
    "steps in flight": {"async_scheduling": True},
    "kv_producer": {"kv_role": "kv_producer"},
    "kv_producer by layers": {"kv_role": "kv_producer", "lmcache": {"use_layerwise": True}},
}


def saved(ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return findings, and each rank's number of chunks before a load of 128 tokens, after the load, and at the end."""
    engine, chunks = late.LabEngine(Options(max_num_batched_tokens=512, ranks=ranks, **options)), []
    for part in (
        do.store("first", prompt(128)),
        [do.admit("second", prompt(300), 6), until(lambda engine: engine.counts["loaded_tokens"])],
        [do.run(), do.settle()],
    ):
        steps(part)(engine)
        chunks.append([len(cache) for cache in engine.caches])
    return {"chunks": chunks, "found": [str(found) for found in engine.findings]}


def play_all() -> dict[str, Any]:
    with applied(True):
        ways = {way: {ranks: saved(ranks, options) for ranks in (1, 2)} for way, options in WAYS.items()}
    with applied(True, only=[code for code in played() if code != "KVF030"]):
        return {"saved": ways, "without": [found.code for found in find("failed-load-of-one-rank").played().findings]}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_of_a_step_with_a_load_are_stored_later(way: str, outcomes: dict[str, Any]) -> None:
    one, two = (outcomes["saved"][way][ranks] for ranks in ("1", "2"))
    assert one["found"] == two["found"] == []
    assert one["chunks"][1] > one["chunks"][0], "with one rank, the step that loads KV stored no chunk"
    assert two["chunks"][1] == two["chunks"][0]
    assert two["chunks"][2] == one["chunks"][2] * 2


def test_without_kvf030_the_caches_are_wrong(outcomes: dict[str, Any]) -> None:
    assert "LAB001" in outcomes["without"]
