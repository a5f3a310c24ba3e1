import re

import pytest

from kvfix.ledger import Ledger
from kvfix.ledger import events as ev
from kvfix_tools.ledger import RULES, LeaseRead, NotReturned, RankDiffers, WriteBegun, WriteEnded, Written
from tests.conftest import ROOT

ASKED = ev.Asked("r", total=1000, computed=336, hit=256, promised=0)
FRESH = ev.Asked("r", total=1000, computed=0, hit=512, promised=512)
ADMITTED = [FRESH, ev.Granted("r", 512), ev.LoadDue("r", 0, 512), ev.Scheduled("r", 512, 488, first=True)]
LOST = [*ADMITTED, ev.Loaded("r", 512, 512), ev.LoadFailed("r", 512)]
FULL_HIT = [FRESH._replace(total=512, promised=511), ev.Granted("r", 511)]
#: REPLAYED: the model recomputes the last tokens of a hit. DIVERGENT: layers of the model have different hits.
REPLAYED = FRESH._replace(replay=128)
REPLAYING = [REPLAYED, ev.Granted("r", 512), ev.LoadDue("r", 0, 512)]
DIVERGENT = ASKED._replace(divergent=True)
LEASED, READ, PUSHED = ev.Leased("r", 30.0), LeaseRead("r", "d"), LeaseRead("r", "d", pushed=True)
WRITES = WriteBegun("r", "d")
COMPARED = ev.Compared("r", 3, 1, 64, 128, "model.layers.0.self_attn.attn", "K", 70, 1.4, 0.008)
EXPIRED, NOTICED = ev.LeaseEnded("r", True), ev.LeaseEnded("r", False)
#: LATE: a lookup has timed out once. TWICE: a lookup has timed out twice without a pause.
LATE = [FRESH, ev.TimedOut("r", 3.0, 10.0)]
TWICE = [*LATE, ev.TimedOut("r", 3.0, 13.1)]
#: The hit is 512 tokens long. vLLM itself has already computed the first 336 tokens.
AFTER = [FRESH._replace(computed=336, promised=176), ev.Granted("r", 176)]
UNASKED = ev.Scheduled("r", 0, 16)

#: {rule: [(case, earlier events, event to check, verdict)]}. Verdict None: the rule has no finding.
CASES: dict[str, list[tuple[str, list[ev.Event], ev.Event, str | None]]] = {
    "KVR001": [
        ("more than remains", [], ASKED._replace(promised=664), "violated"),
        ("negative", [], ASKED._replace(promised=-80), "violated"),
        ("all but the last token", [], ASKED._replace(promised=663), None),
        ("nothing to compute, nothing promised", [], ASKED._replace(computed=1000), None),
        ("between steps the last token too", [], ASKED._replace(promised=664, asynchronous=True), None),
        ("not known yet", [], ASKED._replace(promised=None), None),
    ],
    "KVR002": [
        ("the report", [ASKED], ASKED._replace(promised=256), "violated"),
        ("the same", [ASKED], ASKED, None),
        ("other computed tokens", [FRESH], FRESH._replace(computed=16, promised=496), None),
        ("another hit", [FRESH], FRESH._replace(hit=768, promised=768), None),
        ("the hit is not known", [ASKED._replace(hit=None)], ASKED._replace(hit=None, promised=256), None),
        ("granted meanwhile", [FRESH, ev.Granted("r", 0)], FRESH._replace(promised=0), None),
        ("preempted meanwhile", [FRESH, ev.Preempted("r")], FRESH._replace(promised=0), None),
        ("another request of this id", [FRESH, ev.Finished("r", True)], FRESH._replace(promised=0), None),
        ("not known before", [FRESH._replace(promised=None)], FRESH, None),
    ],
    "KVR003": [
        ("another number", [FRESH], ev.Granted("r", 256), "violated"),
        ("nothing was promised", [FRESH, *ADMITTED[1:], ev.Preempted("r")], ev.Granted("r", 16), "violated"),
        ("all", [FRESH], ev.Granted("r", 512), None),
        ("nothing of it", [FRESH], ev.Granted("r", 0), None),
        ("no promise on record", [UNASKED], ev.Granted("r", 512), "unknown"),
        ("whole blocks of it, for a replay", [REPLAYED], ev.Granted("r", 496), "unknown"),
        ("more than it, with a replay", [REPLAYED], ev.Granted("r", 528), "violated"),
    ],
    "KVR004": [
        ("more than granted", ADMITTED[:2], ev.LoadDue("r", 0, 768), "violated"),
        ("from after the computed ones", ADMITTED[:2], ev.LoadDue("r", 16, 512), "violated"),
        ("none were granted", [FRESH, ev.Granted("r", 0)], ev.LoadDue("r", 0, 512), "violated"),
        ("no grant at all", [FRESH], ev.LoadDue("r", 0, 512), "violated"),
        ("what was granted", ADMITTED[:2], ev.LoadDue("r", 0, 512), None),
        ("whole blocks of it", ADMITTED[:2], ev.LoadDue("r", 0, 520, 16), None),
        ("a block more", ADMITTED[:2], ev.LoadDue("r", 0, 528, 16), "violated"),
        ("a full hit loads its last token too", FULL_HIT, ev.LoadDue("r", 0, 512), None),
        ("no grant on record", [UNASKED], ev.LoadDue("r", 0, 512), "unknown"),
        ("whole blocks after the computed ones", AFTER, ev.LoadDue("r", 0, 176, 16, True), None),
        ("a block more after them", AFTER, ev.LoadDue("r", 0, 192, 16, True), "violated"),
    ],
    "KVR005": [
        ("forgets the grant", ADMITTED[:3], ev.Scheduled("r", 0, 16, first=True), "violated"),
        ("more than was granted", ADMITTED[:3], ev.Scheduled("r", 513, 16, first=True), "violated"),
        ("local and granted", ADMITTED[:3], ev.Scheduled("r", 512, 16, first=True), None),
        ("inside a block", [ASKED, ev.Granted("r", 0)], ev.Scheduled("r", 340, 16, first=True), None),
        ("runs on", ADMITTED, ev.Scheduled("r", 1000, 1), None),
        ("a replay", REPLAYING, ev.Scheduled("r", 384, 16, first=True), None),
        ("more than the replay", REPLAYING, ev.Scheduled("r", 383, 16, first=True), "violated"),
        ("less than vLLM had", [ASKED, ev.Granted("r", 0)], ev.Scheduled("r", 320, 16, first=True), "violated"),
        ("what all layers have", [DIVERGENT, ev.Granted("r", 0)], ev.Scheduled("r", 320, 16, first=True), None),
        ("and a grant", [DIVERGENT, ev.Granted("r", 176)], ev.Scheduled("r", 496, 16, first=True), "violated"),
        ("no Asked event on record", [UNASKED], ev.Scheduled("r", 512, 16, first=True), None),
        ("more input", [*ADMITTED, ev.Granted("r", 0)], ev.Scheduled("r", 1003, 60, first=True), None),
        ("after a failed load", [*LOST, ASKED, ev.Granted("r", 0)], ev.Scheduled("r", 336, 490, first=True), None),
        ("after its load", [*ADMITTED[:3], ev.Granted("r", 0)], ev.Scheduled("r", 500, 16, first=True), "violated"),
    ],
    "KVR006": [
        ("no load", ADMITTED[:2], ev.Scheduled("r", 512, 16, first=True), "violated"),
        ("a load", ADMITTED[:3], ev.Scheduled("r", 512, 16, first=True), None),
        ("nothing was granted", [ASKED, ev.Granted("r", 0)], ev.Scheduled("r", 336, 16, first=True), None),
    ],
    "KVR007": [
        ("a hole", ADMITTED, ev.Stored("r", 768, 1000, covered=512), "violated"),
        ("a hole after a store", [*ADMITTED, ev.Stored("r", 512, 640)], ev.Stored("r", 704, 768), "violated"),
        ("continues", [*ADMITTED, ev.Stored("r", 512, 640, 512)], ev.Stored("r", 640, 768), None),
        ("stores again", ADMITTED, ev.Stored("r", 256, 768, covered=512), None),
        ("what was stored is not on record", [UNASKED], ev.Stored("r", 4, 16), "unknown"),
    ],
    "KVR008": [
        ("not computed yet", ADMITTED, ev.Stored("r", 512, 1001, covered=512), "violated"),
        ("computed", ADMITTED, ev.Stored("r", 512, 1000, covered=512), None),
        ("computed is not on record", [], ev.Stored("r", 0, 16), None),
    ],
    "KVR009": [("leaked", [*ADMITTED, ev.Finished("r", False)], ev.Left("r", "load_specs"), "violated")],
    "KVR010": [("waits", ADMITTED[:2], ev.Stuck("r", 32), "violated")],
    "KVR011": [("raises", ADMITTED, ev.Raised("r", "schedule", "AssertionError"), "violated")],
    "KVR012": [
        ("the first", [FRESH], ev.TimedOut("r", 3.0, 10.0), None),
        ("at once again", LATE, ev.TimedOut("r", 3.0, 13.1), None),
        ("a third time", TWICE, ev.TimedOut("r", 3.0, 16.2), "violated"),
        ("a third time after a pause", TWICE, ev.TimedOut("r", 3.0, 19.2), None),
        ("after a pause", LATE, ev.TimedOut("r", 3.0, 16.0), None),
    ],
    "KVR013": [
        ("not started", ADMITTED, RankDiffers("r", 1, 0, 512, True), "violated"),
        ("not scheduled", ADMITTED, RankDiffers("r", 1, 0, 512, False), "violated"),
    ],
    "KVR014": [("of null blocks", ADMITTED, ev.BlocksLost("r", 1, 512, 768, "null blocks"), "violated")],
    "KVR027": [("differs", [], COMPARED, "violated"), ("is the same", [], COMPARED._replace(wrong=0), None)],
    "KVR015": [
        ("after a notice", [FRESH, LEASED], NOTICED, None),
        ("a second time", [FRESH, LEASED, NOTICED], NOTICED, "violated"),
        ("not kept", [FRESH], NOTICED, "violated"),
        ("not on record", [], NOTICED, "unknown"),
    ],
    "KVR017": [
        ("in time", [FRESH, LEASED], READ, None),
        ("renewed", [ev.ReadsFrom("r", "other", "q"), FRESH, LEASED, ev.LeaseExtended("r", None)], READ, None),
        ("its notice was seen first", [FRESH, LEASED, NOTICED], READ, None),
        ("too late", [FRESH, LEASED, EXPIRED], READ, "violated"),
        ("how it ended is not on record", [FRESH, LEASED, ev.LeaseEnded("r", None)], READ, "unknown"),
        ("pushed", [FRESH, LEASED, NOTICED], PUSHED, None),
        ("pushed, and when is not on record", [FRESH, LEASED, EXPIRED], PUSHED, "unknown"),
    ],
    "KVR018": [
        ("by one", [FRESH, LEASED, READ], READ, None),
        ("by two", [FRESH, LEASED, READ], LeaseRead("r", "e"), "violated"),
    ],
    "KVR020": [("in time", [FRESH, LEASED], WRITES, None), ("too late", [FRESH, LEASED, EXPIRED], WRITES, "violated")],
    "KVR021": [
        ("not written", [FRESH, LEASED], EXPIRED, None),
        ("written before", [FRESH, LEASED, WRITES, WriteEnded("r")], EXPIRED, None),
        ("in flight", [FRESH, LEASED, WRITES], EXPIRED, "violated"),
    ],
    "KVR022": [
        ("awaited", [FRESH], Written("r", True), None),
        ("not awaited", [FRESH], Written("r", False), "violated"),
    ],
    "KVR025": [
        ("it was read", [FRESH, LEASED, ev.LeaseExtended("r", 20.0)], NotReturned("r", "d", True, True), "violated"),
        ("its reader is gone", [FRESH, LEASED], NotReturned("r", "d", False, False), "violated"),
    ],
    "KVR026": [
        ("of one that ended otherwise", [FRESH, ev.Finished("r", True)], READ, "violated"),
        ("of one whose blocks are kept", [FRESH, ev.Finished("r", False), LEASED], READ, None),
        ("whether they were kept is not on record", [ev.Finished("r", False)], READ, "unknown"),
        ("of one that runs", [FRESH], READ, None),
    ],
}
FLAT = [(code, *case) for code, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("code", "what", "before", "event", "verdict"), FLAT, ids=[f"{c[0]}-{c[1]}" for c in FLAT])
def test_rule(code: str, what: str, before: list[ev.Event], event: ev.Event, verdict: str | None) -> None:
    ledger = Ledger()
    for earlier in before:
        ledger.feed(earlier)
    found = {finding.code: finding for finding in ledger.feed(event)}
    assert (found[code].verdict if code in found else None) == verdict, found
    assert code not in found or found[code].message
    assert all(each.text() for each in (*before, event))


def test_every_rule_has_cases_and_a_docstring() -> None:
    assert {rule.code for rule in RULES} == set(CASES)
    for rule in RULES:
        assert any(case[3] == "violated" for case in CASES[rule.code])
        assert rule.doc.strip()


def test_tools_do_not_miss_a_rule() -> None:
    """kvfix.ledger.RULES lacks the rules of kvfix_tools.ledger until a program imports kvfix_tools.ledger."""
    texts = {path: path.read_text() for path in (ROOT / "tools").rglob("*.py") if path.name != "ledger.py"}
    assert not [path for path, text in texts.items() if re.search(r"from kvfix\.ledger(\.rules)? import .*RULES", text)]


def test_loads_that_the_source_cannot_see_are_not_missed() -> None:
    ledger = Ledger(sees_loads=False)
    for event in ADMITTED[:2]:
        ledger.feed(event)
    (found,) = ledger.feed(ev.Scheduled("r", 512, 16, first=True))
    assert (found.code, found.verdict) == ("KVR006", "unknown")


def test_memory_is_bounded() -> None:
    ledger = Ledger(events_kept=8)
    for _ in range(100):
        ledger.feed(ASKED)
    assert len(ledger.histories["r"].events) == 8
    ledger.forget("r")
    assert ledger.histories == {}
