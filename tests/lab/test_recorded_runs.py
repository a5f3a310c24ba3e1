"""The long runs in docs/matrix.json and docs/released.json are complete, as expected and reproducible."""

from pathlib import Path

import pytest

from kvfix import catalogue, installed_source
from kvfix_tools.lab import releases
from kvfix_tools.lab.engine import rules as lab_rules
from kvfix_tools.lab.scenario import scenarios
from kvfix_tools.ledger import RULES
from maintain import released_findings, scenario_matrix
from maintain.released_findings import CONNECTORS, FILE, fixes_of
from tests import late
from tests.conftest import RELEASES, ROOT, Once, release_names

TEXT = (ROOT / scenario_matrix.FILE).read_text()
PAIRS = scenario_matrix.load(TEXT)


def test_the_matrix_is_whole_and_as_expected() -> None:
    assert scenario_matrix.dump(PAIRS) == TEXT
    vllm = {pair[0] for pair in PAIRS}
    named = {name for file in scenario_matrix.VLLM_RELEASES for name in (ROOT / file).read_text().split()}
    assert vllm > named, "run `make matrix`"
    assert set(PAIRS) == {(one, other) for one in vllm for other in release_names()}, "run `make matrix`"
    slugs = {scenario.slug for scenario in scenarios()}
    for pair, played in PAIRS.items():
        assert {row["scenario"] for row in played["outcomes"]} == slugs, f"{pair}: run `make matrix`"
    assert scenario_matrix.deviations(PAIRS) == []


@pytest.mark.parametrize("fixed", ["violated", "clean"])
def test_equal_rows_are_one_line_and_deviations_are_listed(fixed: str) -> None:
    row = {"scenario": "s", "expected": "violated", "released": "violated", "fixed": fixed}
    run = {"date": "2026-01-01", "python": "3.11", "code": "x"}
    good = {**run, "outcomes": [{**row, "as_expected": fixed == "clean"}]}
    pairs = {("0.9", "0.3.9"): good, ("0.9", "0.3.10"): good, ("0.10", "0.3.9"): {**run, "why": "ImportError: no"}}
    text = scenario_matrix.dump(pairs)
    assert scenario_matrix.load(text) == pairs
    assert text.count('"lmcache": "0.3.9 0.3.10"') == 2
    listed = ["vLLM 0.10, LMCache 0.3.9: ImportError: no"]
    if fixed == "violated":
        says = "s: expected violated, is violated, with fixes violated"
        listed += [f"vLLM 0.9, LMCache {release}: {says}" for release in ("0.3.9", "0.3.10")]
    assert sorted(scenario_matrix.deviations(scenario_matrix.load(text))) == sorted(listed)


def test_an_outcome_depends_on_code_and_not_on_texts() -> None:
    texts = b'"""A bug."""\n\ndef fix(blocks):\n    """Fix it."""\n    # as decode\n    return blocks[1:]\n'
    code = releases._without_texts(b"def fix(blocks):\n    return blocks[1:]\n")
    assert releases._without_texts(texts) == code
    assert releases._without_texts(b"def fix(blocks):\n    return blocks[2:]\n") != code


RUNS = released_findings.load()
HERE = {run.connector: run for run in RUNS if run.versions["vllm"] == installed_source.version("vllm")}


def shown(connector: str, seed: int, rule: str) -> list[str]:
    """Leave out one fix at a time. Return the fixes without which the seed's schedule violates this rule."""
    (drawn,) = late.Run(connector, False).schedules([seed])
    return fixes_of(rule, "", released_findings.without_each(drawn))


def test_released_has_every_connector_with_every_release() -> None:
    releases = {installed_source.version("vllm"), *(ROOT / released_findings.NEWER).read_text().split()}
    assert [(run.connector, run.versions["vllm"]) for run in RUNS] == [
        (connector, release) for connector in CONNECTORS for release in sorted(releases)
    ]
    assert all(run.versions["lmcache"] == CONNECTORS[run.connector] for run in RUNS)
    assert all(run.steps >= released_findings.STEPS and run.rows and not run.with_fixes for run in RUNS)
    rules = {rule.code for rule in (*RULES, *lab_rules.RULES)}
    for row in (row for run in RUNS for row in run.rows):
        assert row.rule in rules
        assert row.findings > 0
        assert all(catalogue.find(code) for code in row.fixes)
    assert not any(path in Path(FILE).read_text() for path in ("/tmp", "site-packages", str(ROOT)))


def test_a_fix_is_named_by_the_words_or_else_by_the_rule() -> None:
    without = {"": [], "KVF001": [("LAB001", "LAB001 the step")], "KVF002": [("LAB001", "LAB001 other")], "KVF003": []}
    assert fixes_of("LAB001", "LAB001 other", without) == ["KVF002"]
    assert fixes_of("LAB001", "LAB001 third", without) == ["KVF001", "KVF002"]
    assert fixes_of("KVR001", "KVR001 third", without) == []


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_row_can_be_reproduced(connector: str, once: Once) -> None:
    row = next(row for row in HERE[connector].rows if len(row.fixes) == 1)
    assert row.fixes[0] in once(shown, RELEASES / CONNECTORS[connector], connector, row.seed, row.rule)
