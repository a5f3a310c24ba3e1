"""`kvfix explain`: print the text of a fix (KVF), a rule (KVR, LAB), or a known problem that logs can show (KVD)."""

import functools
import inspect
import json as jsonlib
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from rich.console import Console
from rich.markdown import Markdown

from kvfix import catalogue
from kvfix.fixes import RETIRED
from kvfix.fixes.record import Fix
from kvfix_tools import screen
from kvfix_tools.diagnose.problems import Problem, knowledge
from kvfix_tools.diagnose.problems import catalogue as known_problems
from kvfix_tools.lab.engine import rules as lab_rules
from kvfix_tools.lab.scenario import scenarios
from kvfix_tools.ledger import RULES, Rule


class Entry(NamedTuple):
    """The explanation of one code. facts: printed with --json. text: printed without --json."""

    code: str
    name: str
    facts: dict[str, Any]
    text: str
    is_markdown: bool = False


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Return every entry. A fix comes before a known problem of the same name."""
    of_rules = (*map(_of_rule, RULES), *map(_of_rule, lab_rules.RULES))
    return *map(_of_fix, catalogue.fixes()), *of_rules, *map(_of_problem, known_problems())


def explain(name: str, json: bool) -> int:
    named = (each for each in entries() if name.upper() == each.code or name.lower() == each.name)
    found, code = next(named, None), name.upper()
    retired = RETIRED.get(code) or knowledge().retired.get(code)  # kvfix never uses a retired code again
    if found is None and retired:
        found = Entry(code, "", {"code": code, "retired": retired}, f"{code} is retired: {retired}.")
    if found is None:
        guess = screen.did_you_mean(name, (each.name for each in entries()))
        return screen.error(f"kvfix explain: no fix, rule or finding is called {name!r}.{guess}")
    if json:
        print(jsonlib.dumps(found.facts, indent=2))
    elif found.is_markdown and sys.stdout.isatty():
        Console().print(Markdown(f"# {found.text}"))
    else:
        print(found.text)
    return 0


def _of_fix(fix: Fix) -> Entry:
    sections = {section.lower().replace(" ", "_"): fix.section(section) for section in fix.sections}
    targets = [{"dist": target.dist, "target": target.name, "broken": target.broken} for target in fix.targets]
    facts = {"code": fix.code, "slug": fix.slug, "title": fix.title, **sections, "targets": targets}
    return Entry(fix.code, fix.slug, facts, f"{fix.code} {fix.slug}\n\n{(fix.doc or '').strip()}", is_markdown=True)


def _of_rule(rule: Rule | lab_rules.LabRule) -> Entry:
    doc = inspect.cleandoc(rule.doc)
    shown = {code for scenario in scenarios() if scenario.rule == rule.code for code in scenario.fixes}
    fixes = sorted(shown.union(fix.code for fix in catalogue.handling(rule.code)))
    text = _joined(f"{rule.code} {rule.name}", doc, _listed("Fixes for violations of this rule:", _named(fixes)))
    return Entry(rule.code, rule.name, {"code": rule.code, "name": rule.name, "doc": doc, "fixes": fixes}, text)


def _of_problem(problem: Problem) -> Entry:
    first = catalogue.find(problem.fixes[0]) if problem.fixes else None
    cause = problem.why or (" ".join(first.section("Cause").split()) if first else "")
    facts = {
        "code": problem.code, "name": problem.name, "severity": problem.severity.name.lower(), "title": problem.title,
        "shows": list(problem.signs), "cause": cause, "first": problem.first, "do_now": problem.do,
        "for_good": problem.permanent, "normal": problem.normal, "connectors": list(problem.connectors),
        "releases": dict(problem.releases), "fixed": dict(problem.fixed_in), "sure": problem.certain,
        "threads": list(problem.threads), "fixes": list(problem.fixes), "setting": problem.do, "good": problem.for_good,
    }  # fmt: skip
    sections = {"Cause": cause, "First": problem.first, "Do now": problem.do, "For good": problem.permanent}
    sections["Normal"] = problem.normal
    text = _joined(
        f"{problem.code} {problem.name} ({problem.severity.word}, found in logs by kvfix-diagnose)",
        problem.title,
        _listed("Shows as:", problem.signs),
        *(f"{name}: {section}" for name, section in sections.items() if section),
        _listed("Reports:", problem.threads),
        _listed("Fixes:", _named(problem.fixes)),
    )
    return Entry(problem.code, problem.name, facts, text)


def _joined(*paragraphs: str) -> str:
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _listed(heading: str, lines: Iterable[str]) -> str:
    listed = [f"  {line}" for line in lines]
    return "\n".join([heading, *listed]) if listed else ""


def _named(codes: Iterable[str]) -> list[str]:
    return [f"{code} {fix.slug if (fix := catalogue.find(code)) else ''}" for code in codes]
