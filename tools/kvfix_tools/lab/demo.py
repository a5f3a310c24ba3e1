"""`make demo`: play LMCache issue 2158 on the real scheduler, without kvfix and with kvfix.apply().

    python -m kvfix_tools.lab.demo [--lmcache-path DIR] [--json]

Exit code 0: without kvfix, the engine dies as in the issue. With kvfix, the request finishes and no token is loaded.
Exit code 1: one of the two results is missing. Exit code 2: vLLM is missing, or DIR has no LMCache.
"""

import json as jsonlib
import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from kvfix.ledger import events as ev
from kvfix_tools.lab import releases, runner
from kvfix_tools.lab.runner import Result
from kvfix_tools.lab.scenario import Scenario, find
from kvfix_tools.lab.scenarios.lookups import LONG


def main(lmcache_path: Path = Path(".cache/lmcache/0.3.10"), json: bool = False) -> None:
    scenario = find("mismatch-in-tokens-to-load")
    assert scenario is not None
    try:
        runner.prepare(str(lmcache_path))
    except ValueError as error:
        print(f"kvfix demo: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print("importing vLLM and LMCache (takes about 15 s) ...", file=sys.stderr)
    both = released, fixed = [_play(scenario, fixes) for fixes in (False, True)]
    if json:
        rows = [{**each.as_json(), "story": [f"step {step}: {it.text()}" for step, it in each.log]} for each in both]
        print(jsonlib.dumps(rows, indent=2))
    else:
        show(released, fixed)
    raise typer.Exit(0 if died_as_reported(released) and finished(fixed) else 1)


def _play(scenario: Scenario, fixes: bool) -> Result:
    done = runner.play(scenario, fixes)
    return done._replace(log=[(step, event) for step, event in done.log if event.request in (LONG, "")])


def died_as_reported(result: Result) -> bool:
    return result.outcome == "violated" and isinstance(result.log[-1][1], ev.Raised)


def finished(result: Result) -> bool:
    events = [event for _, event in result.log]
    loaded = sum(event.tokens for event in events if isinstance(event, ev.Loaded))
    return result.outcome == "clean" and loaded == 0 and any(isinstance(event, ev.Finished) for event in events)


def show(released: Result, fixed: Result) -> None:
    installed = releases.versions()
    console = Console()
    console.print(
        f"\n[bold]LMCache {installed['lmcache']} in the scheduler of vLLM {installed['vllm']}[/]: 10,009 prompt tokens,"
        " block 16, chunk 256.\nvLLM preempts the request with 336 tokens computed, 256 stored. (LMCache issue 2158)\n"
    )
    table = Table("step", "as released", "with kvfix.apply()", header_style="bold", show_lines=False, expand=True)
    table.columns[1].ratio = table.columns[2].ratio = 1
    cells = [_cells(released), _cells(fixed)]
    for step in sorted({step for each in cells for step in each}):
        table.add_row(str(step), *("\n".join(each.get(step, ())) for each in cells), end_section=True)
    console.print(table)
    ending = "[bold red]EngineCore is dead.[/]" if died_as_reported(released) else "EngineCore did not die as reported."
    console.print(f"As released: {ending}")
    for _, event in released.log:
        if isinstance(event, ev.Raised):  # do not fold the message, so that a user can search for it
            console.print(f"    {event.error}", soft_wrap=True, markup=False, highlight=False)
    good = "[bold green]vLLM finishes the request, and LMCache loads no token.[/]"
    console.print(f"With kvfix.apply(): {good if finished(fixed) else '[bold red]not fixed.[/]'}")
    for other in fixed.also:
        console.print(f"The run with kvfix also shows another bug of this release: {other}", style="dim")


def _cells(result: Result) -> dict[int, list[str]]:
    """Return {step: lines of the step's cell}. Omit leaks (`Left`), which `show` prints only for the run with kvfix."""
    cells: dict[int, list[str]] = {}
    for step, event in result.log:
        if not isinstance(event, ev.Left):
            text = f"{event.where} raises the error below" if isinstance(event, ev.Raised) else event.text()
            marked = f"[red]{text}[/]" if " raises " in text or ", but hit " in text else text
            cells.setdefault(step, []).append(marked)
    return cells


if __name__ == "__main__":
    typer.run(main)
