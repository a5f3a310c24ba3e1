"""NixlConnector and the OffloadingConnector in a MultiConnector: both load, and wrong KV of either is seen."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.conftest import RELEASES, Once
from tests.lab import pair_fuzzed
from tests.lab.pair_fuzzed import nothing  # noqa: F401  planted by its name


def other_kv_comes_from_the_cpu(pair: Any) -> None:
    copies = pair.decode.connector.offloading.ranks[0].copies
    swap = copies._swap
    copies._swap = lambda source, to, sizes, **more: swap(source.flip(0), to, sizes, **more)
    handler = pair.decode.connector.offloading.ranks[0].connector.worker._load_handler
    handler._swap_blocks_batch = copies._swap


def nixl_reads_the_next_block(pair: Any) -> None:
    pair_fuzzed.read_the_next_block(pair.decode.connector.workers[0].adapter.nixl_wrapper)


def planted(plant: str, offloading: str) -> dict[str, Any]:
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.engine.lab_engine import EngineDied
    from kvfix_tools.lab.pair.pair import Pair

    options = Options(
        connector="nixl-offload",
        offloading=offloading,
        num_blocks=40,
        chunk_size=16,
        max_num_batched_tokens=64,
        prefix_caching=True,
    )
    with runner.quiet():
        pair = Pair(options)
        globals()[plant](pair)
        with suppress(EngineDied):
            pair.ask("a", prompt(100), 5)
            pair.run()
            pair.step(5)
            for name in ("prefill", "decode"):
                pair.on(name, "reset_prefix_cache")
            pair.router.ask_decode("b", prompt(100), 5)  # decode's CPU memory has it
            pair.run()
            for name in ("prefill", "decode"):
                pair.on(name, "reset_prefix_cache")
            pair.ask("c", prompt(100), 5)  # and so has prefill's
            pair.run()
            pair.step(3)
            pair.expect_all_ended()
    counts = {name: dict(each.counts) for name, each in (("prefill", pair.prefill), ("decode", pair.decode))}
    return {"found": sorted({each.code for each in pair.findings}), "counts": counts}


@pytest.mark.parametrize("offloading", ["first", "last"])
def test_both_load(offloading: str, once: Once) -> None:
    done = once(planted, RELEASES / "0.5.6", "nothing", offloading)
    assert done["found"] == []
    prefill, decode = done["counts"]["prefill"], done["counts"]["decode"]
    assert prefill["loads_offloaded"] == 1
    assert prefill["stores_offloaded"] > 0
    # the third one is in decode's CPU memory and on the way from prefill: the first that is asked loads it
    loads = decode["loads_of_kv_consumer"], decode["loads_offloaded"]
    assert loads == ((1, 2) if offloading == "first" else (2, 1))


@pytest.mark.parametrize("plant", ["other_kv_comes_from_the_cpu", "nixl_reads_the_next_block"])
def test_wrong_kv_of_either_is_seen(plant: str, once: Once) -> None:
    assert "LAB001" in once(planted, RELEASES / "0.5.6", plant, "last")["found"]


@pytest.mark.parametrize("plain", [True, False])
def test_fuzzed_schedules_are_clean_with_the_fixes(plain: bool, once: Once) -> None:
    done = once(pair_fuzzed.fuzzed, RELEASES / "0.5.6", "nixl-offload", plain, "fix", range(5, 13))
    pair_fuzzed.assert_clean(done, "loads_offloaded")
