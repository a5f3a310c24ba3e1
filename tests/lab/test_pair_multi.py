"""LMCache's connector and a connector between two engines: both load, and wrong KV of each is found."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from kvfix_tools.lab.engine.lab_engine import STEP
from kvfix_tools.lab.engine.request_events import LOOKUP_TIMEOUT
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.conftest import RELEASES, Once
from tests.lab import pair_fuzzed
from tests.lab.pair_fuzzed import nothing  # noqa: F401  planted by its name

CONNECTORS = "nixl-multi", "nixl-push-multi", "mooncake-multi"


def lmcache_loads_other_kv(pair: Any) -> None:
    pair_fuzzed.load_other_kv(pair.decode.connector)


def nixl_reads_the_next_block(pair: Any) -> None:
    pair_fuzzed.read_the_next_block(pair.decode.connector.child.adapter.nixl_wrapper)


def nixl_writes_into_the_next_block(pair: Any) -> None:
    pair_fuzzed.read_the_next_block(pair.prefill.connector.child.adapter.nixl_wrapper)


def mooncake_writes_into_the_next_block(pair: Any) -> None:
    pair_fuzzed.write_into_the_next_block(pair)


def a_transfer_fails(pair: Any) -> None:
    pair.network.failing["transfer"] = 1


def planted(connector: str, plant: str, lmcache_first: bool) -> dict[str, Any]:
    import kvfix
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.engine.lab_engine import EngineDied
    from kvfix_tools.lab.pair.pair import Pair

    if connector == "nixl-push-multi":
        kvfix.apply()  # as released, its worker waits for what LMCache has loaded (KVF317)
    options = Options(
        connector=connector,
        multi=("prefill", "decode"),
        lmcache_first=lmcache_first,
        num_blocks=40,
        chunk_size=32,
        max_num_batched_tokens=64,
        prefix_caching=False,
    )
    with runner.quiet():
        pair = Pair(options)
        globals()[plant](pair)
        with suppress(EngineDied):
            pair.ask("a", prompt(100), 5)
            pair.run()
            pair.router.ask_decode("b", prompt(100), 5)  # decode's LMCache has it
            pair.run()
            pair.ask("c", prompt(100), 5)  # and so has prefill's
            pair.run()
            pair.step(3)
            pair.expect_all_ended()
    loads = {name: each.counts for name, each in (("prefill", pair.prefill), ("decode", pair.decode))}
    return {"found": sorted({each.code for each in pair.findings}), "counts": {k: dict(v) for k, v in loads.items()}}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("lmcache_first", [True, False], ids=["LMCache first", "LMCache last"])
def test_both_load(connector: str, lmcache_first: bool, once: Once) -> None:
    done = once(planted, RELEASES / "0.5.6", connector, "nothing", lmcache_first)
    assert done["found"] == []
    prefill, decode = done["counts"]["prefill"], done["counts"]["decode"]
    assert prefill["loads_of_kv_producer"] == 1
    # the third one is in decode's LMCache and on the way from prefill: the first that is asked loads it
    assert (decode["loaded_beside"], decode["loads_of_kv_consumer"]) == ((1, 2) if lmcache_first else (2, 1))


@pytest.mark.parametrize(
    ("connector", "plant"),
    [
        ("nixl-multi", "lmcache_loads_other_kv"),
        ("nixl-multi", "nixl_reads_the_next_block"),
        ("nixl-push-multi", "lmcache_loads_other_kv"),
        ("nixl-push-multi", "nixl_writes_into_the_next_block"),
        ("mooncake-multi", "lmcache_loads_other_kv"),
        ("mooncake-multi", "mooncake_writes_into_the_next_block"),
    ],
)
def test_wrong_kv_of_either_is_seen(connector: str, plant: str, once: Once) -> None:
    assert "LAB001" in once(planted, RELEASES / "0.5.6", connector, plant, False)["found"]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_load_that_fails_for_no_reason_is_seen(connector: str, once: Once) -> None:
    """Decode learns of a failed write at the end of its registration, 480 s later."""
    rule = "LAB003" if connector == "nixl-push-multi" else "LAB002"
    assert rule in once(planted, RELEASES / "0.5.6", connector, "a_transfer_fails", False)["found"]


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("plain", [True, False])
def test_fuzzed_schedules_are_clean_with_the_fixes(connector: str, plain: bool, once: Once) -> None:
    done = once(pair_fuzzed.fuzzed, RELEASES / "0.5.6", connector, plain, "check")
    pair_fuzzed.assert_clean(done, "loaded_beside")


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
