"""Two engines with MooncakeConnector: what is sound comes out clean, and each rule finds what is planted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.conftest import RELEASES, Once
from tests.lab import pair_fuzzed

OPTIONS = Options(connector="mooncake", block_size=16, num_blocks=40, max_num_batched_tokens=64)
Plant = Callable[[Any], None]
FAULTS: dict[str, Plant] = {}


def fault(rule: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        FAULTS[rule] = plant
        return plant

    return register


@fault("LAB001")
def writes_go_into_the_next_block(pair: Any) -> None:
    pair_fuzzed.write_into_the_next_block(pair)


@fault("LAB020")
def blocks_stay_when_they_are_sent(pair: Any) -> None:
    pair.prefill.scheduler._free_blocks = lambda request: None


@fault("LAB025")
def a_coroutine_raises(pair: Any) -> None:
    async def record_send_reqs(metadata: Any) -> None:
        raise KeyError

    pair.prefill.connector.workers[0].adapter.record_send_reqs = record_send_reqs


@fault("LAB026")
def prefills_are_taken_for_aborted(pair: Any) -> None:
    scheduler = pair.prefill.connector.scheduler_side
    scheduler.request_finished = lambda request, blocks: (False, None)


@fault("KVR021")
def what_is_sent_is_free_at_once(pair: Any) -> None:
    adapter = pair.prefill.connector.workers[0].adapter
    build = adapter._build_transfer_params

    async def built(ready: Any, *more: Any) -> Any:
        answer = await build(ready, *more)
        adapter.finished_sending_reqs.update(sent.p_req_id for _, sent in ready)
        return answer

    adapter._build_transfer_params = built


def planted(rule: str) -> dict[str, Any]:
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.lab_engine import EngineDied
    from kvfix_tools.lab.pair import Pair

    with runner.quiet():
        pair = Pair(OPTIONS)
        if rule:
            FAULTS[rule](pair)
        with suppress(EngineDied):
            pair.ask("a", prompt(100), 5)
            pair.ask_at_once("b", prompt(150), 5)
            pair.step(3)
            pair.ask("c", prompt(60, seed=1), 5)
            pair.run()
            pair.step(3)
            pair.expect_all_ended()
    return {"found": sorted({each.code for each in pair.findings}), "counts": dict(pair.counts)}


def test_without_a_fault(once: Once) -> None:
    done = once(planted, RELEASES / "0.5.6", "")
    assert done["found"] == []
    assert done["counts"]["loaded_tokens"] >= 310 - 96  # the second prompt may hit the first one's blocks


@pytest.mark.parametrize("rule", sorted(FAULTS))
def test_each_rule_finds_what_is_planted(rule: str, once: Once) -> None:
    assert rule in once(planted, RELEASES / "0.5.6", rule)["found"]


@pytest.mark.parametrize("plain", [True, False])
def test_fuzzed_schedules_are_clean_with_the_fixes(plain: bool, once: Once) -> None:
    done = once(pair_fuzzed.fuzzed, RELEASES / "0.5.6", "mooncake", plain, "check")
    assert done["violations"] == []
    assert not done["nothing"]
    assert done["same"]
    assert done["counts"]["loaded_tokens"] > 0
    if not plain:
        assert all(done["counts"].get(each) for each in ("malformed", "restarts", "sent_again", "at_once"))


@pytest.mark.parametrize("seed", [664, 1255, 1302])
def test_seeds_that_were_violated_are_clean(seed: int, once: Once) -> None:
    """LAB026 by mistake; a request that is sent again after its abort (KVF363)."""
    seeds = range(seed, seed + 1)
    assert once(pair_fuzzed.fuzzed, RELEASES / "0.5.6", "mooncake", False, "check", seeds)["violations"] == []


def ended_tasks() -> list[int]:
    """Numbers of the tasks in the order in which vLLM hears that they are done."""
    import asyncio

    from kvfix_tools.lab import mooncake_sockets
    from kvfix_tools.lab.mooncake_network import Network

    stand_in = mooncake_sockets.Asyncio(Network(1, 480).host("a"))

    async def number(value: int) -> int:
        return value

    async def asked() -> list[int]:
        done, _ = await stand_in.wait([asyncio.create_task(number(each)) for each in range(40)])
        return [task.result() for task in done]

    return asyncio.run(asked())


def test_who_waits_hears_of_tasks_in_their_order(once: Once) -> None:
    """A set of them is in the order of their addresses: one schedule would be played in several ways."""
    assert once(ended_tasks, RELEASES / "0.5.6") == list(range(40))


def of_one_transfer(aborted_first: bool) -> dict[str, Any]:
    """Two prefills for one transfer, of which one is aborted before or after the other one has ended."""
    import kvfix
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.pair import Pair

    with runner.quiet():
        kvfix.apply(only=["KVF364"])
        pair = Pair(OPTIONS)
        pair.prefill.connector._transfer = lambda name: "shared"
        pair.router_takes(8)
        pair.budget(16)
        pair.ask("sent", prompt(100 if aborted_first else 16), 5)
        pair.step()
        pair.ask("aborted", prompt(100, seed=1), 5)
        pair.step(2 if not aborted_first else 1)
        held = len(pair.prefill.connector.leases)
        pair.abort("aborted")
        pair.run()
        pair.expect_all_ended()
    return {"held": held, "found": [str(each) for each in pair.findings], "ended": sorted(pair.decode.requests)}


@pytest.mark.parametrize("aborted_first", [True, False])
def test_abort_leaves_another_prefill_of_its_transfer(aborted_first: bool, once: Once) -> None:
    """The blocks of the one that has ended are given back."""
    done = once(of_one_transfer, RELEASES / "0.5.6", aborted_first)
    assert done["held"] == (0 if aborted_first else 1)
    assert done["found"] == []
