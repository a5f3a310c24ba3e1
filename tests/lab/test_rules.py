"""The lab's own rules: one table, explained to users, and used by scenarios together with the ledger's."""

import pytest

from kvfix_tools import ledger
from kvfix_tools.lab.engine.rules import RULES
from kvfix_tools.lab.scenario import scenarios
from kvfix_tools.lab.scenarios import lookups, nixl_pull


def test_codes_and_names_are_unique_and_explained() -> None:
    codes = [rule.code for rule in RULES]
    assert codes == sorted(set(codes))
    assert len({rule.name for rule in [*RULES, *ledger.RULES]}) == len(RULES) + len(ledger.RULES)
    for rule in RULES:
        assert rule.doc.strip().partition("\n")[0].endswith("."), rule.code


def test_a_scenario_violates_a_known_rule() -> None:
    known = {rule.code for rule in [*RULES, *ledger.RULES]}
    assert {scenario.rule for scenario in scenarios()} <= known


def test_two_files_do_not_have_the_same_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    name, scenario = next(iter(lookups.SCENARIOS.items()))
    monkeypatch.setitem(nixl_pull.SCENARIOS, name, scenario)
    scenarios.cache_clear()
    with pytest.raises(ValueError, match=f"two files have the scenario {name}"):
        scenarios()
    scenarios.cache_clear()
