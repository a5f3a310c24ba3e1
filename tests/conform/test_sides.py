"""Connectors whose workers do not run here are played through the lab's side of them, and the answer says so."""

from typing import Any

import pytest

from kvfix_tools.conform import sides
from tests.conform.test_conform import LMCACHE
from tests.conftest import Once

BESIDE = [{"kv_connector": "LMCacheMPConnector"}, {"kv_connector": "OffloadingConnector"}]


@pytest.mark.parametrize(
    ("connector", "children", "played"),
    [
        ("OffloadingConnector", [], ("offloading", "")),
        ("SimpleCPUOffloadConnector", [], ("simple-offload", "")),
        ("NixlPullConnector", [], ("nixl-pull", "")),
        ("LMCacheConnectorV1", [], ("v1", "")),
        ("v1", [], ("v1", "")),
        ("MultiConnector", BESIDE, ("mp", "last")),
        ("MultiConnector", BESIDE[::-1], ("mp", "first")),
        # These are played as they are.
        ("ExampleConnector", [], None),
        ("my_package.connector:MyConnector", [], None),
        ("MooncakeStoreConnector", [], None),
        ("MultiConnector", BESIDE[:1], None),
        ("MultiConnector", [BESIDE[0], {"kv_connector": "ExampleConnector"}], None),
    ],
)
def test_the_side_of_the_lab(connector: str, children: list[dict[str, str]], played: tuple[str, str] | None) -> None:
    side = sides.side(connector, {"connectors": children})
    assert (side and (side.connector, side.offloading)) == played
    assert side is None or "stand-in" in side.stand_in


def answers() -> dict[str, Any]:
    from kvfix_tools.conform import command, verdicts
    from kvfix_tools.conform.player import Subject

    found = {}
    for name, seeds in (("SimpleCPUOffloadConnector", 0), ("NixlPullConnector", 3)):
        with command.chosen(fixes=True):
            done = verdicts.run(Subject(name, {"lazy_offload": True}), 60, range(seeds), shrinking=0)
        found[name] = {**done.as_json(), "outcomes": {each.rule: each.outcome for each in done.verdicts}}
    return found


def test_the_scenarios_run_on_a_side(once: Once) -> None:
    done = once(answers, LMCACHE)["SimpleCPUOffloadConnector"]
    assert done["cannot"] == ""
    assert "stand-in" in done["stand_in"]
    assert done["violations"] == []
    assert done["counts"]["loaded_tokens"] > 1000
    assert {each for each, outcome in done["outcomes"].items() if outcome == "ok"} > {"promise", "stored", "groups"}
    reasons = {case["name"]: case["reason"] for case in done["scenarios"]}
    assert reasons["without-prefix-caching"] == "the connector does nothing without vLLM's prefix caching"


def test_two_engines_are_played_by_the_fuzzer(once: Once) -> None:
    done = once(answers, LMCACHE)["NixlPullConnector"]
    assert done["cannot"] == ""
    assert done["seeds"] == 3
    assert done["counts"]["loaded_tokens"] > 0
    assert {case["outcome"] for case in done["scenarios"]} == {"not applicable"}
