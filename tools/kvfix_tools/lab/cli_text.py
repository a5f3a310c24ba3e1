"""The text output of `kvfix lab`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from kvfix_tools import screen
from kvfix_tools.lab import releases, runner
from kvfix_tools.lab.scenario import Scenario

if TYPE_CHECKING:
    from kvfix_tools.lab.continue_state import Continued
    from kvfix_tools.lab.fuzz.fuzz_run import Fuzzed
    from kvfix_tools.lab.replay_recording import Replayed


def versions(installed: dict[str, str]) -> str:
    return ", ".join(f"{dist} {version}" for dist, version in installed.items())


def print_results(wanted: list[Scenario], results: list[runner.Result]) -> None:
    table = Table(
        box=None, pad_edge=False, header_style="bold", title=versions(releases.versions()), title_justify="left"
    )
    for heading in ("scenario", "outcome", "expected as released", "message"):
        table.add_column(heading, overflow="fold")
    for scenario, result in zip(wanted, results, strict=True):
        style = {"violated": "[red]", "clean": "[green]"}.get(result.outcome, "[yellow]")
        text = result.message + "".join(f"\nalso: {other}" for other in dict.fromkeys(result.also))
        table.add_row(result.slug, style + result.outcome, runner.expected(scenario), text)
    screen.console().print(table)


def print_fuzzed(done: Fuzzed) -> None:
    console = screen.console()
    rate = done.steps / done.seconds if done.seconds else 0
    console.print(
        f"{versions(releases.versions())}: {done.seeds} seeds, {done.steps} steps ({rate:.0f} a second), "
        f"{done.counts['preemptions']} preemptions"
    )
    for title, counts in (("happened", done.counts), ("played with", done.options)):
        listed = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        console.print(f"{title}: {listed}", style="dim", highlight=False)
    for violation in done.violations:
        console.print(f"\n[red]{violation.times} times[/], first with seed {violation.seed}: {violation.message}")
        console.print(f"  {violation.schedule.options}", style="dim", highlight=False)
        for step in violation.schedule.steps:
            console.print("  " + " ".join(str(part) for part in step), highlight=False)
    if not done.violations:
        console.print("[green]nothing was violated[/]")


def print_continued(done: Continued) -> None:
    console = screen.console()
    console.print(f"{versions(releases.versions())}, as released: {done.as_released}", highlight=False)
    console.print(f"with the fixes: {done.with_fixes}", highlight=False)
    for name in done.frees:
        console.print(f"all other requests end if {name} is aborted", highlight=False)
    if done.as_released.stuck and not done.frees:
        console.print("no abort of one request lets all other requests end", highlight=False)
    for text in done.differs:
        console.print(f"different from the state: {text}", style="yellow", highlight=False)


def print_replayed(done: Replayed) -> None:
    console = screen.console()
    for title, findings in (("on record", done.on_record), ("in the lab", done.findings)):
        console.print(f"{title}: {len(findings) or 'no'} violations")
        for finding in findings:
            console.print(f"  {finding}", highlight=False)
    for text in done.short:
        console.print(f"different from the record: {text}", style="yellow", highlight=False)
