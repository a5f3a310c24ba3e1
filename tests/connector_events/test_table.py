"""Mode `check` without the fix, on the real scheduler and connectors: a report with the right rule and the fix.

For every scenario of the lab, on every played release that has the bug.
"""

import pytest

from kvfix import catalogue
from kvfix_tools.lab import releases, runner
from kvfix_tools.lab.scenario import find, scenarios
from tests.conftest import Once
from tests.lab.test_scenarios import PLAYED, played

#: Scenarios that hooks show, but not on the releases that are played here.
NOT_HERE = {
    "resume-is-not-known": "0.3.9 has it, which `make matrix` plays",
    "mp-abort-while-prefetching-in-tree": "the client of 0.4.6 keeps nothing of a lookup that was not answered",
}


VISIBLE = [scenario.slug for scenario in scenarios() if not scenario.not_in_hooks]
VLLM = releases.versions()["vllm"]
#: Each scenario with the releases on which hooks show it.
SHOWN = [
    (scenario.slug, release)
    for scenario in scenarios()
    for release in scenario.hooks_releases or PLAYED
    if scenario.slug in VISIBLE and runner.expected(scenario, {"vllm": VLLM, "lmcache": release}) == "violated"
]


@pytest.mark.parametrize(("slug", "release"), SHOWN)
def test_the_report_has_the_rule_and_names_the_fix(slug: str, release: str, once: Once) -> None:
    scenario = find(slug)
    assert scenario is not None
    each = played(once, release)[slug, False]
    assert each["expected"] == "violated"
    rule = scenario.hooks_rule or scenario.rule
    reports = [report for report in each["reports"] if f"SUMMARY: kvfix {rule} " in report]
    assert reports, [report.splitlines()[-3] for report in each["reports"]]
    named = [f"{code} {found.slug} fixes this" for code in scenario.fixes if (found := catalogue.find(code))]
    assert any(text in report for report in reports for text in named), reports[0]
    assert "The history of " in reports[0]
    assert "Recorder: " in reports[0]


def test_the_table_is_complete() -> None:
    """NOT_HERE has the visible scenarios that no played release shows. All their fixes have rules as evidence."""
    assert {slug for slug, _ in SHOWN} == set(VISIBLE) - set(NOT_HERE)
    assert {code for scenario in scenarios() if scenario.slug in VISIBLE for code in scenario.fixes} <= {
        fix.code for fix in catalogue.fixes() if any(rule.startswith("KVR") for rule in fix.evidence)
    }


@pytest.mark.parametrize("release", PLAYED)
def test_scenarios_that_hooks_do_not_show(release: str, once: Once) -> None:
    for scenario in scenarios():
        each = played(once, release)[scenario.slug, False]
        if scenario.not_in_hooks and each["expected"] == "violated":
            named = [
                code
                for code in scenario.fixes
                for report in each["reports"]
                if f"{code} {catalogue.find(code).slug} fixes it" in report  # type: ignore[union-attr]
            ]
            assert not named, (scenario.slug, named)
