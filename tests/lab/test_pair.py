"""Two engines: an aborted request whose blocks are kept until its end, and a lookup that holds both engines up."""

from __future__ import annotations

from typing import Any

from kvfix_tools.lab.engine.engine_core import STEP
from kvfix_tools.lab.engine.request_events import LOOKUP_TIMEOUT
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.conftest import RELEASES, Once


def aborted_while_it_waits(fixes: bool) -> list[str]:
    """Return the findings, with kvfix's own reports, if decode's request is aborted and prefill never hears of it."""
    from kvfix_tools.lab.fuzz.fuzz import play
    from kvfix_tools.lab.fuzz.schedule import Schedule
    from kvfix_tools.lab.runner import applied

    timeout = {"push_registration_timeout": 5.0}
    options = Options(connector="nixl-push", num_blocks=40, max_num_batched_tokens=64, extra=timeout)
    steps = [("fail", "notice", 1), ("ask_at_once", "r", 0, 64, 5, 1), ("step",), ("abort", 0), ("step",)]
    with applied(fixes, "check"):
        return sorted({finding.code for finding in play(Schedule(options, tuple(steps))).violations})


def test_what_is_kept_until_its_end_is_not_left(once: Once) -> None:
    """Decode's blocks are prefill's to write into until the registration ends (KVF322); as released, for ever."""
    assert once(aborted_while_it_waits, RELEASES / "0.5.6", True) == []
    assert "KVR009" in once(aborted_while_it_waits, RELEASES / "0.5.6", False)


def held_up() -> list[Any]:
    """Seconds of both engines before and after a lookup of decode's that times out, and decode's own."""
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.pair.pair import Pair

    options = Options(connector="nixl-multi", multi=("decode",), lmcache_first=True, num_blocks=40, chunk_size=32)
    with runner.quiet():
        pair = Pair(options)
        pair.on("decode", "lookups_fail", 1)
        before, steps = pair.seconds, 0
        pair.router.ask_decode("a", prompt(100), 5)
        while not pair.decode.counts["lookups_unanswered"]:
            pair.step()
            steps += 1
    return [round(pair.seconds - before - steps * STEP, 3), pair.decode.request_events.seconds == pair.seconds]


def test_a_lookup_that_times_out_holds_up_both(once: Once) -> None:
    """The clock of both engines runs: leases end, and the next lookup begins after this one."""
    assert once(held_up, RELEASES / "0.5.6") == [LOOKUP_TIMEOUT, True]
