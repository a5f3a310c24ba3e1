"""The lab finds each planted fault, and finds nothing without a fault. docs/lab-features.md lists faults by feature."""

import dataclasses
import re
from collections import Counter
from typing import Any

import pytest

from kvfix_tools.lab.engine.counts import COUNTED, FEATURES
from kvfix_tools.lab.fuzz.schedule import draw
from kvfix_tools.lab.runner import REPORTED
from kvfix_tools.lab.scenario import find
from tests import late
from tests.conftest import ROOT
from tests.healthy import own_blocks
from tests.lab import planted_in_real_server  # noqa: F401  the import registers the module's faults
from tests.lab.planted import FAULTS, Fault, is_found, played
from tests.lab.planted_faults import DRAFTS
from tests.lab.planted_in_pairs import COPIED, FEWER, GROUPS, MORE
from tests.lab.planted_in_ranks import LARGER_BLOCKS, ONE_OBJECT, RANKS, SHARES, STATES_AND_DRAFTS

#: The only allowed finding. The tested LMCache has the bug of scenario priority-left-after-resume.
KNOWN = "_requests_priority still holds it"
FETCH, LAYERS = {"enable_async_loading": True}, {"use_layerwise": True}

ONE = {"loaded_tokens": 64, "preemptions": 1, "stored_tokens": 224}
STAGES = {**ONE, "steps_in_flight": 6}
WITH_DRAFTS = {**ONE, **dict.fromkeys(("drafts_proposed", "drafts_accepted", "drafts_rejected"), 6)}
#: The three prompts of a prefill and decode pair have 310 tokens in total. The first two prompts share 96 tokens.
PAIR = {"loaded_tokens": 310 - 96}
LEASES, OF_RANKS = {**PAIR, "leases": 3}, {**PAIR, "leases": 3 + 12, "ranks_apart": 1}
#: BESIDE: decode loads the third prompt from prefill. OWN: decode loads the third prompt from decode's own LMCache.
BESIDE = {"loads_of_kv_producer": 1, "loads_of_kv_consumer": 1, "loaded_beside": 2}
OWN = {**BESIDE, "loads_of_kv_consumer": 2, "loaded_beside": 1}
#: Setups without faults, their changed options, and the minimum of each count.
SOUND: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    *(("v1", each, ONE) for each in ({}, {"lmcache": FETCH}, {"lmcache": LAYERS}, {"kv_role": "kv_producer"})),
    *(("offloading", each, ONE) for each in ({}, {"tier": "fs"}, {"windows": (32,), "num_blocks": 60})),
    *((each, {}, ONE) for each in ("mp", "mp-windows", "mp-states")),
    ("mp-states", STATES_AND_DRAFTS, ONE),
    *(("mp-windows", each, ONE) for each in (ONE_OBJECT, LARGER_BLOCKS)),
    *(
        (name, each, ONE)
        for each in ({"offloading": "last"}, {"async_scheduling": True}, {"save_last": True})
        for name in ("v1", "mp")
    ),
    *((name, RANKS[name], ONE) for name in RANKS),
    ("mp", SHARES["mp"], ONE),
    ("mp-window-freed", {}, {"stored_tokens": 512}),
    *((name, {"ranks": 3, "pipeline": True}, STAGES) for name in ("v1", "mp")),
    *((name, DRAFTS[name], WITH_DRAFTS) for name in DRAFTS),
    ("simple-offload", {}, {**ONE, "stores_offloaded": 1}),
    ("v1-simple", {"offloading": "first"}, {"loads_offloaded": 2, "loads_of_kv_both": 1}),
    ("v1-simple", {"offloading": "last"}, {"loads_offloaded": 1, "loads_of_kv_both": 2}),
    *(("nixl-pull", {}, LEASES), ("nixl-push", {}, LEASES), ("nixl-push-at-once", {}, LEASES), ("mooncake", {}, PAIR)),
    *((f"{name}-ranks", each, OF_RANKS) for name in ("nixl-pull", "nixl-push") for each in (MORE, FEWER)),
    ("nixl-pull-ranks", COPIED, {"loads_with_copied_heads": 1}),
    *((f"{name}-ranks", GROUPS, {"loads_with_one_window": 3}) for name in ("nixl-pull", "nixl-push")),
    *(
        (f"{name}-multi", {"lmcache_first": first}, OWN if first else BESIDE)
        for name in ("nixl", "nixl-push", "mooncake")
        for first in (True, False)
    ),
    ("nixl-offload", {"offloading": "first"}, {"loads_of_kv_consumer": 1, "loads_offloaded": 3}),
    ("nixl-offload", {"offloading": "last"}, {"loads_of_kv_consumer": 2, "loads_offloaded": 2, "stores_offloaded": 1}),
]
PLANTED = {each: fault for each, fault in FAULTS.items() if each[0] != "mp-real"}


def random_schedules(seeds: int) -> dict[str, Any]:
    """Play plain schedules (no aborts, failed loads or evictions) with asynchronous loading."""
    found, counts = {}, Counter[str]()
    for seed in range(seeds):
        drawn = draw(seed, "v1", plain=True)
        done = late.play(drawn._replace(options=dataclasses.replace(drawn.options, lmcache=FETCH)))
        found |= {f"{finding.code} {finding.message}": seed for finding in done.findings}
        counts.update(done.counts)
    return {"found": found, "counts": counts}


def play_all() -> dict[str, Any]:
    own_blocks()
    return {
        "sound": [played(setup, **options) for setup, options, _ in SOUND],
        "faults": {"-".join(each): played(*each) for each in PLANTED},
        "sound_schedules": {"-".join(each): played(*each, False) for each in PLANTED if PLANTED[each].schedule},
        "random": random_schedules(60),
    }


@pytest.mark.parametrize("number", range(len(SOUND)), ids=lambda number: f"{SOUND[number][0]} {SOUND[number][1]}")
def test_nothing_planted_nothing_found(number: int, outcomes: dict[str, Any]) -> None:
    done, least = outcomes["sound"][number], SOUND[number][2]
    assert [message for _, message in done["found"] if message != KNOWN] == []
    assert {name: done["counts"][name] for name in least if done["counts"][name] < least[name]} == {}


def test_nothing_planted_nothing_found_in_the_schedule_of_a_fault(outcomes: dict[str, Any]) -> None:
    sound = outcomes["sound_schedules"].items()
    assert [(name, text) for name, each in sound for _, text in each["found"] if KNOWN not in text] == []


@pytest.mark.parametrize(("name", "fault"), PLANTED.items(), ids=map("-".join, PLANTED))
def test_planted(name: tuple[str, str], fault: Fault, outcomes: dict[str, Any]) -> None:
    done = outcomes["faults"]["-".join(name)]
    assert is_found(fault, done), done["found"]
    assert {code for code, text in done["found"] if text.startswith(REPORTED)} <= {each[:6] for each in fault.shows}


def test_plain_random_schedules_are_clean_with_asynchronous_loading(outcomes: dict[str, Any]) -> None:
    run = outcomes["random"]
    assert {message: seed for message, seed in run["found"].items() if KNOWN not in message} == {}
    assert min(run["counts"][each] for each in ("loaded_tokens", "stored_tokens", "preemptions")) > 0


ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/lab-features.md").read_text().splitlines()
    if line.startswith("| ") and "counted as" not in line
]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_names_of_a_feature_are_those_of_the_code(row: list[str]) -> None:
    _, drawn, counted, faults, slugs = row
    assert drawn
    assert named(counted)
    assert set(named(counted)) <= set(COUNTED)
    assert set(named(faults)) <= {name for _, name in FAULTS}
    assert [slug for slug in named(slugs) if find(slug) is None] == []
    assert named(faults)


def test_every_feature_and_each_fault_of_the_real_server_has_a_row() -> None:
    counted, faults = ({name for row in ROWS for name in named(row[column])} for column in (2, 3))
    assert {name for name in FEATURES if not counted & {f"loads_with_{name}", f"stores_with_{name}"}} == set()
    assert {name for setup, name in FAULTS if setup == "mp-real"} <= faults
