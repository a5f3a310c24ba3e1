"""KVF007: a failed load is remembered for as many steps as are in flight, also where one of them computes nothing."""

import kvfix
from kvfix.ledger.events import LoadFailed, Stored
from kvfix_tools.lab.schedule import draw
from tests.conftest import RELEASES, Once

#: What was not drawn yet when the schedule was found.
LACKS = ("drafter", "policy", "pause", "sessions", "use_layerwise", "new_weights")


def stored_after_a_failed_load() -> list[list[int]]:
    """A load fails under asynchronous scheduling, vLLM makes a step without tokens, and the request starts anew in the
    blocks that it had (KVR007 as found by `make healthy`: its first chunk was never stored)."""
    from kvfix_tools.lab.fuzz import play

    kvfix.apply()
    events = [event for _, event in play(draw(824, "v1", lacks=LACKS)).log if event.request == "r71"]
    failed = next(place for place, event in enumerate(events) if isinstance(event, LoadFailed))
    return [[event.start, event.end] for event in events[failed:] if isinstance(event, Stored)][:2]


def test_the_first_chunk_after_a_failed_load_is_stored(once: Once) -> None:
    assert once(stored_after_a_failed_load, RELEASES / "0.5.6") == [[0, 32], [32, 96]]
