"""`can_move` judges a state, or returns "unknown"."""

from dataclasses import replace

import pytest

from kvfix.ledger.liveness import LOAD, LOOKUP, OUTSIDE, State, Waiting, can_move

FIRST = Waiting("r19", needs=7, holds=10)
STUCK = State(
    waiting=(FIRST, Waiting("r20", holds=4), Waiting("r21", LOAD, holds=5), Waiting("r22", holds=1), Waiting("r23")),
    free=3,
    running=0,
    in_flight=0,
    lookups=0,
)


def test_it_names_the_first_and_counts() -> None:
    assert can_move(STUCK) == (
        "violated",
        "2 requests are loaded and wait, with 2 more, behind r19, which needs 7 blocks; 3 are free, waiting "
        "requests hold 20: no request can move",
        "r19",
    )
    alone = replace(STUCK, waiting=(Waiting("r", needs=1),), free=0)
    assert can_move(alone)[:2] == ("violated", "r needs 1 block; 0 are free: no request can move")
    one = replace(STUCK, waiting=(replace(FIRST, holds=0), Waiting("r20", holds=4)))
    assert can_move(one).message.startswith("1 request is loaded and waits behind r19, which needs 7 blocks; ")


@pytest.mark.parametrize("owed", [{"running": 1}, {"in_flight": 2}, {"lookups": 1}, {"free": 7}, {"waiting": ()}])
def test_something_is_owed_or_there(owed: dict[str, int]) -> None:
    assert can_move(replace(STUCK, **owed)).verdict == "valid"


@pytest.mark.parametrize("missing", ["running", "in_flight", "lookups", "free"])
def test_what_is_not_known_decides_nothing(missing: str) -> None:
    assert can_move(replace(STUCK, **{missing: None})).verdict == "unknown"


def test_what_is_known_decides() -> None:
    """It runs: what else is unknown does not matter."""
    assert can_move(replace(STUCK, running=1, in_flight=None, free=None)).verdict == "valid"


def test_needs_that_are_not_known() -> None:
    waiting = (replace(FIRST, needs=None),)
    assert can_move(replace(STUCK, waiting=waiting)).verdict == "unknown"


@pytest.mark.parametrize("waits_for", [LOAD, LOOKUP])
def test_all_wait_for_what_is_not_in_flight(waits_for: str) -> None:
    verdict, message, request = can_move(replace(STUCK, waiting=(Waiting("r", waits_for),)))
    assert (verdict, request) == ("violated", "r")
    assert message == f"1 request waits for a {waits_for}, and none is in flight: no request can move"


def test_only_the_engine_owes() -> None:
    """A session waits for its client; and one that waits for a load does not keep the next from its place."""
    assert can_move(replace(STUCK, waiting=(Waiting("r", OUTSIDE),))).verdict == "valid"
    session = Waiting("s", OUTSIDE, holds=4)
    assert can_move(replace(STUCK, waiting=(*STUCK.waiting, session))).verdict == "valid"
    assert can_move(replace(STUCK, waiting=(*STUCK.waiting, replace(session, holds=3)))).verdict == "violated"
    waiting = (Waiting("r", LOAD), Waiting("s", needs=2))
    assert can_move(replace(STUCK, waiting=waiting)).verdict == "valid"
