import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvfix_tools.conform import command, scenarios, verdicts
from maintain import connectors
from tests.conftest import NEWEST, Once
from tests.diagnose.lines import site_packages

BESIDE = [{"kv_connector": "LMCacheMPConnector"}, {"kv_connector": "OffloadingConnector"}]


def example() -> Any:
    with mock.patch.object(connectors, "SEEDS", 0):
        return connectors.ask("ExampleConnector").verdicts


def violated(verdicts: dict[str, str]) -> set[str]:
    return {rule for rule, outcome in verdicts.items() if outcome == "violated"}


def test_each_connector_that_vllm_ships_is_in_the_table() -> None:
    factory = site_packages() / "vllm/distributed/kv_transfer/kv_connector/factory.py"
    shipped = re.findall(r'KVConnectorFactory\.register_connector\(\s*"(\w+)"', factory.read_text())
    named = {each.partition("[")[0] for each in connectors.SUBJECTS}
    assert {*shipped} - named == {"NixlConnector"}  # an alias of NixlPullConnector
    assert [each.name for each in connectors.load()] == list(connectors.SUBJECTS)
    for said in connectors.load():
        assert list(said.verdicts) == [rule.slug for rule in verdicts.RULES], said.name
        assert said.cannot or said.loaded, said.name
    assert not re.search("/tmp|site-packages", Path(connectors.FILE).read_text())


def test_the_table_agrees_with_a_new_run(once: Once) -> None:
    (said,) = (each for each in connectors.load() if each.name == "ExampleConnector")
    broken = violated(once(example, NEWEST))
    assert broken == {"promise", "stored", "reset", "raises-nothing"}
    assert broken <= violated(said.verdicts)  # the table also has violations from fuzzing


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
        # The lab runs these connectors without a stand-in.
        ("ExampleConnector", [], None),
        ("my_package.connector:MyConnector", [], None),
        ("MooncakeStoreConnector", [], None),
        ("MultiConnector", BESIDE[:1], None),
        ("MultiConnector", [BESIDE[0], {"kv_connector": "ExampleConnector"}], None),
    ],
)
def test_stand_ins_of_the_lab(connector: str, children: list[dict[str, str]], played: tuple[str, str] | None) -> None:
    side = scenarios.side(connector, {"connectors": children})
    assert (side and (side.connector, side.offloading)) == played
    assert side is None or "stand-in" in side.stand_in


def answers() -> dict[str, Any]:
    from kvfix_tools.conform.player import Subject

    found = {}
    for name, seeds in (("SimpleCPUOffloadConnector", 0), ("NixlPullConnector", 3)):
        with command.chosen(fixes=True):
            done = verdicts.run(Subject(name, {"lazy_offload": True}), 60, range(seeds), shrinking=0)
        found[name] = {**done.as_json(), "outcomes": {each.rule: each.outcome for each in done.verdicts}}
    return found


def test_the_scenarios_run_with_a_stand_in(once: Once) -> None:
    done = once(answers, NEWEST)["SimpleCPUOffloadConnector"]
    assert (done["cannot"], done["violations"]) == ("", [])
    assert "stand-in" in done["stand_in"]
    assert done["counts"]["loaded_tokens"] > 1000
    assert {each for each, outcome in done["outcomes"].items() if outcome == "ok"} > {"promise", "stored", "groups"}
    reasons = {case["name"]: case["reason"] for case in done["scenarios"]}
    assert reasons["without-prefix-caching"] == "the connector does nothing without vLLM's prefix caching"


def test_two_engines_are_played_by_the_fuzzer(once: Once) -> None:
    done = once(answers, NEWEST)["NixlPullConnector"]
    assert (done["cannot"], done["seeds"]) == ("", 3)
    assert done["counts"]["loaded_tokens"] > 0
    assert {case["outcome"] for case in done["scenarios"]} == {"not applicable"}
