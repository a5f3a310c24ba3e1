"""The table of the fuzzer's findings as released, from docs/released.json (`python -m maintain.released_findings`)."""

from __future__ import annotations

from itertools import groupby

from maintain import released_findings
from maintain.documentation.markdown import link, links, table
from maintain.released_findings import Found

#: Shown in place of the fixes if a row has none.
_TOGETHER = "more than one"


def text() -> str:
    runs = released_findings.load()
    return "\n".join(_of_connector(name, list(its)) for name, its in groupby(runs, key=lambda run: run.connector))


def _of_connector(name: str, runs: list[Found]) -> str:
    by_release = {run.versions["vllm"]: {(row.rule, *row.fixes): row for row in run.rows} for run in runs}
    rows = []
    for rule, *fixes in sorted({key for its in by_release.values() for key in its}):
        found = [its.get((rule, *fixes)) for its in by_release.values()]
        cells = [cell for row in found for cell in ((f"{row.findings}", f"{row.seed}") if row else ("-", "-"))]
        rows.append((link(rule, up=""), links(fixes, up="") or _TOGETHER, *cells))
    heads = [head for release in by_release for head in (f"vLLM {release}", "seed")]
    played = "\n".join(
        f"- vLLM {run.versions['vllm']}, LMCache {run.versions['lmcache']}: {run.steps} steps of "
        f"{run.seeds} seeds; with the fixes {f'{run.with_fixes} kinds of findings' if run.with_fixes else 'clean'}"
        for run in runs
    )
    return f"## {name}\n\n{played}\n\n{table(('rule', 'fix', *heads), rows)}"
