"""`can_move` judges a state, or returns "unknown"."""

from dataclasses import replace
from typing import Any

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


SESSION = Waiting("s", OUTSIDE, holds=4)


@pytest.mark.parametrize(
    ("verdict", "changes"),
    [
        *(("valid", owed) for owed in ({"running": 1}, {"in_flight": 2}, {"lookups": 1}, {"free": 7}, {"waiting": ()})),
        *(("unknown", {missing: None}) for missing in ("running", "in_flight", "lookups", "free")),
        # a request runs: the unknown values do not matter
        ("valid", {"running": 1, "in_flight": None, "free": None}),
        ("unknown", {"waiting": (replace(FIRST, needs=None),)}),
        # a session waits for its client
        ("valid", {"waiting": (Waiting("r", OUTSIDE),)}),
        ("valid", {"waiting": (*STUCK.waiting, SESSION)}),
        ("violated", {"waiting": (*STUCK.waiting, replace(SESSION, holds=3))}),
        # a request that waits for a load does not keep the next request from its blocks
        ("valid", {"waiting": (Waiting("r", LOAD), Waiting("s", needs=2))}),
    ],
)
def test_what_can_move(verdict: str, changes: dict[str, Any]) -> None:
    assert can_move(replace(STUCK, **changes)).verdict == verdict


@pytest.mark.parametrize("waits_for", [LOAD, LOOKUP])
def test_all_wait_for_what_is_not_in_flight(waits_for: str) -> None:
    verdict, message, request = can_move(replace(STUCK, waiting=(Waiting("r", waits_for),)))
    assert (verdict, request) == ("violated", "r")
    assert message == f"1 request waits for a {waits_for}, and none is in flight: no request can move"
