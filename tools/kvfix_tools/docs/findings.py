"""A page for each finding of kvfix-diagnose, from its docstring and the fixes that it names; and their list."""

from __future__ import annotations

from kvfix import fix
from kvfix_tools.diagnose import findings
from kvfix_tools.diagnose.findings import Rule
from kvfix_tools.docs import errors
from kvfix_tools.docs.fixes import wrong_in
from kvfix_tools.docs.markdown import link, prose, table


def pages() -> dict[str, str]:
    rules = findings.catalogue()
    return {"findings/index.md": _index(), **{f"findings/{each.code.lower()}.md": _page(each) for each in rules}}


def _page(rule: Rule) -> str:
    fixes = [found for each in rule.fixes if (found := fix.find(each)) is not None]
    cause = rule.section("Cause") or "\n\n".join(
        f"{prose(found.section('Cause'))}\n\n({link(found.code)})" for found in fixes[:1]
    )
    messages = "\n".join(f"    {text}" for text in errors.of_finding(rule))
    cured = table(
        ("fix", "", "wrong in"),
        [(link(found.code), f"{found.slug}: {found.title}", wrong_in(found)) for found in fixes],
    )
    sections = {
        "In the log": f"{messages}\n" if messages else "",
        "Cause": cause,
        "Cured by": f"{cured}\n`kvfix run -- CMD`, or `kvfix.apply()` before vLLM is launched.\n" if fixes else "",
        "Setting that avoids it": rule.section("Setting"),
        "Normal": rule.section("Normal"),
    }
    told = "\n".join(f"## {name}\n\n{text}\n" for name, text in sections.items() if text)
    return f"# {rule.code} {rule.name}\n\n**{rule.title}** ({rule.severity.word})\n\n{told}"


def _index() -> str:
    rows = [(link(rule.code), rule.name, rule.severity.word, rule.title) for rule in findings.catalogue()]
    return (
        "# Findings\n\nWhat [kvfix-diagnose](../diagnose.md) finds in a log. KVR codes that it shows beside these are "
        f"[rules](../rules/index.md) that a line breaks and no finding explains.\n\n"
        f"{table(('code', 'finding', 'severity', 'what'), rows)}"
    )
