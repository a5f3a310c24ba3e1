"""`kvfix lab`: the bugs on the real scheduler, without a GPU."""

from __future__ import annotations

import json as jsonlib
import sys
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

from kvfix_tools.lab import runner
from kvfix_tools.lab.scenario import Scenario, find, scenarios

app = typer.Typer(
    help="The bugs on the real vLLM scheduler and LMCache's real connectors, without a GPU.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
LMCachePath = Annotated[
    Optional[str],  # noqa: UP045  typer reads it at run time
    typer.Option(metavar="DIR", help="Folder with another LMCache release (pip install --no-deps --target DIR ...)."),
]


@app.command("list")
def list_scenarios(json: Json = False) -> None:
    """Every scenario: what it shows, on which releases, and which fix cures it."""
    if json:
        rows = [
            {"slug": s.slug, "title": s.title, "fixes": s.fixes, "rule": s.rule, "wrong": s.wrong} for s in scenarios()
        ]
        print(jsonlib.dumps(rows, indent=2))
        return
    table = Table("scenario", "cured by", "violated on", "what happens", box=None, pad_edge=False, header_style="bold")
    for scenario in scenarios():
        wrong = ", ".join(f"{dist} {releases}" for dist, releases in scenario.wrong.items())
        table.add_row(scenario.slug, " ".join(scenario.fixes), wrong, scenario.title)
    Console().print(table)


@app.command("run")
def run_scenarios(
    slugs: Annotated[Optional[list[str]], typer.Argument(metavar="SLUG...")] = None,  # noqa: UP045
    every: Annotated[bool, typer.Option("--all", help="All scenarios.")] = False,
    fixes: Annotated[bool, typer.Option(help="With the fixes of kvfix, or as released.")] = True,
    lmcache_path: LMCachePath = None,
    json: Json = False,
) -> None:
    """Play scenarios on what is installed. Exit 1 if one is violated."""
    wanted = _wanted(slugs or [], every)
    try:
        runner.prepare(lmcache_path)
    except ValueError as error:
        print(f"kvfix lab run: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    results = []
    for scenario in wanted:
        if sys.stderr.isatty():
            print(f"\r{scenario.slug:60}", end="\r", file=sys.stderr)
        results.append(runner.play(scenario, fixes))
    if json:
        print(jsonlib.dumps([result.as_json() for result in results], indent=2))
    else:
        _print(wanted, results)
    raise typer.Exit(int(any(result.outcome == "violated" for result in results)))


def _wanted(slugs: list[str], every: bool) -> list[Scenario]:
    if every:
        return list(scenarios())
    found = [(slug, find(slug)) for slug in slugs]
    unknown = [slug for slug, scenario in found if scenario is None]
    if unknown or not found:
        known = ", ".join(scenario.slug for scenario in scenarios())
        what = f"no scenario {', '.join(unknown)}" if unknown else "name a scenario, or --all"
        print(f"kvfix lab run: {what}; known: {known}", file=sys.stderr)
        raise typer.Exit(2)
    return [scenario for _, scenario in found if scenario is not None]


def _print(wanted: list[Scenario], results: list[runner.Result]) -> None:
    installed = ", ".join(f"{dist} {version}" for dist, version in runner.versions().items())
    table = Table(box=None, pad_edge=False, header_style="bold", title=f"{installed}", title_justify="left")
    for heading in ("scenario", "outcome", "expected as released", "message"):
        table.add_column(heading, overflow="fold")
    for scenario, result in zip(wanted, results, strict=True):
        style = {"violated": "[red]", "clean": "[green]"}.get(result.outcome, "[yellow]")
        text = result.message + "".join(f"\nalso: {other}" for other in dict.fromkeys(result.also))
        table.add_row(result.slug, style + result.outcome, runner.expected(scenario), text)
    Console().print(table)
