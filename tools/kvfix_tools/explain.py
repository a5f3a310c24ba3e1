"""`kvfix explain`: print the text of a fix (KVF), a rule (KVR, LAB), a finding in logs or a known problem (KVD)."""

from __future__ import annotations

import inspect
import json as jsonlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.markdown import Markdown

from kvfix import catalogue
from kvfix.fixes.record import Fix
from kvfix.retired import RETIRED
from kvfix_tools import screen
from kvfix_tools.diagnose import findings
from kvfix_tools.diagnose.problems import Problem, knowledge
from kvfix_tools.diagnose.problems import catalogue as known_problems
from kvfix_tools.lab.engine import rules as lab_rules
from kvfix_tools.lab.scenario import scenarios
from kvfix_tools.ledger import RULES, Rule


class Entry(NamedTuple):
    """The explanation of one code. facts: for --json. text: for people."""

    code: str
    name: str
    facts: dict[str, Any]
    text: str
    is_markdown: bool = False


def entries() -> Iterator[Entry]:
    """Yield every entry. A fix comes before a finding of the same name."""
    return (make() for _, _, make in _known())


def _known() -> Iterator[tuple[str, str, Callable[[], Entry]]]:
    """Yield (code, name, function that makes the entry)."""
    yield from ((each.code, each.slug, partial(_of_fix, each)) for each in catalogue.fixes())
    yield from ((each.code, each.name, partial(_of_rule, each)) for each in RULES)
    yield from ((each.code, each.name, partial(_of_rule, each)) for each in lab_rules.RULES)
    yield from ((each.code, each.name, partial(_of_finding, each)) for each in findings.catalogue())
    yield from ((each.code, each.name, partial(_of_problem, each)) for each in known_problems())


def explain(name: str, json: bool) -> int:
    """Print the entry with this code or name. Return 2 if there is none."""
    makes = (make for code, known, make in _known() if name.upper() == code or name.lower() == known)
    found = next((make() for make in makes), None) or _of_retired(name.upper())
    if found is None:
        guess = screen.did_you_mean(name, (known for _, known, _ in _known()))
        print(f"kvfix explain: no fix, rule or finding is called {name!r}.{guess}", file=sys.stderr)
        return 2
    if json:
        print(jsonlib.dumps(found.facts, indent=2))
    elif found.is_markdown and sys.stdout.isatty():
        Console().print(Markdown(f"# {found.text}"))
    else:
        print(found.text)
    return 0


def _of_retired(code: str) -> Entry | None:
    """Return the entry of a code that is never used again; None if this code is not retired."""
    why = RETIRED.get(code) or knowledge().retired.get(code)
    return Entry(code, "", {"code": code, "retired": why}, f"{code} is retired: {why}.") if why else None


def _of_fix(fix: Fix) -> Entry:
    sections = {section.lower().replace(" ", "_"): fix.section(section) for section in fix.sections}
    targets = [{"dist": target.dist, "target": target.name, "broken": target.broken} for target in fix.targets]
    facts = {"code": fix.code, "slug": fix.slug, "title": fix.title, **sections, "targets": targets}
    return Entry(fix.code, fix.slug, facts, f"{fix.code} {fix.slug}\n\n{(fix.doc or '').strip()}", is_markdown=True)


def _of_rule(rule: Rule | lab_rules.LabRule) -> Entry:
    doc = inspect.cleandoc(rule.doc)
    shown = {code for scenario in scenarios() if scenario.rule == rule.code for code in scenario.fixes}
    fixes = sorted(shown.union(fix.code for fix in catalogue.handling(rule.code)))
    text = f"{rule.code} {rule.name}\n\n{doc}{_fix_list('Fixes for violations of it:', fixes)}"
    return Entry(rule.code, rule.name, {"code": rule.code, "name": rule.name, "doc": doc, "fixes": fixes}, text)


def _of_finding(finding: findings.LogRule) -> Entry:
    """Return the entry of a finding. If the finding has no cause of its own, use the cause of its first fix."""
    first = catalogue.find(finding.fixes[0]) if finding.fixes else None
    cause = finding.section("Cause") or (" ".join(first.section("Cause").split()) if first else "")
    sections = {"Cause": cause, **{name: finding.section(name) for name in ("First", "Setting", "Good", "Normal")}}
    facts = {"code": finding.code, "name": finding.name, "severity": finding.severity.name.lower()}
    facts |= {"title": finding.title, **{name.lower(): text for name, text in sections.items() if text}}
    head = f"{finding.code} {finding.name} ({finding.severity.word}, found in logs by kvfix-diagnose)"
    paragraphs = [head, finding.title, *(f"{name}: {text}" for name, text in sections.items() if text)]
    text = "\n\n".join(paragraphs) + _fix_list("Fixes:", finding.fixes)
    return Entry(finding.code, finding.name, {**facts, "fixes": list(finding.fixes)}, text)


def _of_problem(problem: Problem) -> Entry:
    facts = {
        "code": problem.code, "name": problem.name, "severity": problem.severity.name.lower(), "title": problem.title,
        "shows": list(problem.signs), "cause": problem.cause, "do_now": problem.now, "for_good": problem.for_good,
        "connectors": list(problem.connectors), "releases": dict(problem.releases), "fixed": dict(problem.fixed),
        "sure": problem.sure, "threads": list(problem.threads),
    }  # fmt: skip
    head = f"{problem.code} {problem.name} ({problem.severity.word}, found in logs by kvfix-diagnose)"
    paragraphs = [
        head,
        problem.title,
        "Shows as:\n" + "\n".join(f"  {sign}" for sign in problem.signs),
        f"Cause: {problem.cause}",
        f"Do now: {problem.now}",
        *([f"For good: {problem.for_good}"] if problem.for_good else []),
        *(["Reports:\n" + "\n".join(f"  {thread}" for thread in problem.threads)] if problem.threads else []),
    ]
    return Entry(problem.code, problem.name, facts, "\n\n".join(paragraphs))


def _fix_list(heading: str, codes: Iterable[str]) -> str:
    """Return a list of fixes by code and slug, or "" without any."""
    lines = [f"  {code} {fix.slug if (fix := catalogue.find(code)) else ''}" for code in codes]
    return "\n".join(["\n", heading, *lines]) if lines else ""
