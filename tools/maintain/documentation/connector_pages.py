"""Make pages about vLLM's connectors: the rules and verdicts of `kvfix conform`, and the findings of the fuzzer."""

from itertools import groupby

from kvfix_tools.conform.scenarios import NEEDS, SCENARIOS
from kvfix_tools.conform.verdicts import RULES, SLUGS, Rule
from maintain import connectors as kit
from maintain import released_findings
from maintain.documentation.markdown import link, links, prose, table
from maintain.released_findings import Found

_WORDS = {"ok": "ok", "violated": "**violated**", "not applicable": "-"}


def contract() -> str:
    return "\n".join(_of_rule(rule) for rule in RULES)


def _of_rule(rule: Rule) -> str:
    rows = [
        (f"`{each.name}`", each.title, "; ".join(NEEDS[need].partition(":")[0] for need in each.needs))
        for each in SCENARIOS
        if each.rule == rule.slug
    ]
    played = table(("scenario", "what happens", "not played if"), rows) if rows else ""
    codes = f"In any scenario, {links(rule.codes, up='')} shows a violation.\n\n" if rule.codes else ""
    return f"## {rule.slug}\n\n**{rule.title}.** {prose(rule.doc)}\n\n{codes}{played}"


def connector() -> str:
    return f"```python\n{kit.FILE.with_name('folder_connector.py').read_text()}```"


def connectors() -> str:
    runs = kit.load()
    can = [run for run in runs if not run.cannot]
    headings = ("rule", *(run.name for run in can))
    rows = [(f"[{slug}](contract.md#{slug})", *(_WORDS[run.verdicts[slug]] for run in can)) for slug in SLUGS]
    loads = ("tokens loaded", *(f"{run.loaded}" for run in can))
    notes = "".join(f"- {run.name}: {run.note}\n" for run in runs if run.note)
    cannot = table(("connector", "cannot be run here"), [(run.name, run.cannot) for run in runs if run.cannot])
    return f"vLLM {kit.version()}\n\n{table(headings, [*rows, loads])}\n{notes}\n{cannot}"


def released() -> str:
    runs = released_findings.load()
    return "\n".join(_of_connector(name, list(its)) for name, its in groupby(runs, key=lambda run: run.connector))


def _of_connector(name: str, runs: list[Found]) -> str:
    by_release = {run.versions["vllm"]: {(row.rule, *row.fixes): row for row in run.rows} for run in runs}
    rows = []
    for rule, *fixes in sorted({key for its in by_release.values() for key in its}):
        found = [its.get((rule, *fixes)) for its in by_release.values()]
        cells = [cell for row in found for cell in ((f"{row.findings}", f"{row.seed}") if row else ("-", "-"))]
        rows.append((link(rule, up=""), links(fixes, up="") or "more than one", *cells))
    heads = [head for release in by_release for head in (f"vLLM {release}", "seed")]
    played = "\n".join(
        f"- vLLM {run.versions['vllm']}, LMCache {run.versions['lmcache']}: {run.steps} steps of "
        f"{run.seeds} seeds; with the fixes {f'{run.with_fixes} kinds of findings' if run.with_fixes else 'clean'}"
        for run in runs
    )
    return f"## {name}\n\n{played}\n\n{table(('rule', 'fix', *heads), rows)}"
