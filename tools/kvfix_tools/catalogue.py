"""`kvfix status` and `kvfix explain`: the catalogue of fixes, of rules and of findings, shown."""

from __future__ import annotations

import inspect
import json as jsonlib
import sys
from importlib import import_module

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

import kvfix
from kvfix import cures, fix, verdict
from kvfix.ledger import RULES, Rule
from kvfix_tools import screen
from kvfix_tools.diagnose import findings

#: Verdicts that ask for somebody's attention. (`applied` is said by a process in which kvfix is active.)
FINDINGS = ("failed", "unknown", "applicable")

NOTHING_HERE = """
Neither vLLM nor LMCache is installed for this Python. Run it where the engine runs (in its container, with its Python).
What can be done here: kvfix-diagnose LOG, kvfix explain CODE, kvfix upstream list, kvfix status --released"""

_STYLES = {"failed": "bold red", "unknown": "yellow", "applicable": "red", "applied": "green"}


def status(json: bool, probe: bool) -> int:
    """Print a row for each fix and distribution. 1 if one of them is a finding, 2 if kvfix itself has no fixes."""
    rows = verdict.survey(_probed) if probe else kvfix.status()
    if not rows:
        print(f"kvfix status: this installation of kvfix has no fixes. {fix.ANEW}", file=sys.stderr)
        return 2
    if json:
        print(jsonlib.dumps([row._asdict() for row in rows], indent=2))
    else:
        _print_rows(rows)
        if all(row.verdict == "not-installed" for row in rows):
            print(NOTHING_HERE)
    return int(any(row.verdict in FINDINGS for row in rows))


def _probed(patch: fix.Patch) -> verdict.Verdict:
    """The verdict by the behaviour probe too, which needs the module imported. Only unknown code is worth that."""
    by_file = verdict.judge(patch)
    if by_file.verdict != "unknown":
        return by_file
    try:
        return verdict.judge_live(patch, import_module(patch.module))
    except Exception as error:  # noqa: BLE001
        return verdict.Verdict("unknown", f"{patch.module} cannot be imported: {type(error).__name__}: {error}")


def _print_rows(rows: list[verdict.Row]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("code", "fix", "installed", "verdict", "reason"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("code", "verdict"))
    for row in rows:
        style = _STYLES.get(row.verdict, "")
        shown = f"[{style}]{row.verdict}[/]" if style else row.verdict
        table.add_row(row.code, row.slug, f"{row.dist} {row.version}".strip(), shown, row.reason)
    console = screen.console()
    console.print(table)
    if any(row.verdict == "failed" for row in rows):
        console.print("\nFailed: kvfix explain CODE says what can be done about it.", markup=False)
    if any(row.verdict == "applicable" for row in rows):
        console.print("\nApplicable: this installation has the bug. Call kvfix.apply() before launching vLLM, or set")
        console.print("KVFIX=fix in its environment, or start it with: kvfix run -- CMD", markup=False)


def explain(name: str, json: bool) -> int:
    """Print one fix, one rule of the ledger, or one finding of kvfix-diagnose. 2 if there is none of this name."""
    rule = next((rule for rule in RULES if name.upper() == rule.code or name.lower() == rule.name), None)
    if rule is not None:
        return _explain_rule(rule, json)
    found = fix.find(name)
    told = findings.find(name)
    if found is None and told is not None:  # some have the name of their fix
        return _explain_finding(told, json)
    if found is None:
        known = ", ".join([f"{each.code} ({each.slug})" for each in fix.catalogue()])
        rules = ", ".join(f"{rule.code} ({rule.name})" for rule in RULES)
        logs = ", ".join(f"{each.code} ({each.name})" for each in findings.catalogue())
        print(
            f"kvfix explain: there is no fix, no rule and no finding {name!r}; known: {known}, {rules}, {logs}",
            file=sys.stderr,
        )
        return 2
    if json:
        sections = {section.lower().replace(" ", "_"): found.section(section) for section in found.sections}
        targets = [{"dist": patch.dist, "target": patch.target, "broken": patch.broken} for patch in found.patches]
        text = {"code": found.code, "slug": found.slug, "title": found.title, **sections, "targets": targets}
        print(jsonlib.dumps(text, indent=2))
    elif sys.stdout.isatty():
        Console().print(Markdown(f"# {found.code} {found.slug}\n\n{found.doc}"))
    else:
        print(f"{found.code} {found.slug}\n\n{(found.doc or '').strip()}")
    return 0


def _explain_rule(rule: Rule, json: bool) -> int:
    fixes = dict.fromkeys(code for known, _, codes in cures.CURES if known == rule.code for code in codes)
    doc = inspect.cleandoc(rule.doc)
    if json:
        print(jsonlib.dumps({"code": rule.code, "name": rule.name, "doc": doc, "fixes": list(fixes)}, indent=2))
        return 0
    print(f"{rule.code} {rule.name}\n\n{doc}")
    _print_fixes("Fixes that cure violations of it:", list(fixes))
    return 0


def _explain_finding(finding: findings.Rule, json: bool) -> int:
    """Cause, what avoids it, what looks like it. A cause that the finding does not tell is that of its first fix."""
    first = fix.find(finding.fixes[0]) if finding.fixes else None
    cause = finding.section("Cause") or (" ".join(first.section("Cause").split()) if first else "")
    sections = {"Cause": cause, "Setting": finding.section("Setting"), "Normal": finding.section("Normal")}
    if json:
        told = {section.lower(): text for section, text in sections.items() if text}
        whole = {"code": finding.code, "name": finding.name, "severity": finding.severity.name.lower()}
        print(jsonlib.dumps({**whole, "title": finding.title, **told, "fixes": list(finding.fixes)}, indent=2))
        return 0
    print(
        f"{finding.code} {finding.name} ({finding.severity.word}, found in logs by kvfix-diagnose)\n\n{finding.title}"
    )
    for section, text in sections.items():
        if text:
            print(f"\n{section}: {text}")
    _print_fixes("Fixes:", list(finding.fixes))
    return 0


def _print_fixes(heading: str, codes: list[str]) -> None:
    if codes:
        print(f"\n{heading}")
    for code in codes:
        found = fix.find(code)
        print(f"  {code} {found.slug if found else ''}")
