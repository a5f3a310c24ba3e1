"""Write docs/released.json: the findings of the fuzzer without fixes, and the fixes for these findings.

    python -m maintain released_findings [CONNECTOR...]

A seed determines the fuzzer's steps. A fix belongs to a finding if the steps show the finding when only this fix is
missing. For each kind of finding, the program tries seeds until a seed shows which fixes belong to the finding.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvfix import catalogue
from kvfix.session import session
from kvfix_tools.command_options import Names
from kvfix_tools.lab import releases, runner
from kvfix_tools.lab.fuzz.schedule import Schedule
from maintain.scenario_matrix import VLLM, answer_of

FILE = Path(__file__).parents[2] / "docs/released.json"
STEPS = 20_000  # minimum number of engine steps for each pair (connector, vLLM)
ASKED = 5  # maximum number of seeds to try for each kind of finding
NEWER = Path("requirements/vllm-python-only.txt")  # releases of vLLM that are newer than the installed release
#: {connector of the lab: newest LMCache release for this connector}
CONNECTORS = {"v1": "0.5.6", "mp": "0.5.6", "mp-in-tree": "0.4.6"}


@dataclass(frozen=True)
class Row:
    """Findings of one rule with the same fixes. seed: lowest seed that shows the fixes. message: an example."""

    rule: str
    fixes: list[str]  # each fix without which the findings appear. []: several fixes each prevent the findings
    findings: int
    seed: int
    message: str


@dataclass(frozen=True)
class Found:
    """The findings of a connector. with_fixes: how many kinds of findings the same seeds show with all fixes."""

    connector: str
    versions: dict[str, str]
    steps: int
    seeds: int
    with_fixes: int
    rows: list[Row]


def load() -> list[Found]:
    return msgspec.json.decode(FILE.read_bytes(), type=list[Found])


def look(connector: str, steps: int) -> Found:
    from kvfix_tools.lab.fuzz import fuzz_run

    run = fuzz_run.Run(connector, fixes=False)
    done, of_seed = fuzz_run.Tally(), []
    while done.steps < steps:
        for seed in range(done.seeds, done.seeds + fuzz_run.BATCH):
            played = run.play(range(seed, seed + 1), math.inf)
            of_seed.append(played.found)
            done.add(played)

    @cache
    def shown(seed: int) -> dict[str, list[tuple[str, str]]]:
        return without_each(*run.schedules([seed]))

    rows: dict[tuple[str, tuple[str, ...]], Row] = {}
    for signature, (times, seed, rule, message) in sorted(done.found.items(), key=lambda item: -item[1][0]):
        seeds = [seed for seed, found in enumerate(of_seed) if signature in found][:ASKED]
        named = ((each, fixes_of(rule, signature, shown(each))) for each in seeds)
        seed, fixes = next((each for each in named if each[1]), (seed, []))
        row = Row(rule, fixes, 0, seed, message)
        before = rows.get((rule, tuple(fixes)), row)
        first = min(before, row, key=lambda row: row.seed)
        rows[rule, tuple(fixes)] = replace(first, findings=before.findings + times)
    fixed = fuzz_run.fuzz(fuzz_run.Run(connector, fixes=True), range(done.seeds), math.inf, shrinking=0)
    ordered = sorted(rows.values(), key=lambda row: (row.rule, -row.findings, row.fixes))
    return Found(connector, releases.versions(), done.steps, done.seeds, len(fixed.violations), ordered)


def without_each(drawn: Schedule) -> dict[str, list[tuple[str, str]]]:
    """For each fix, play these steps with all other fixes. Return {fix: [(rule, signature) of each finding]}."""
    from kvfix_tools.lab.fuzz.fuzz import play, signature

    mine = [fix for fix in catalogue.fixes() if fix.fixable and fix.code in runner.played()]
    shown = {}
    with runner.applied(True):
        play(drawn)  # imports the modules that the fixes change
        done = {target for target, outcome in session.outcomes.items() if outcome.state == "applied"}
    here = [fix.code for fix in mine if done.intersection(fix.targets)]
    for left_out in here:
        with runner.applied(True, only=[code for code in here if code != left_out]):
            shown[left_out] = [(found.code, signature(found)) for found in play(drawn).violations]
    return shown


def fixes_of(rule: str, signature: str, without: dict[str, list[tuple[str, str]]]) -> list[str]:
    """Return each fix without which the steps show this kind of finding. If no fix matches, compare only the rule."""
    exact = [code for code, shown in without.items() if (rule, signature) in shown]
    return exact or [code for code, shown in without.items() if any(each == rule for each, _ in shown)]


def answer(connector: str) -> None:
    runner.prepare(str(Path(".cache/lmcache") / CONNECTORS[connector]))
    print(msgspec.json.encode(look(connector, STEPS)).decode())


def main(connectors: Annotated[Names, typer.Argument()] = None) -> None:
    pythons = {"": Path(sys.executable)}
    pythons |= {release: VLLM / release / "bin/python" for release in NEWER.read_text().split()}
    known = {(run.connector, run.versions["vllm"]): run for run in (load() if FILE.exists() else [])}
    for connector in connectors or CONNECTORS:
        for release, python in pythons.items():
            print(f"{connector}, vLLM {release or 'installed here'}", file=sys.stderr)
            code = f"from maintain import released_findings as it; it.answer({connector!r})"
            run = msgspec.convert(answer_of(python, code), Found)
            known[connector, run.versions["vllm"]] = run
            order = list(CONNECTORS)
            runs = [known[each] for each in sorted(known, key=lambda each: (order.index(each[0]), each[1]))]
            FILE.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")
