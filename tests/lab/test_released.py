"""docs/released.json (`python -m maintain.released_findings`) is complete, and can be reproduced."""

from pathlib import Path

import pytest

from kvfix import catalogue, installed_source
from kvfix_tools.lab.engine import rules as lab_rules
from kvfix_tools.ledger import RULES
from maintain import released_findings
from maintain.released_findings import CONNECTORS, FILE, fixes_of
from tests import late
from tests.conftest import RELEASES, ROOT, Once

RUNS = released_findings.load()
HERE = {run.connector: run for run in RUNS if run.versions["vllm"] == installed_source.version("vllm")}


def shown(connector: str, seed: int, rule: str) -> list[str]:
    """The fixes without which alone the seed violates this rule."""
    (drawn,) = late.Run(connector, False).schedules([seed])
    return fixes_of(rule, "", released_findings.without_each(drawn))


def test_it_has_every_connector_with_every_release() -> None:
    releases = {installed_source.version("vllm"), *(ROOT / released_findings.NEWER).read_text().split()}
    assert [(run.connector, run.versions["vllm"]) for run in RUNS] == [
        (connector, release) for connector in CONNECTORS for release in sorted(releases)
    ]
    assert all(run.versions["lmcache"] == CONNECTORS[run.connector] for run in RUNS)


def test_it_has_played_enough_and_is_clean_with_the_fixes() -> None:
    assert all(run.steps >= released_findings.STEPS and run.rows and not run.with_fixes for run in RUNS)


def test_its_rules_and_fixes_are_known() -> None:
    rules = {rule.code for rule in (*RULES, *lab_rules.RULES)}
    for row in (row for run in RUNS for row in run.rows):
        assert row.rule in rules
        assert row.findings > 0
        assert all(catalogue.find(code) for code in row.fixes)


def test_it_has_no_path_of_a_machine() -> None:
    assert not any(path in Path(FILE).read_text() for path in ("/tmp", "site-packages", str(ROOT)))


def test_a_fix_is_named_by_the_words_or_else_by_the_rule() -> None:
    without = {"": [], "KVF001": [("LAB001", "LAB001 the step")], "KVF002": [("LAB001", "LAB001 other")], "KVF003": []}
    assert fixes_of("LAB001", "LAB001 other", without) == ["KVF002"]
    assert fixes_of("LAB001", "LAB001 third", without) == ["KVF001", "KVF002"]
    assert fixes_of("KVR001", "KVR001 third", without) == []


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_row_comes_out_again(connector: str, once: Once) -> None:
    row = next(row for row in HERE[connector].rows if len(row.fixes) == 1)
    again = once(shown, RELEASES / CONNECTORS[connector], connector, row.seed, row.rule)
    assert row.fixes[0] in again
