"""Check verdicts on states of vLLM's scheduler in the lab. States that the lab cannot reach are handwritten."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvfix.ledger import liveness
from kvfix.ledger.liveness import LOAD, LOOKUP, OUTSIDE, State, Waiting, can_move
from kvfix.ledger.standstill import Look, verdicts
from kvfix_tools.look import show
from kvfix_tools.look.command import enough, seconds_to_look
from kvfix_tools.look.show import waits_for
from tests.conftest import NEWEST, Once
from tests.engine_state import wedged

States = list[dict[str, Any]]
STACK = ["recv (zmq/socket.py:980)", "send_and_recv_all (rpc/zmq_transport.py:116)"]


@pytest.fixture
def locked_out(once: Once) -> States:
    return copy.deepcopy(once(wedged.twice, NEWEST, "locked_out_engine"))


def looks(states: list[dict[str, Any]], seconds: float) -> list[Look]:
    """Return a look at each of these states. seconds: time from the first look to the last look."""
    gap = seconds / (len(states) - 1)
    return [Look(at * gap, [state]) for at, state in enumerate(states)]


def only(states: list[dict[str, Any]], seconds: float) -> Any:
    (found,) = verdicts(looks(states, seconds))
    return found


@pytest.mark.parametrize(
    ("engine", "seconds", "code", "message"),
    [
        (
            ("locked_out_engine",), 1, "KVD202",
            "1 request is loaded and waits behind r, which needs 8 blocks; 4 are free, waiting requests hold 16: no "
            "request can move",
        ),
        (("engine_without_load",), 1, "KVD208", "r waits for a load that no worker has; it keeps 12 blocks"),
        (
            ("silent_server",), 6, "KVD204",
            "r has waited 6 s for its load, which rank 0 has begun and the LMCache server has not answered",
        ),
        (
            ("lookup_without_answer", "mp"), 6, "KVD204",
            "r has waited 6 s for its lookup, which the LMCache server does not answer",
        ),
        (("lookup_without_answer", "v1"), 6, "KVD211", "r has waited 6 s for its lookup, which no worker answers"),
    ],
)  # fmt: skip
def test_verdict_on_a_standstill(engine: tuple[str, ...], seconds: int, code: str, message: str, once: Once) -> None:
    """One look is never enough for a verdict. If a transfer may still end, there is no verdict after one second."""
    states = once(wedged.twice, NEWEST, *engine)
    found = only(states, seconds)
    assert (found.code, found.request, found.message) == (code, "r", message)
    assert engine != ("silent_server",) or "300 s" in found.waiting
    assert [each.code for each in verdicts(looks(states, 1))] == ([code] if seconds == 1 else [])
    assert (seconds_to_look(looks(states, 1)) > 1) is (seconds > 1)
    assert verdicts(looks(states, 1)[:1]) == []


def test_loaded_requests_behind_one_that_gets_no_blocks(locked_out: States) -> None:
    found = only(locked_out, 1)
    assert found.now == "abort r: its 8 blocks become free"
    assert [seconds_to_look(looks(locked_out, 1)[:count]) for count in (1, 2)] == [1.0, 0.0]
    assert show.fixes(found, locked_out[-1:]) == ["KVF208", "KVF210", "KVF219"]
    old = [{**each, "versions": {"vllm": "0.26.0", "lmcache": "0.5.6"}} for each in locked_out]
    assert show.fixes(found, old[-1:]) == ["KVF210", "KVF903"]
    assert verdicts(looks([locked_out[0], {**locked_out[1], "in_step": True}], 1)) == []


@pytest.mark.parametrize("what", ["", "computed", "total", "preemptions"])
def test_a_load_that_no_worker_has(what: str, once: Once) -> None:
    """If the counter `what` changes, the load may be new. If `what` is "", the loads are unknown. Expect no verdict."""
    states = copy.deepcopy(once(wedged.twice, NEWEST, "engine_without_load"))
    (row,) = states[1]["scheduler"]["requests"]
    assert waits_for(liveness.engines(states)[1], row) == "a load that no worker has"
    if what:
        row[what] += 1
    for state in states if not what else ():
        del state["connectors"][1]["loads"]
    assert verdicts(looks(states, 1)) == []


@pytest.mark.parametrize("connector", ["v1", "v1-async", "mp"])
def test_a_healthy_engine_has_no_verdict(connector: str, once: Once) -> None:
    states = once(wedged.healthy, NEWEST, connector, 240)
    rows = [row for state in states for row in state["scheduler"]["requests"]]
    assert any(row["preemptions"] for row in rows)
    assert connector != "mp" or any(row["status"] == "WAITING_FOR_REMOTE_KVS" for row in rows)
    assert connector == "v1" or any(row["lookup"] == "in flight" for row in rows)
    for apart in (1, 3, 8):
        for first, second in zip(states, states[apart:], strict=False):
            assert verdicts([Look(0, [first]), Look(apart, [second])]) == []


def in_lookup(states: States, rank: dict[str, Any]) -> States:
    """Make the scheduler of these states wait in LMCache's lookup client. rank: state of the worker's connector."""
    for at, state in enumerate(states):
        state.update(hook="get_num_new_matched_tokens", stack=STACK, in_step=True)
        state["scheduler"]["steps"] = at
        state["connectors"][0].update({"class": "LMCacheConnectorV1", "asynchronous": False, "lookup_timeout": 3.0})
        state["connectors"][1].update(rank)
    return states


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        ({"healthy": False, "why": "ValueError"}, "rank 0 does not answer: its LMCache did not start (ValueError)"),
        ({"healthy": True}, "a rank does not answer"),
    ],
)
def test_every_step_waits_for_a_lookup(rank: dict[str, Any], why: str, locked_out: States) -> None:
    states = in_lookup(locked_out, rank)
    found = verdicts(looks(states, 7))[0]
    assert found.code == "KVD203"
    assert found.message.startswith(f"the scheduler waits 3 s for each lookup; {why}")
    assert show.fixes(found, states[-1:]) == ["KVF015"]
    assert not [each for each in verdicts(looks(states, 2)) if each.code == "KVD203"]  # 2 s are too short for KVD203
    states[1]["scheduler"]["steps"] = 40
    assert not [each for each in verdicts(looks(states, 7)) if each.code == "KVD203"]


def test_a_rank_whose_thread_for_lookups_has_ended(locked_out: States) -> None:
    """The ended thread is enough for the verdict, even if the scheduler is outside the lookup at both looks."""
    rank = {"threads": {"lookup_server": False}}
    states = [{**each, "hook": "", "in_step": False} for each in in_lookup(locked_out, rank)]
    found = verdicts(looks(states, 1))[0]
    assert found.code == "KVD203"
    assert found.message.endswith(" each lookup; rank 0 does not answer: its thread for lookups has ended")
    idle = [{**each, "scheduler": {**each["scheduler"], "requests": []}} for each in states]
    assert verdicts(looks(idle, 1)) == []  # an engine without requests may be ending its threads
    states[-1]["connectors"][1]["threads"] = {"lookup_server": True}
    assert [each.code for each in verdicts(looks(states, 1))] == ["KVD202"]


def test_a_hook_may_hold_up_what_the_queues_lack(locked_out: States) -> None:
    states = [{**each, "hook": "get_finished"} for each in locked_out]
    assert verdicts(looks(states, 1)) == []
    assert seconds_to_look(looks(states, 1)) > 1
    assert [each.code for each in verdicts(looks([states[0], {**states[1], "hook": ""}], 1))] == ["KVD202"]


def test_a_first_look_inside_a_step(locked_out: States) -> None:
    inside = {**locked_out[0], "in_step": True, "hook": "build_connector_meta"}
    seen = iter([Look(0, [inside]), *(Look(at, locked_out[-1:]) for at in (1, 2))])
    looker: Any = SimpleNamespace(look=lambda: next(seen))
    assert [each.code for each in verdicts(enough(looker))] == ["KVD202"]


def test_a_hook_that_began_after_the_first_look(once: Once) -> None:
    """While a worker is in start_load_kv, no step asks for the lookup's result. So the verdict must name this hook."""
    before, after = once(wedged.twice, NEWEST, "lookup_without_answer", "mp")
    worker = {"pid": 7, "process": "VLLM::Worker", "name": "VLLM::Worker", "silent": "stuck in C", "stack": []}
    inside = [after, {**worker, "hook": "start_load_kv"}]
    seen = [Look(0, [before, {**worker, "hook": ""}])]
    for at in (1, 2, 3, 4, 6, 20):
        seen.append(Look(at, inside))
        assert [each.code for each in verdicts(seen)] == ["KVD213"] * (at > 3)
        assert (seconds_to_look(seen) > 1) is (at <= 3)
    brief = [*seen[:1], Look(6, inside)]  # only the last look found the worker in a hook, perhaps by chance
    assert [each.code for each in verdicts(brief)] == ["KVD204"]


def test_a_hook_that_waits_for_the_server(locked_out: States) -> None:
    worker = {"pid": 7, "process": "VLLM::Worker", "name": "VLLM::Worker", "silent": "", "hook": "start_load_kv"}
    worker["stack"] = ["wait (python3.11/threading.py:331)", "result (multiprocess/futures.py:102)"]
    (found,) = verdicts([Look(0, [locked_out[0], worker]), Look(5, [locked_out[1], worker])])
    assert found.code == "KVD204"
    assert found.message == (
        "the LMCache server does not answer: VLLM::Worker (7) has waited in start_load_kv for at least 5 s; "
        "the scheduler waits for this process"
    )
    worker["stack"] = ["from_ipc_handle (torch/cuda/streams.py:197)", "query (multiprocess/futures.py:203)"]
    assert verdicts([Look(0, [locked_out[0], worker]), Look(5, [locked_out[1], worker])])[0].code == "KVD213"


def test_a_pause_is_no_hang(locked_out: States) -> None:
    for state in locked_out:
        state["scheduler"]["paused"] = "PAUSED_ALL"
    assert verdicts(looks(locked_out, 60)) == []


FIRST = Waiting("r19", needs=7, holds=10)
STUCK = State(
    waiting=(FIRST, Waiting("r20", holds=4), Waiting("r21", LOAD, holds=5), Waiting("r22", holds=1), Waiting("r23")),
    free=3, running=0, in_flight=0, lookups=0,
)  # fmt: skip


def test_the_message_names_the_first_request_and_counts() -> None:
    assert can_move(STUCK) == (
        "violated",
        "2 loaded and 2 other requests wait behind r19, which needs 7 blocks; 3 are free, waiting "
        "requests hold 20: no request can move",
        "r19",
    )
    alone = replace(STUCK, waiting=(Waiting("r", needs=1),), free=0)
    assert can_move(alone)[:2] == ("violated", "r needs 1 block; 0 are free: no request can move")
    one = replace(STUCK, waiting=(replace(FIRST, holds=0), Waiting("r20", holds=4)))
    assert can_move(one).message.startswith("1 request is loaded and waits behind r19, which needs 7 blocks; ")


SESSION = Waiting("s", OUTSIDE, holds=4)


@pytest.mark.parametrize(
    ("verdict", "changes"),
    [
        *(("valid", owed) for owed in ({"running": 1}, {"in_flight": 2}, {"lookups": 1}, {"free": 7}, {"waiting": ()})),
        *(("unknown", {missing: None}) for missing in ("running", "in_flight", "lookups", "free")),
        # a request runs, so the unknown values do not matter
        ("valid", {"running": 1, "in_flight": None, "free": None}),
        ("unknown", {"waiting": (replace(FIRST, needs=None),)}),
        # in the next three cases, a streaming session (OUTSIDE) waits for the next input of its client
        ("valid", {"waiting": (Waiting("r", OUTSIDE),)}),
        ("valid", {"waiting": (*STUCK.waiting, SESSION)}),
        ("violated", {"waiting": (*STUCK.waiting, replace(SESSION, holds=3))}),
        # a request that waits for a load does not stop the next request from getting blocks
        ("valid", {"waiting": (Waiting("r", LOAD), Waiting("s", needs=2))}),
    ],
)
def test_which_states_can_move(verdict: str, changes: dict[str, Any]) -> None:
    assert can_move(replace(STUCK, **changes)).verdict == verdict


@pytest.mark.parametrize("waits_for", [LOAD, LOOKUP])
def test_all_wait_for_a_transfer_that_is_not_in_flight(waits_for: str) -> None:
    verdict, message, request = can_move(replace(STUCK, waiting=(Waiting("r", waits_for),)))
    assert (verdict, request) == ("violated", "r")
    assert message == f"1 request waits for a {waits_for}, and none is in flight: no request can move"
