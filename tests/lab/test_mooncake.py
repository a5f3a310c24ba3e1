"""Two engines with MooncakeConnector: its tasks, and two prefills for one transfer."""

from __future__ import annotations

from typing import Any

import pytest

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import find
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import RELEASES, Once


def ended_tasks() -> list[int]:
    """Numbers of the tasks in the order in which vLLM hears that they are done."""
    import asyncio

    from kvfix_tools.lab.connectors import mooncake_sockets
    from kvfix_tools.lab.connectors.mooncake_network import Network

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
    pair = late.Pair(Options(connector="mooncake", num_blocks=40, max_num_batched_tokens=64))
    pair.prefill.connector._transfer = lambda name: "shared"
    pair.router.router_takes(8)
    pair.budget(16)
    pair.ask("sent", prompt(100 if aborted_first else 16), 5)
    pair.step()
    pair.ask("aborted", prompt(100, seed=1), 5)
    pair.step(2 if not aborted_first else 1)
    held = len(pair.prefill.connector.leases)
    pair.abort("aborted")
    pair.run()
    pair.expect_all_ended()
    return {"held": held, "found": [str(each) for each in pair.findings]}


@pytest.mark.parametrize("aborted_first", [True, False])
def test_abort_leaves_another_prefill_of_its_transfer(aborted_first: bool, once: Once) -> None:
    """The blocks of the one that has ended are given back."""
    done = once(of_one_transfer, RELEASES / "0.5.6", aborted_first, fixes=["KVF364"])
    assert done["held"] == (0 if aborted_first else 1)
    assert done["found"] == []


def late_write(longer: float) -> list[str]:
    """Play the scenario of KVF906 with so many more seconds for the decode engine to wait."""
    from kvfix_tools.lab.connectors import mooncake_sockets

    released = mooncake_sockets.Dealer.setsockopt

    def setsockopt(dealer: Any, option: int, value: float) -> None:
        released(dealer, option, value + 1000 * longer)

    vars(mooncake_sockets)["Dealer"].setsockopt = setsockopt
    scenario = find("mooncake-write-outlives-load")
    assert scenario
    return sorted({each.code for each in scenario.played().findings})


@pytest.mark.parametrize(("longer", "found"), [(0, ["LAB001", "LAB008"]), (480, [])])
def test_a_longer_timeout_of_the_decode_engine_prevents_late_writes(
    longer: float, found: list[str], once: Once
) -> None:
    """The workaround of KVF906. Only the decode engine's receive timeout depends on its setting: it is raised here."""
    assert once(late_write, RELEASES / "0.5.6", longer) == found
