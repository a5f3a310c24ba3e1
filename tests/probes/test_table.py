"""Mode `check` without the fix, on the real scheduler and connectors: the right rule, in a report that names the fix.

Every scenario of the lab, on every release that is played and has the bug.
"""

import pytest

from kvfix.cures import CURES
from kvfix.fix import find as fix
from kvfix_tools.lab import runner
from kvfix_tools.lab.scenario import Scenario, find, scenarios
from tests.conftest import Once
from tests.lab.test_scenarios import PLAYED, played

#: Not to be seen from the hooks, and why. The rest of the table is what is seen.
CONTENT = "only the contents of slots or chunks show it"
SERVER = "only the server of the multi-process connector holds it"
REQUEST = "no hook is called wrongly: what a request gets is what shows it"
MEMORY = "it is kept on purpose, for a while: a step does not tell that this is for ever"
WORKER = "what the worker has fetched is in a queue of LMCache's that has no names"
UNSEEN = {
    "cache-salt-not-in-key": CONTENT,
    "decode-tokens-left-out": CONTENT,
    "failed-load-poisons-cache": CONTENT,
    "failed-load-gone-under-way": CONTENT,
    "failed-load-keeps-output": CONTENT,
    "failed-load-left-to-another": CONTENT,
    "failed-load-preempted-under-way": CONTENT,
    "failed-load-stays-cached": CONTENT,
    "failed-load-stored-last": CONTENT,
    "failed-load-stored-under-way": CONTENT,
    "lora-not-in-key": CONTENT,
    "mp-lora-not-in-key": CONTENT,
    "resume-shares-block-list": CONTENT,
    "resume-then-sits-out": CONTENT,
    "mp-preempt-store-overwrite": CONTENT,
    "mp-prompt-embeds": CONTENT,
    "mp-retrieve-false": CONTENT,
    "mp-apc-hit-not-stored": CONTENT,
    "mp-heartbeat-never-starts": SERVER,
    "mp-free-locks-salt": SERVER,
    "mp-lookup-for-nothing": SERVER,
    "mp-idle-worker-forgotten": REQUEST,
    "resumed-load-failure-unseen": CONTENT,
    "reused-id-gets-dead-hit": REQUEST,
    "failed-load-reserves-itself": REQUEST,
    "mp-resume-load-circle": REQUEST,
    "mp-failed-load-blames-others": REQUEST,
    "lookup-skips-computed": REQUEST,
    "async-fetched-left": WORKER,
    "async-late-answer-left": WORKER,
    "mp-ended-ids-kept": MEMORY,
}
#: Seen by another rule than the lab's own, which looks into slots: in the hooks it is this.
BY = {"mp-freed-while-stored": "KVR009"}
#: The connector lets the scheduler know of its locks only in these.
ONLY = {"mp-abort-before-alloc": ["0.4.6", "0.5.4"], "mp-abort-while-prefetching": ["0.5.4"]}

#: To be seen, and by none of the releases that are played here.
NOT_HERE = {
    "resume-is-not-known": "0.3.9 has it, which `make matrix` plays",
    "mp-abort-while-prefetching-in-tree": "the client of 0.4.6 keeps nothing of a lookup that was not answered",
}


def name(scenario: Scenario) -> str:
    return scenario.slug.removesuffix("-in-tree")


SEEN = [scenario.slug for scenario in scenarios() if name(scenario) not in UNSEEN]
VLLM = runner.versions()["vllm"]
#: Each with the releases in which it is to be seen.
SHOWN = [
    (scenario.slug, release)
    for scenario in scenarios()
    for release in ONLY.get(name(scenario), PLAYED)
    if scenario.slug in SEEN and runner.expected(scenario, {"vllm": VLLM, "lmcache": release}) == "violated"
]


@pytest.mark.parametrize(("slug", "release"), SHOWN)
def test_the_report_has_the_rule_and_names_the_fix(slug: str, release: str, once: Once) -> None:
    scenario = find(slug)
    assert scenario is not None
    each = played(once, release)[slug, False]
    assert each["expected"] == "violated"
    rule = BY.get(name(scenario), scenario.rule)
    reports = [report for report in each["reports"] if f"SUMMARY: kvfix {rule} " in report]
    assert reports, [report.splitlines()[-3] for report in each["reports"]]
    named = [f"{code} {found.slug} cures it" for code in scenario.fixes if (found := fix(code))]
    assert any(text in report for report in reports for text in named), reports[0]
    assert "The story of " in reports[0]
    assert "Recorder: " in reports[0]


def test_the_table_is_whole() -> None:
    """Each row that is not seen says why, none is listed that is seen, and each other is shown by some release."""
    assert {slug for slug, _ in SHOWN} == set(SEEN) - set(NOT_HERE)
    assert set(UNSEEN) <= {name(scenario) for scenario in scenarios()}
    assert set(BY) | set(ONLY) <= {name(scenario) for scenario in scenarios()} - set(UNSEEN)
    assert {code for scenario in scenarios() if scenario.slug in SEEN for code in scenario.fixes} <= {
        code for _, _, codes in CURES for code in codes
    }


@pytest.mark.parametrize("release", PLAYED)
def test_what_is_listed_as_unseen_is_unseen(release: str, once: Once) -> None:
    for scenario in scenarios():
        each = played(once, release)[scenario.slug, False]
        if name(scenario) in UNSEEN and each["expected"] == "violated":
            named = [
                code
                for code in scenario.fixes
                for report in each["reports"]
                if f"{code} {fix(code).slug} cures" in report
            ]  # type: ignore[union-attr]
            assert not named, (scenario.slug, named)
