"""The lab's model of NIXL and real NIXL over UCX agree in each step. The lab finds faults planted in real NIXL."""

from collections.abc import Callable
from math import inf
from typing import Any
from unittest import mock

import pytest

from kvfix_tools.lab import releases
from kvfix_tools.lab.engine.memory import GARBAGE
from kvfix_tools.lab.options import BY_NIXL
from tests import late
from tests.conftest import RELEASES, Once
from tests.lab.planted import played, wrap
from tests.lab.planted_in_pairs import read_the_next_block

#: {connector: arguments of range() for seeds}. A seed determines a schedule. The schedules wait briefly for leases.
SEEDS = {
    "nixl-pull": (4, 12), "nixl-push": (1, 8), "nixl-multi": (0, 8), "nixl-push-multi": (0, 6), "nixl-offload": (5, 13),
}  # fmt: skip
REAL = pytest.mark.skipif(bool(releases.no_nixl()), reason=releases.no_nixl() or "it is installed")


def outcomes(real: bool) -> dict[str, Any]:
    """Return the result or exception of each call to an agent. real: use NIXL's agents, not the lab's model."""
    import numpy

    from kvfix_tools.lab.connectors.nixl_network import Network

    network = (late.nixl_real.RealNetwork if real else Network)(delay=1)
    here, there = network.agent(""), network.agent("")
    memories = [numpy.arange(n, n + 8 * 64, dtype=numpy.int64).reshape(8, 64) for n in (1000, 5000)]
    for agent, memory in zip((here, there), memories, strict=True):
        registered = agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        agent.register_memory(registered, backends=["UCX"])

    def places(memory: Any, share: int = 1) -> Any:
        return numpy.array([(row.ctypes.data, row.nbytes // share, 0) for row in memory])

    done: dict[str, Any] = {}

    def attempt(name: str, call: Callable[[], Any]) -> Any:
        try:
            answer = call()
        except Exception as error:  # noqa: BLE001
            done[name] = str(error)
            return None
        done[name] = answer if isinstance(answer, (str, bool, dict)) else "done"
        return answer

    attempt("a list for an agent that is not known", lambda: here.prep_xfer_dlist(there.name, places(memories[1])))
    assert here.add_remote_agent(there.get_agent_metadata()) == there.name
    own = here.prep_xfer_dlist("NIXL_INIT_AGENT", here.get_xfer_descs(places(memories[0]), "DRAM"))
    others = here.prep_xfer_dlist(there.name, here.get_xfer_descs(places(memories[1]), "DRAM"))
    halves = here.prep_xfer_dlist(there.name, here.get_xfer_descs(places(memories[1], 2), "DRAM"))

    def make(operation: str, ours: list[int], theirs: list[int], of: int = others) -> Any:
        return here.make_prepped_xfer(operation, own, ours, of, theirs, notif_msg=f"{operation} {ours}".encode())

    for name, arguments in {
        "no such place here": ("READ", [8], [0]),
        "no such place there": ("READ", [0], [1 << 20]),
        "a place before the first": ("READ", [-1], [0]),
        "fewer places": ("READ", [0, 1], [0]),
        "no place": ("READ", [], []),
        "places of another size": ("READ", [0], [0], halves),
    }.items():
        attempt(name, lambda arguments=arguments: make(*arguments))

    def move(name: str, operation: str, ours: list[int], theirs: list[int]) -> None:
        handle = make(operation, ours, theirs)
        states = [here.transfer(handle)]
        for _ in range(2):
            states.append(here.check_xfer_state(handle))
            network.tick()
        states.append(here.check_xfer_state(handle))
        here.release_xfer_handle(handle)
        notices = {peer: [notice.decode() for notice in every] for peer, every in there.get_new_notifs().items()}
        done[name] = [states, notices, *(memory[:, 0].tolist() for memory in memories)]

    move("read", "READ", [0, 1], [3, 4])
    move("write", "WRITE", [5], [7])
    attempt("a notice", lambda: here.send_notif(there.name, b"alone"))
    attempt("the notice arrives", lambda: {k: [each.decode() for each in v] for k, v in there.get_new_notifs().items()})
    attempt("a notice for one that is not known", lambda: here.send_notif("nobody", b"x"))

    in_flight, not_begun = make("READ", [0], [0]), make("READ", [1], [1])
    attempt("it begins", lambda: here.transfer(in_flight))
    there.close()
    network.tick()
    attempt("the closed peer removes this agent", lambda: there.remove_remote_agent(here.name))
    attempt("the peer is gone: in flight", lambda: here.check_xfer_state(in_flight))
    attempt("not begun", lambda: here.transfer(not_begun))
    attempt("made now", lambda: make("READ", [2], [2]))
    attempt("a notice for it", lambda: here.send_notif(there.name, b"x"))
    attempt("whether it is known", lambda: here.check_remote_metadata(there.name))
    for handle in (in_flight, not_begun):
        attempt(f"released {handle == in_flight}", lambda handle=handle: here.release_xfer_handle(handle))
    attempt("the lists", lambda: here.release_dlist_handle(others))
    attempt("the peer", lambda: here.remove_remote_agent(there.name))
    attempt("known no more", lambda: here.check_remote_metadata(there.name))
    done["unaware"] = network.counts["nixl_unaware"]  # calls that NIXL accepted after the peer had ended
    # the failed transfer may have written a part of the blocks
    done["of one that failed"] = int(memories[0][0, 0]) in (GARBAGE, 5000, 5000 + 3 * 64)
    return done


@REAL
def test_the_model_answers_as_nixl_does(once: Once) -> None:
    model, real = (once(outcomes, RELEASES / "0.5.6", each) for each in (False, True))
    assert real == model
    assert real["read"][2][:3] == [5000 + 3 * 64, 5000 + 4 * 64, 1000 + 2 * 64]
    assert real["not begun"] == "NIXL_ERR_REMOTE_DISCONNECT"
    assert real["whether it is known"]


def not_whole(agent: Any) -> None:
    """Let each transfer of the agent move only half of each block."""

    def half(prepare: Any, peer: str, places: Any, *more: Any) -> Any:
        places = places.copy()
        places[:, 1] //= 2
        return prepare(peer, places, *more)

    wrap(agent, "prep_xfer_dlist", half)


FAULTS = {each.__name__: each for each in (read_the_next_block, not_whole)}


def planted(connector: str, *names: str) -> list[dict[str, Any]]:
    """Plant each fault in all agents ("": no fault) and play the connector. Return findings and counts."""
    agent_of, done = late.nixl_real.RealNetwork.agent, []
    for name in names:

        def agent(network: Any, *arguments: Any, name: str = name) -> Any:
            made = agent_of(network, *arguments)
            if name:
                FAULTS[name](made)
            return made

        with mock.patch.object(late.nixl_real.RealNetwork, "agent", agent):
            done.append(played(connector, real_transfers=True))
    return done


@REAL
@pytest.mark.parametrize("connector", ["nixl-pull", "nixl-push"])
def test_faults_of_a_transfer_are_found(connector: str, once: Once) -> None:
    sound, *faulty = once(planted, RELEASES / "0.5.6", connector, "", *FAULTS)
    assert sound["found"] == []
    # The prompts have 7, 10 and 4 blocks. The second prompt may hit blocks of the first prompt.
    assert sound["counts"]["nixl_bytes"] >= 15 * 16 * 256
    assert sound["counts"]["nixl_notices"] >= 3
    for done in faulty:
        assert "LAB001" in [code for code, _ in done["found"]]


def compared(connector: str, fixes: bool, fault: bool = False) -> dict[str, Any]:
    """Compare NIXL with the lab's model. If `fault` is True, NIXL pairs local blocks with wrong remote blocks."""
    prepare = late.nixl_real.RealAgent.prepare

    def elsewhere(agent: Any, handle: int, operation: str, *lists: Any) -> None:
        local, here, remote, there, notice = lists
        prepare(agent, handle, operation, local, list(here)[::-1], remote, there, notice)

    run = late.Run(connector, fixes, real_transfers=True)
    with mock.patch.object(late.nixl_real.RealAgent, "prepare", elsewhere if fault else prepare):
        return late.fuzz(run, range(*SEEDS[connector]), inf, shrinking=0).as_json()


@REAL
@pytest.mark.parametrize("connector", BY_NIXL)
def test_the_model_behaves_like_nixl_in_each_step(connector: str, once: Once) -> None:
    done = once(compared, RELEASES / "0.5.6", connector, True)
    assert done["violations"] == []
    assert done["tested_nothing"] == ""
    happened = "nixl_transfers", "nixl_bytes", "nixl_notices", "restarts", "malformed", "loads_failed"
    assert [what for what in happened if not done["counts"].get(what)] == []


@REAL
def test_the_model_behaves_like_nixl_without_fixes(once: Once) -> None:
    found = once(compared, RELEASES / "0.5.6", "nixl-pull", False)["violations"]
    assert found != []
    assert [each for each in found if each["rule"] == "LAB027"] == []


@REAL
def test_a_difference_is_found(once: Once) -> None:
    found = once(compared, RELEASES / "0.5.6", "nixl-pull", True, True)["violations"]
    assert any(each["message"].startswith("LAB027 differs-from-model") for each in found)
