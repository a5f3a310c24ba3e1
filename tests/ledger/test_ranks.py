"""The comparison of a rank's record with the scheduler's record reports only certain differences."""

import pytest

from kvfix.ledger import events as ev
from kvfix_tools.engine_recordings import compare


def sequence(text: str) -> list[ev.Event]:
    """Return events: capital letter: a load; small letter: a store; `2`: B is aborted; `-`: an event of one record."""
    made: list[ev.Event] = []
    for letter in text:
        if letter == "-":
            made.append(ev.Granted("x", 0))
        elif letter.isdigit():
            made.append(ev.Finished(chr(ord("@") + int(letter)), True))
        else:
            made.append(ev.LoadDue(letter, 0, 64) if letter.isupper() else ev.Stored(letter, 64, 128, 64))
    return made


#: (case, scheduler's record, rank's record, pairs, [(letter that differs, RankDiffers.told)], number of unknown loads)
CASES = [
    ("the same", "AaBb", "AaBb", "AaBb", [], 0),
    ("other events between", "-Aa--B-b", "A-aBb-", "AaBb", [], 0),
    ("a load was lost", "ABC", "AC", "AC", [("B", True)], 0),
    ("a load of its own", "AC", "ABC", "AC", [("B", False)], 0),
    ("another load", "ABC", "AXC", "AC", [("B", True), ("X", False)], 0),
    ("a store was kept back", "AaBbC", "ABbC", "ABbC", [], 0),
    ("its record begins later", "ABCD", "CD", "CD", [], 2),
    ("its record ends earlier", "ABCD", "AB", "AB", [], 2),
    ("the scheduler's begins later", "CD", "ABCD", "CD", [], 0),
    ("nothing is on record", "ABCD", "", "", [], 4),
    ("the same load again", "AXBXC", "AXBXC", "AXBXC", [], 0),
    ("one of two equal loads", "AXXB", "AXB", "AB", [("X", True)], 0),
    ("both at the end: which?", "AXX", "AX", "AX", [], 1),
    ("only what is there twice", "XX", "X", "", [], 2),
    ("a rank has failed, all are aborted", "AB2C", "AC", "AC", [], 1),
    ("another one is aborted", "AB4C", "AC", "AC", [("B", True)], 0),
    ("aborted after a later load of all", "ABC2D", "ACD", "ACD", [("B", True)], 0),
    ("of its own, and aborted", "A2C", "ABC", "AC", [("B", False)], 0),
    ("another order: not one engine", "AB", "BA", "", [], 2),
]


@pytest.mark.parametrize(("what", "due", "started", "pairs", "differs", "unknown"), CASES, ids=[c[0] for c in CASES])
def test_compare(what: str, due: str, started: str, pairs: str, differs: list[tuple[str, bool]], unknown: int) -> None:
    scheduler, worker = sequence(due), sequence(started)
    found = compare(1, scheduler, worker)
    assert "".join(due[here] for here, _ in found.pairs) == "".join(started[there] for _, there in found.pairs) == pairs
    assert [(event.request, event.told) for _, event in found.differs] == differs
    assert {event.rank for _, event in found.differs} <= {1}
    assert found.unknown == unknown
