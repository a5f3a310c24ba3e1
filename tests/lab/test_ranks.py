"""Two ranks: saves of a step that loads. Only all fixes together keep the caches right."""

from __future__ import annotations

from typing import Any

import pytest

from kvfix_tools.lab import runner
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import find
from kvfix_tools.lab.steps import prompt
from tests import late

WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "by layers": {"lmcache": {"use_layerwise": True}},
    "steps in flight": {"async_scheduling": True},
    "kv_producer": {"kv_role": "kv_producer"},
    "kv_producer by layers": {"kv_role": "kv_producer", "lmcache": {"use_layerwise": True}},
}


def saved(ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Chunks in each rank's cache: before a step that loads 128 of 300 tokens, after it, and in the end."""
    with runner.applied(True):
        engine = late.LabEngine(Options(max_num_batched_tokens=512, ranks=ranks, **options))
        engine.store("first", prompt(128))
        chunks = [[len(cache) for cache in engine.caches]]
        engine.admit("second", prompt(300), 6)
        while not engine.counts["loaded_tokens"]:
            engine.step()
        chunks.append([len(cache) for cache in engine.caches])
        engine.run()
        engine.settle()
        chunks.append([len(cache) for cache in engine.caches])
        return {"chunks": chunks, "found": [str(found) for found in engine.findings]}


def play_all() -> dict[str, Any]:
    scenario = find("failed-load-of-one-rank")
    assert scenario is not None
    with runner.applied(True, only=[code for code in runner.played() if code != "KVF030"]):
        without = [found.code for found in scenario.played().findings]
    return {
        "saved": {way: {ranks: saved(ranks, options) for ranks in (1, 2)} for way, options in WAYS.items()},
        "without": without,
    }


@pytest.mark.parametrize("way", WAYS)
def test_what_a_step_that_loads_computes_is_saved_later(way: str, outcomes: dict[str, Any]) -> None:
    one, two = (outcomes["saved"][way][ranks] for ranks in ("1", "2"))
    assert one["found"] == two["found"] == []
    assert one["chunks"][1] > one["chunks"][0], "one rank saves it at once"
    assert two["chunks"][1] == two["chunks"][0]
    assert two["chunks"][2] == one["chunks"][2] * 2


def test_the_other_fixes_are_not_enough(outcomes: dict[str, Any]) -> None:
    assert "LAB001" in outcomes["without"]
