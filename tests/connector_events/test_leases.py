"""The wrappers of a worker's lease methods do not raise into the engine, even if a later release has changed.

test_peers.py tests them with real workers.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvfix.connector_events import leases


class Worker:
    """Methods as in vLLM 0.32.0, and their parameters and state as another release may have them."""

    def __init__(self) -> None:
        self._kvfix_leases = leases.Leases(None)

    def reap(self, done_sending: set[str]) -> str:
        done_sending.add("late")
        return "reaped"

    def reap_without_parameter(self) -> str:
        return "reaped"

    def reap_by_another_name(self, *, done: set[str]) -> str:
        done.add("late")
        return "reaped"

    def heartbeat(self, req_ids: str) -> str:
        return f"renewed {req_ids}"

    def finished(self) -> tuple[set[str], set[str]]:
        return {"sent"}, set()

    def raises(self, done_sending: set[str]) -> None:
        raise KeyError("of vLLM")


Wrapper = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("wrapper", "method", "given", "answer"),
    [
        (leases._around_expiry, Worker.reap_without_parameter, {}, "reaped"),
        (leases._around_expiry, Worker.reap_by_another_name, {"done": set()}, "reaped"),
        (leases._around_renewal, Worker.heartbeat, {"req_ids": "a,b"}, "renewed a,b"),  # it has no _reqs_to_send
        (leases._around_report, Worker.finished, {}, ({"sent"}, set())),  # it has no reqs_need_send
    ],
)
def test_another_release_gets_its_answer(
    wrapper: Wrapper, method: Any, given: dict[str, Any], answer: Any, faults: dict[str, int]
) -> None:
    assert wrapper(method)(Worker(), **given) == answer
    assert len(faults) == 1


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize("worker", [SimpleNamespace(), type("Slots", (), {"__slots__": ()})()])
def test_a_worker_that_is_not_watched(worker: Any) -> None:
    assert leases._around_expiry(Worker.reap)(worker, set()) == "reaped"


def test_the_arguments_may_have_any_name(faults: dict[str, int]) -> None:
    worker: Any = Worker()
    worker._reqs_to_send = {"a": 1}
    assert leases._around_renewal(Worker.heartbeat)(worker, req_ids="a,b") == "renewed a,b"
    assert leases._around_expiry(Worker.reap)(worker, done_sending={"early"}) == "reaped"
    assert worker._kvfix_leases.first_renewed() == ["a"]
    assert (worker._kvfix_leases.ended("late"), worker._kvfix_leases.ended("early")) == ((True, 0), (False, 0))
    assert faults == {}


def test_an_exception_of_the_worker_reaches_the_engine(faults: dict[str, int]) -> None:
    with pytest.raises(KeyError, match="of vLLM"):
        leases._around_expiry(Worker.raises)(Worker(), set())
    assert faults == {}
