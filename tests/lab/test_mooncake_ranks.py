"""KVF369: each prefill rank reports a load once, and the report of the last rank ends the load."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import RELEASES, Once

OPTIONS = Options(
    connector="mooncake", prefix_caching=False, num_blocks=60, decode_blocks=18, kv_load_failure_policy="fail", delay=8
)
#: Address of the rank that fails.
ADDRESS = "tcp://prefill:1"


class FailingRank:
    """A socket that answers each message with an error."""

    def __init__(self, host: Any, error: bytes) -> None:
        self.host, self.error = host, error

    def take(self, dealer: Any, message: bytes) -> None:
        self.host.network.send(dealer.host, lambda: dealer.take(self.error))


def played() -> list[str]:
    """The lab's prefill engine has one rank. Here decode also knows a second rank, as of another pipeline stage."""
    pair = late.Pair(OPTIONS)
    pair.ask("a", prompt(32, seed=2))
    pair.run()
    adapter = pair.decode.connector.workers[0].adapter
    module: Any = __import__(type(adapter).__module__, fromlist=["_"])
    answer = module.MooncakeXferResponse(status=module.MooncakeXferResponseStatus.ERROR, err_msg="this rank has no KV")
    error = module.msgspec.msgpack.Encoder().encode(answer)
    pair.network.bound[ADDRESS] = FailingRank(pair.prefill.connector._host, error)
    for ranks in adapter._remote_agents.values():
        ranks[0][1] = ADDRESS
    pair.ask("r", prompt(64))
    pair.may_fail()
    pair.step(8)
    pair.router.ask_decode("s", prompt(200, seed=1), 40)
    pair.run()
    pair.expect_all_ended()
    return sorted({each.code for each in pair.findings})


def test_blocks_are_kept_until_the_last_rank_has_written(once: Once) -> None:
    """As released, a write goes on in blocks of another request."""
    released, fixed = once.both(played, RELEASES / "0.5.6")
    assert "LAB001" in released
    assert fixed == []


def goes_on() -> str:
    """Prefill is gone after it has answered for only one of the two loads of a message.

    Return the status of the request whose load it has written.
    """
    pair = late.Pair(dataclasses.replace(OPTIONS, decode_blocks=60, delay=1))
    pair.budget(16)
    pair.ask_at_once("r", prompt(16), 60)
    pair.ask_at_once("s", prompt(200, seed=1))
    pair.step(8)
    pair.restart("prefill", 60)
    pair.time_passes(541.0)
    pair.run()
    return str(pair.decode.requests["r-00000002"].status.name)


def test_a_request_that_has_loaded_goes_on(once: Once) -> None:
    assert once(goes_on, RELEASES / "0.5.6", fixes=True) == "FINISHED_LENGTH_CAPPED"
    assert once(goes_on, RELEASES / "0.5.6", fixes=["KVF201"]) == "FINISHED_ERROR"
