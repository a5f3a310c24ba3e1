"""KVF368: prefill begins no write after the end that decode's message names, whatever the clocks of the two say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.conftest import RELEASES, Once

OPTIONS = Options(
    connector="mooncake", prefix_caching=False, num_blocks=60, decode_blocks=18, kv_load_failure_policy="fail"
)


def played(ahead: float, known: bool, fixed: bool) -> dict[str, Any]:
    """Prefill takes a message when decode has given its load up.

    ahead: seconds of prefill's clock. known: decode has loaded before. fixed: prefill has the fix too.
    """
    import kvfix
    from kvfix import clock
    from kvfix.wrapping import View
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.pair import Pair

    with runner.quiet():
        kvfix.apply()
        pair = Pair(OPTIONS)
        adapter = pair.prefill.connector.workers[0].adapter
        decoder, executor = adapter._xfer_meta_decoder, adapter._sender_executor
        time = SimpleNamespace(perf_counter=lambda: clock.now() + ahead)
        decoder._module = executor._module = View(decoder._module, time=time)
        if not fixed:
            adapter._xfer_meta_decoder, adapter._sender_executor = decoder._own, executor._own
        if known:
            for name in ("a", "b"):
                pair.ask(name, prompt(32, seed=2))
                pair.run()
        loaded = pair.counts["loaded_tokens"]
        pair.on("prefill", "take_blocks", 60)
        pair.handshakes_take(20)
        pair.ask_at_once("r", prompt(64))
        pair.step(2)
        pair.time_passes(541.0)
        pair.step(2)
        pair.on("prefill", "free_blocks")
        pair.router.ask_decode("s", prompt(200, seed=1), 40)
        pair.run()
        pair.expect_all_ended()
    return {"loaded": loaded, "found": sorted({each.code for each in pair.findings})}


@pytest.mark.parametrize("ahead", [-1000.0, 0.0, 1000.0])
def test_the_end_is_by_the_clock_of_prefill(ahead: float, once: Once) -> None:
    assert once(played, RELEASES / "0.5.6", ahead, True, True) == {"loaded": 64, "found": []}


def test_blocks_are_not_sent_before_the_clock_is_known(once: Once) -> None:
    assert once(played, RELEASES / "0.5.6", 0.0, False, True) == {"loaded": 0, "found": []}


def test_prefill_without_the_fix_is_as_released(once: Once) -> None:
    done = once(played, RELEASES / "0.5.6", 0.0, True, False)
    assert done["loaded"] == 64
    assert "LAB001" in done["found"]
