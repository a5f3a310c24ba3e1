"""Test MooncakeConnector: timeouts, two prefill requests for one transfer, and two prefill ranks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import find
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import answers
from tests.lab.planted import steps

OPTIONS = Options(connector="mooncake", num_blocks=40, max_num_batched_tokens=64)


@pytest.mark.parametrize(("aborted_first", "answer"), [(True, [0, []]), (False, [1, []])])
@answers(also="answer", fixes=["KVF364"])
def test_abort_leaves_another_prefill_of_its_transfer(aborted_first: bool) -> list[Any]:
    """Abort one of two prefill requests for a transfer. Return the number of leases before the abort, and findings."""
    pair = late.Pair(OPTIONS)
    pair.prefill.connector._transfer = lambda name: "shared"
    steps(
        [do.router_takes(8), do.budget(16), do.ask("sent", prompt(100 if aborted_first else 16), 5), do.step()],
        [do.ask("aborted", prompt(100, seed=1), 5), do.step(1 if aborted_first else 2)],
    )(pair)
    held = len(pair.prefill.connector.leases)
    steps(do.abort("aborted"), do.run(), do.expect_all_ended())(pair)
    return [held, [str(each) for each in pair.findings]]


@pytest.mark.parametrize(("longer", "answer"), [(0, ["LAB001", "LAB008"]), (480, [])])
@answers(also="answer")
def test_a_longer_timeout_of_the_decode_engine_prevents_late_writes(longer: float) -> list[str]:
    """A longer timeout in decode works around KVF906. The timeout of prefill does not change."""
    released = late.mooncake_network.Dealer.setsockopt

    def setsockopt(dealer: Any, option: int, value: float) -> None:
        released(dealer, option, value + 1000 * longer)

    late.mooncake_network.Dealer.setsockopt = setsockopt
    return sorted({each.code for each in find("mooncake-write-outlives-load").played().findings})


RANKS = replace(OPTIONS, prefix_caching=False, num_blocks=60, decode_blocks=18, kv_load_failure_policy="fail", delay=8)
ADDRESS = "tcp://prefill:1"


@answers([True, True], [False, False])
def test_blocks_are_kept_until_the_last_rank_has_written() -> list[bool]:
    """With KVF369, only the last prefill rank ends a load. Return [LAB001 is violated, any rule is violated]."""
    pair = late.Pair(RANKS)
    pair.ask("a", prompt(32, seed=2))
    pair.run()
    adapter = pair.decode.connector.workers[0].adapter
    module: Any = __import__(type(adapter).__module__, fromlist=["_"])
    answer = module.MooncakeXferResponse(status=module.MooncakeXferResponseStatus.ERROR, err_msg="this rank has no KV")
    error = module.msgspec.msgpack.Encoder().encode(answer)
    host = pair.prefill.connector._host
    pair.network.bound[ADDRESS] = SimpleNamespace(  # stands in for the second prefill rank
        host=host, take=lambda dealer, message: host.network.send(dealer.host, lambda: dealer.take(error))
    )
    for ranks in adapter._remote_agents.values():
        ranks[0][1] = ADDRESS
    steps(
        [do.ask("r", prompt(64)), do.may_fail(), do.step(8), do.ask_decode("s", prompt(200, seed=1), 40)],
        [do.run(), do.expect_all_ended()],
    )(pair)
    codes = {each.code for each in pair.findings}
    return ["LAB001" in codes, bool(codes)]


@pytest.mark.parametrize(
    ("fixes", "answer"), [(True, "FINISHED_LENGTH_CAPPED"), (["KVF201"], "FINISHED_ERROR")], ids=["fixed", "released"]
)
@answers(also="fixes answer")
def test_a_request_that_has_loaded_goes_on() -> str:
    """Decode asks for two loads. Prefill writes KV for one load and dies. Return the status of the loaded request."""
    pair = late.Pair(replace(RANKS, decode_blocks=60, delay=1))
    steps(
        [do.budget(16), do.ask_at_once("r", prompt(16), 60), do.ask_at_once("s", prompt(200, seed=1)), do.step(8)],
        [do.restart("prefill", 60), do.time_passes(541.0), do.run()],
    )(pair)
    return str(pair.decode.requests["r-00000002"].status.name)
