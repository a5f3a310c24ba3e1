"""Lines that the ledger does not hear of until it must: it would have had nothing to say to them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvfix.ledger import Ledger
from kvfix_tools.diagnose import events, scan, usual
from kvfix_tools.diagnose.case import Case
from kvfix_tools.diagnose.seen import Seen

#: Few numbers, so that they are often equal, or one apart.
COUNT = st.sampled_from([0, 1, 64, 128, 129])
LINE = st.one_of(
    st.tuples(st.just("asked"), COUNT, COUNT, COUNT, COUNT, st.none(), st.booleans()),
    st.tuples(st.just("asked"), COUNT, st.none() | COUNT, st.none() | COUNT, COUNT, st.none() | COUNT, st.booleans()),
    # Of the last question's numbers.
    st.just(("due",)),
    st.tuples(st.just("retrieved"), COUNT, COUNT, st.none() | COUNT),
    st.tuples(st.just("due"), COUNT, st.none() | COUNT),
    st.tuples(st.just("storing"), COUNT, COUNT, COUNT),
)


def groups_of(line: tuple[object, ...]) -> scan.Groups:
    name, *values = line
    counts = [None if value is None else str(value).encode() for value in values]
    if name == "asked":
        total, computed, hit, need, least, negative = counts
        if negative == b"True":
            need = b"-" + (need or b"1")
        return (b"r", total, computed, hit, need if hit is not None else None, least if hit is not None else None)
    if name == "retrieved":
        return (b"r", *counts)
    return (*counts, b"r")


@given(lines=st.lists(LINE, min_size=1, max_size=6))
@settings(max_examples=3000, deadline=None)
def test_the_ledger_has_nothing_to_say_to_what_is_kept(lines: list[tuple[object, ...]]) -> None:
    kept = usual.Usual()
    case = Case()
    asked = groups_of(("asked", 0, 0, 0, 0, None, False))
    for number, line in enumerate(lines):
        name, groups = str(line[0]), groups_of(line) if len(line) > 1 else (asked[3], asked[2], b"r")
        asked = groups if name == "asked" else asked
        if groups[0] is None:  # a load that is due has a hit
            continue
        what = kept.take(name, groups, ("log", number, b""))
        if what == usual.AGAIN:
            continue
        if what == usual.NEWS:
            kept.untold("r")
        seen = Seen(name, scan.fields(name, groups), None, "", "log", number, b"", b"")
        verdicts = [verdict for event in events.of(case, seen) for verdict in case.ledger.feed(event)]
        assert what == usual.NEWS or not verdicts, (line, verdicts)


def test_what_is_kept_is_told_when_a_story_is_asked_for() -> None:
    lines = [
        ("asked", (b"r", b"900", b"64", b"256", b"192", None)),
        ("due", (b"256", b"64", b"r")),
        ("retrieved", (b"r", b"192", b"192", b"256")),
        ("storing", (b"256", b"512", b"256", b"r")),
    ]
    case = Case()
    case.take("log", 1, [(number, b"", "", name, groups, b"") for number, (name, groups) in enumerate(lines)])
    assert isinstance(case.ledger, Ledger)
    assert not case.ledger.stories
    assert [(told.line, told.what) for told in case.story("r")] == [
        (1, "match(64) promises 192: hit 256 - computed 64 = 192"),
        (2, "blocks found, 192 external tokens granted"),
        (2, "tokens 64 to 256 are to be loaded"),
        (3, "192 tokens loaded, up to 256"),
        (4, "tokens 256 to 512 stored"),
    ]


def test_requests_are_forgotten() -> None:
    kept = usual.Usual()
    for number in range(3 * usual.REQUESTS):
        kept.take("asked", (b"%d" % number, b"900", b"64", b"256", b"192", None), ("log", number, b""))
    assert len(kept._requests) <= usual.REQUESTS
    assert kept.untold(str(3 * usual.REQUESTS - 1))
    assert not kept.untold("0")
