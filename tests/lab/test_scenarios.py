"""A scenario violates its rule only if the release has the bug and no fix is applied. kvfix's report names the fix."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvfix import catalogue, metrics
from kvfix.session import session
from kvfix_tools import ledger
from kvfix_tools.lab import releases, runner
from kvfix_tools.lab.engine.rules import RULES
from kvfix_tools.lab.options import KNOWN
from kvfix_tools.lab.scenario import Scenario, find, scenarios
from kvfix_tools.lab.scenarios import lookups, pairs
from tests.conftest import RELEASES, ROOT, Fresh, Once, run_forked

#: Releases of LMCache in which a bug appears or disappears, and the newest release. `make matrix` plays all releases.
PLAYED = ["0.3.10", "0.3.10.post1", "0.4.1", "0.4.6", "0.5.4", "0.5.5", "0.5.6"]
SLUGS = [scenario.slug for scenario in scenarios()]


def of_release(release: str) -> list[Scenario]:
    """Return the scenarios to play. Only the newest release of LMCache plays connectors that do not use LMCache."""
    return [each for each in scenarios() if release == PLAYED[-1] or "lmcache" in KNOWN[each.options.connector].needs]


CASES = [(scenario.slug, release) for release in PLAYED for scenario in of_release(release)]


def play_all(release: str) -> list[dict[str, Any]]:
    answer = []
    for scenario in of_release(release):
        for fixes in (False, True):
            session.tallies.clear()
            result = runner.play(scenario, fixes)
            shown = runner.expected(scenario) == "violated"
            more: dict[str, Any] = {"expected": runner.expected(scenario), "counts": result.counts}
            more["reports"] = runner.reports(scenario) if shown and not fixes else []
            more["acted"] = {code: acted(scenario, code) for code in scenario.fixes if shown and fixes}
            answer.append(result.as_json() | more)
    return answer


def acted(scenario: Scenario, code: str) -> int:
    """Return how often the fix acted. If the fix did not act in the run with all fixes, play with this fix only."""
    if not metrics.of(code).acted:
        runner.play(scenario, fixes=True, only=[code])
    return metrics.of(code).acted


def played(once: Once, release: str) -> dict[tuple[str, bool], dict[str, Any]]:
    return {(each["slug"], each["fixes"]): each for each in once(play_all, RELEASES / release, release)}


@pytest.mark.parametrize(("slug", "release"), CASES)
def test_as_released(slug: str, release: str, once: Once) -> None:
    each = played(once, release)[slug, False]
    assert each["outcome"] == each["expected"], each


@pytest.mark.parametrize(("slug", "release"), CASES)
def test_with_fixes(slug: str, release: str, once: Once) -> None:
    each = played(once, release)[slug, True]
    if not find(slug).fixes:
        # No fix exists. The outcome may be unexpected only if the run without fixes shows a second bug.
        assert each["outcome"] == each["expected"] or played(once, release)[slug, False]["also"], each
        return
    assert each["outcome"] in ("clean", "not-applicable"), each
    if each["outcome"] == "clean" and each["expected"] == "violated":
        # A pair of engines may store no tokens, but then counts leases or aborts. A streaming session counts inputs.
        done = ("stored_tokens", "finished", "leases", "aborted", "aborts", "inputs")
        assert sum(each["counts"].get(name, 0) for name in done) > 0, "nothing was tested"


def test_a_fix_acts_in_the_scenarios_of_its_bug(once: Once) -> None:
    found = {slug: each["acted"] for (slug, fixes), each in played(once, "0.5.6").items() if fixes}
    # In this scenario, KVF322 ends the load, so no registration raises, and KVF325 has no exception to catch.
    assert {slug for slug, counts in found.items() if not all(counts.values())} <= {"nixl-push-thread-loses-notices"}
    assert len({code for counts in found.values() for code in counts}) > 60


#: Scenarios, and the reason why hook calls show the scenario's bug in no release of PLAYED.
NOT_HERE = {
    "resume-is-not-known": "only LMCache 0.3.9 has the bug, and `make matrix` plays 0.3.9",
    "mp-abort-while-prefetching-in-tree": "the client of LMCache 0.4.6 keeps no state of an unanswered lookup",
}
VISIBLE = [scenario for scenario in scenarios() if not scenario.not_in_hooks]
VLLM = releases.versions()["vllm"]
#: (scenario, release) for each release in which kvfix sees the bug of the scenario in hook calls.
SHOWN = [
    (scenario, release)
    for scenario in VISIBLE
    for release in scenario.hooks_releases or PLAYED
    if scenario in of_release(release) and runner.expected(scenario, {"vllm": VLLM, "lmcache": release}) == "violated"
]


@pytest.mark.parametrize(("scenario", "release"), SHOWN, ids=[f"{each.slug}-{release}" for each, release in SHOWN])
def test_the_report_has_the_rule_and_names_the_fix(scenario: Scenario, release: str, once: Once) -> None:
    each = played(once, release)[scenario.slug, False]
    assert each["expected"] == "violated"
    rule = scenario.hooks_rule or scenario.rule
    reports = [report for report in each["reports"] if f"SUMMARY: kvfix {rule} " in report]
    assert reports, [report.splitlines()[-3] for report in each["reports"]]
    named = [f"{code} {found.slug} fixes this" for code in scenario.fixes if (found := catalogue.find(code))]
    assert any(text in report for report in reports for text in named), reports[0]
    assert "The history of " in reports[0]
    assert "Recorder: " in reports[0]


def test_all_that_hooks_show_is_reported() -> None:
    assert {each.slug for each, _ in SHOWN} == {each.slug for each in VISIBLE} - set(NOT_HERE)
    assert {code for scenario in VISIBLE for code in scenario.fixes} <= {
        fix.code for fix in catalogue.fixes() if any(rule.startswith("KVR") for rule in fix.evidence)
    }


@pytest.mark.parametrize("release", PLAYED)
def test_no_report_names_a_fix_that_hooks_do_not_show(release: str, once: Once) -> None:
    named = [
        (scenario.slug, code)
        for scenario in of_release(release)
        for code in scenario.fixes
        for report in played(once, release)[scenario.slug, False]["reports"]
        if scenario.not_in_hooks and f"{code} {getattr(catalogue.find(code), 'slug', '')} fixes this" in report
    ]
    assert named == []


def test_every_fix_has_a_scenario_and_every_scenario_a_release_that_is_wrong() -> None:
    slugs = {scenario.slug for scenario in scenarios()}
    for fix in catalogue.fixes():
        assert slugs.issuperset(fix.scenarios), fix.code
        assert bool(fix.scenarios) != bool(fix.proof) or not fix.fixable, (fix.code, "either scenarios or a proof")
        assert not fix.proof or (ROOT / fix.proof.partition(",")[0].partition(":")[0]).exists(), fix.proof
    codes = [rule.code for rule in RULES]
    assert codes == sorted(set(codes))
    assert len({rule.name for rule in [*RULES, *ledger.RULES]}) == len(RULES) + len(ledger.RULES)
    assert [rule.code for rule in RULES if not rule.doc.strip().partition("\n")[0].endswith(".")] == []
    for scenario in scenarios():
        assert scenario.wrong, scenario.slug
        assert scenario.title.endswith("."), scenario.slug
        assert scenario.rule in {rule.code for rule in [*RULES, *ledger.RULES]}


def test_the_list_as_json_and_as_a_table_that_is_piped(fresh: Fresh) -> None:
    lab = [sys.executable, "-m", "kvfix_tools.cli", "lab", "list"]
    assert [row["slug"] for row in json.loads(fresh.run([*lab, "--json"]).stdout)] == SLUGS
    lines = fresh.run(lab).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == SLUGS
    for line, scenario in zip(lines[1:], scenarios(), strict=True):
        assert line.rstrip().endswith(scenario.title)


#: The error message of the bug report. Users search for the message, so the demo must print the message on one line.
REPORTED = (
    "Mismatch in tokens to load: 256 vs 256 (tokens in lmcache) - 336 (tokens in vllm) - 0 (full lmcache hits "
    "subtracts last token to recalculate logits)"
)


def demo(folder: Path, release: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvfix_tools.lab.demo", "--lmcache-path", str(RELEASES / release)]
    return run_forked([*command, *more], folder)


def test_demo_shows_the_report(tmp_path: Path) -> None:
    done = demo(tmp_path, "0.3.10")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "\x1b[" not in done.stdout
    assert f"EngineCore is dead.\n    AssertionError: {REPORTED} for request long\n" in done.stdout
    assert "With kvfix.apply(): vLLM finishes the request, and LMCache loads no token." in done.stdout
    released, fixed = json.loads(demo(tmp_path, "0.3.10", "--json").stdout)
    assert released["story"][-1] == (f"step 7: schedule raises AssertionError: {REPORTED} for request long")
    assert (
        "step 6: lookup at 336 computed tokens promises 256, but hit 256 - computed 336 = -80: 0 is due"
        in released["story"]
    )
    assert "step 7: admitted at 336 computed tokens, 9673 more are computed" in fixed["story"]
    assert "step 8: finished" in fixed["story"]


def test_demo_on_a_release_without_the_bug_says_that_it_did_not_die(tmp_path: Path) -> None:
    done = demo(tmp_path, "0.5.6")
    assert done.returncode == 1
    assert "EngineCore did not die as reported." in done.stdout


def test_two_files_do_not_have_the_same_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    name, scenario = next(iter(lookups.SCENARIOS.items()))
    monkeypatch.setitem(pairs.SCENARIOS, name, scenario)
    scenarios.cache_clear()
    with pytest.raises(ValueError, match=f"two files have the scenario {name}"):
        scenarios()
    scenarios.cache_clear()
