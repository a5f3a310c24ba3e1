"""`kvfix status`: which fixes this installation needs, has, or does not need."""

from __future__ import annotations

import json as jsonlib
import sys
from collections import Counter
from importlib import import_module

from rich.table import Table

import kvfix
from kvfix import applicability, catalogue, fix_status
from kvfix.fixes.api import Target
from kvfix_tools import screen

#: These need action. (`applied` is reported by a process in which kvfix is active.)
FINDINGS = ("refused", "unknown", "unfixable", "applicable")
SHOWN = (*FINDINGS, "applied")

NOTHING_HERE = """
Neither vLLM nor LMCache is installed for this Python. Run it where the engine runs (in its container, with its Python).
What can be done here: kvfix-diagnose LOG, kvfix explain CODE, kvfix upstream list, kvfix status --released"""

_STYLES = {"refused": "bold red", "unfixable": "bold red", "unknown": "yellow", "applicable": "red", "applied": "green"}


def status(json: bool, probe: bool, everything: bool = False) -> int:
    """Print a row for each fix and distribution. 1 if one of them is a finding, 2 if kvfix itself has no fixes."""
    rows = fix_status.rows(_probed) if probe else kvfix.status()
    if not rows:
        print(f"kvfix status: this installation of kvfix has no fixes. {catalogue.REINSTALL}", file=sys.stderr)
        return 2
    if json:
        print(jsonlib.dumps([row._asdict() for row in rows], indent=2))
    else:
        _print_rows(rows, everything)
        if all(row.verdict == "not-installed" for row in rows):
            print(NOTHING_HERE)
    return int(any(row.verdict in FINDINGS for row in rows))


def _probed(patch: Target) -> applicability.Applicability:
    """The verdict by the behaviour probe too, which needs the module imported. Only unknown code is worth that."""
    by_file = applicability.judge(patch)
    if by_file.state != "unknown":
        return by_file
    try:
        return applicability.judge_live(patch, import_module(patch.module))
    except Exception as error:  # noqa: BLE001
        return applicability.Applicability(
            "refused", f"{patch.module} cannot be imported: {type(error).__name__}: {error}"
        )


def _print_rows(rows: list[fix_status.FixRow], everything: bool) -> None:
    """What needs action first; of the rows that need nothing a count, unless everything is wanted."""
    shown = sorted(
        (row for row in rows if everything or row.verdict in SHOWN),
        key=lambda row: applicability.STATES.index(row.verdict),
    )
    counts = Counter(row.verdict for row in rows if row not in shown)
    console = screen.console()
    if shown:
        console.print(_table(shown))
    if counts:
        listed = ", ".join(f"{counts[verdict]} {verdict}" for verdict in applicability.STATES if counts[verdict])
        console.print(f"{'and ' if shown else ''}{listed} (kvfix status --all lists them)", markup=False)
    if any(row.verdict == "refused" for row in rows):
        console.print("\nRefused: nothing of this fix is applied. Look for a newer release of kvfix.", markup=False)
    if any(row.verdict == "unfixable" for row in rows):
        console.print("\nUnfixable: kvfix explain CODE gives the workaround.", markup=False)
    if any(row.verdict == "applicable" for row in rows):
        console.print("\nApplicable: this installation has the bug. Call kvfix.apply() before launching vLLM, or set")
        console.print("KVFIX=fix in its environment, or start it with: kvfix run -- CMD", markup=False)


def _table(rows: list[fix_status.FixRow]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("code", "fix", "installed", "status", "reason"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("code", "status"))
    for row in rows:
        style = _STYLES.get(row.verdict, "")
        verdict = f"[{style}]{row.verdict}[/]" if style else row.verdict
        table.add_row(row.code, row.slug, f"{row.dist} {row.version}".strip(), verdict, row.reason)
    return table
