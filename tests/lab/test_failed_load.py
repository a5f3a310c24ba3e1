"""KVF007: a failed load is remembered for as many steps as are in flight, also where one of them computes nothing.

With drafts and asynchronous scheduling a request that vLLM has rolled back goes on where its last drafts ended, with
all of its tokens: beyond its blocks. The lab finds that, and is not ended by it.
"""

import kvfix
from kvfix.ledger.events import LoadFailed, Scheduled, Stored
from kvfix_tools.lab.fuzz.schedule import Schedule, draw
from kvfix_tools.lab.options import Options
from tests.conftest import RELEASES, ForkServer, Once

#: What was not drawn yet when the schedule was found.
LACKS = ("drafter", "policy", "pause", "sessions", "use_layerwise", "new_weights", "ranks", "roles", "offloading")


def stored_after_a_failed_load() -> list[list[int]]:
    """A load fails with asynchronous scheduling, and the request starts again in the same blocks after an empty step.

    `make healthy` found it: the first chunk was never stored (KVR007).
    """
    from kvfix_tools.lab.fuzz.fuzz import play

    kvfix.apply()
    events = [event for _, event in play(draw(824, "v1", lacks=LACKS)).log if event.request == "r71"]
    failed = next(place for place, event in enumerate(events) if isinstance(event, LoadFailed))
    return [[event.start, event.end] for event in events[failed:] if isinstance(event, Stored)][:2]


def test_the_first_chunk_after_a_failed_load_is_stored(once: Once) -> None:
    assert once(stored_after_a_failed_load, RELEASES / "0.5.6") == [[0, 32], [32, 96]]


def beyond_the_blocks(fixes: bool) -> list[str]:
    from kvfix_tools.lab.fuzz.fuzz import play

    kvfix.apply(only=None if fixes else [])
    options = Options(num_blocks=18, async_scheduling=True, drafter="eagle", drafts=1, save_last=True)
    steps = (("stored_elsewhere", 0, 64), ("admit", "r", 0, 64, 2), ("fail_load", 0, 0))
    return [str(found) for found in play(Schedule(options, steps)).violations]


def test_a_step_beyond_the_blocks_of_its_request(fork_server: ForkServer) -> None:
    assert any("its blocks end at" in found for found in fork_server(beyond_the_blocks, RELEASES / "0.5.6", False))
    assert fork_server(beyond_the_blocks, RELEASES / "0.5.6", True) == []


def computed_beside_a_failed_load() -> list[int]:
    """Return the computed tokens of `other` at each of its steps. The load of `r`, which shares its blocks, fails."""
    from kvfix_tools.lab.fuzz.fuzz import play

    kvfix.apply()
    begin = (("admit", "other", 0, 90, 20), *[("step",)] * 4, ("stored_elsewhere", 0, 128), ("admit", "r", 0, 140, 1))
    log = [event for _, event in play(Schedule(Options(connector="mp-in-tree"), (*begin, ("fail_load", 1, 1)))).log]
    assert any(isinstance(event, LoadFailed) and event.request == "r" for event in log)
    return [event.computed for event in log if isinstance(event, Scheduled) and event.request == "other"]


def test_a_failed_load_of_another_request_computes_nothing_anew(once: Once) -> None:
    """KVF103 and KVF110 wrap one function: the failed blocks are reported without those that the load did not write."""
    computed = once(computed_beside_a_failed_load, RELEASES / "0.4.6")
    assert computed == sorted(computed)
    assert len(computed) >= 20
