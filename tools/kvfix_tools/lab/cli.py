"""The commands of `kvfix lab`, and their text output."""

import gc
import json as jsonlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from kvfix_tools import screen
from kvfix_tools.command_options import Json, value
from kvfix_tools.lab import releases, runner
from kvfix_tools.lab.fuzz.schedule import Schedule
from kvfix_tools.lab.options import CONNECTORS, PAIRS, SHARED
from kvfix_tools.lab.scenario import Scenario, scenarios

if TYPE_CHECKING:
    from kvfix_tools.lab.continue_state import Continued
    from kvfix_tools.lab.fuzz.fuzz_run import Tally
    from kvfix_tools.lab.replay_recording import Replayed

app = typer.Typer(help="Reproduce bugs on the real vLLM scheduler and connectors, without a GPU.", no_args_is_help=True)

LMCachePath = Annotated[str | None, value("DIR", "Use LMCache from this folder, made by pip install --target DIR.")]
_CONNECTOR = f"""Play this connector: {", ".join(CONNECTORS)}. v1: LMCacheConnectorV1. mp: LMCacheMPConnector.
mp-in-tree: vLLM's copy of mp. Two connectors in a MultiConnector: nixl-multi (nixl-pull and v1), nixl-push-multi
(nixl-push and v1), mooncake-multi (mooncake and v1), nixl-offload (nixl-pull and offloading)."""
_SERVER = "lab: use the lab's stand-in for the server. real: start a real `lmcache server` (mp only)."
_TRANSFERS = "lab: NIXL is simulated. real: use NIXL, and compare it with the simulation. Exit 77: NIXL is missing."
_MODE = "fix: apply the fixes. check: kvfix also checks its rules in the engine, as with kvfix run --mode check."
_FIXES_IN = """both: all engines have the fixes. prefill: only the prefill engine has them (NIXL, Mooncake). decode:
only the decode engine has the fixes (NIXL, Mooncake). one: two engines share a cache, and only the first has the fixes
(v1, mp)."""
Fixes = Annotated[bool, typer.Option(help="--fixes: apply the fixes. --no-fixes: run LMCache and vLLM as released.")]


@app.command("list")
def list_scenarios(json: Json = False) -> None:
    """List the scenarios with their bug, releases and fix."""
    if json:
        rows = [{name: getattr(s, name) for name in ("slug", "title", "fixes", "rule", "wrong")} for s in scenarios()]
        print(jsonlib.dumps(rows, indent=2))
        return
    table = Table("scenario", "fixed by", "happens on", "what happens", box=None, pad_edge=False, header_style="bold")
    for each in scenarios():
        table.add_row(each.slug, " ".join(each.fixes) or "nothing yet", _versions(each.wrong), each.title)
    screen.console().print(table)


@app.command("run")
def run_scenarios(
    slugs: Annotated[list[str] | None, typer.Argument(metavar="SLUG...", help="Names from kvfix lab list.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Play all scenarios.")] = False,
    fixes: Fixes = True,
    lmcache_path: LMCachePath = None,
    json: Json = False,
) -> None:
    """Play scenarios on the installed releases. Exit 1 if a rule is violated."""
    with _refusing("run"):
        wanted = list(scenarios()) if every else _find_all(slugs or [])
        runner.prepare(lmcache_path)
    results = []
    for scenario in wanted:
        screen.progress(scenario.slug)
        results.append(runner.play(scenario, fixes))
    screen.progress("")
    _print([result.as_json() for result in results], json, lambda: _print_results(wanted, results))
    raise typer.Exit(int(any(result.outcome == "violated" for result in results)))


@app.command("fuzz")
def fuzz_connector(
    connector: Annotated[str, typer.Option(help=_CONNECTOR)] = "v1",
    server: Annotated[Literal["lab", "real"], typer.Option(help=_SERVER)] = "lab",
    transfers: Annotated[Literal["lab", "real"], typer.Option(help=_TRANSFERS)] = "lab",
    seeds: Annotated[str, value("A:B", "Play seeds A to B - 1, or one seed.")] = "0:1000000",
    seconds: Annotated[float, typer.Option(help="Play for this many seconds, not counting --shrink.")] = 60.0,
    steps: Annotated[float, typer.Option(help="Stop after this many steps of the scheduler.")] = math.inf,
    fixes: Fixes = True,
    mode: Annotated[Literal["fix", "check"], typer.Option(help=_MODE)] = "fix",
    fixes_in: Annotated[str, typer.Option(help=_FIXES_IN)] = "both",
    plain: Annotated[bool, typer.Option(help="Use LMCache's defaults. Draw no faults and no aborts.")] = False,
    shrink: Annotated[float, value("SECONDS", "Search this long for a shorter schedule. 0: do not search.")] = 20.0,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Use this many processes.")] = 1,
    notes: Annotated[Path | None, value("FILE", "Note progress in this file, and continue from it.")] = None,
    save: Annotated[Path | None, value("DIR", "Write a schedule for each violation into this folder.")] = None,
    lmcache_path: LMCachePath = None,
    json: Json = False,
) -> None:
    """Play random schedules. Exit 1: a rule is violated. 2: wrong options, or nothing was tested."""
    with _refusing("fuzz"):
        first, _, last = seeds.partition(":")
        drawn = range(int(first), int(last) if last else int(first) + 1)
        if connector not in CONNECTORS:
            raise ValueError(f"no connector {connector!r}; known: {', '.join(CONNECTORS)}")
        if server == "real" and connector != "mp":
            raise ValueError(f"--server real works only with --connector mp. Use --server lab for {connector}")
        sides = ["both", *(("prefill", "decode") if connector in PAIRS else ("one",) if connector in SHARED else ())]
        if fixes_in not in sides or (fixes_in != "both" and mode != "fix"):
            known = f"Possible values: with --mode fix, {', '.join(sides)}; with --mode check, only both"
            raise ValueError(f"--fixes-in {fixes_in} is not possible for {connector} in mode {mode}. {known}")
        runner.prepare(lmcache_path)
        if why := releases.cannot_play(connector):
            raise ValueError(f"not applicable: {why}; installed: {_versions(releases.versions())}")
    if transfers == "real" and (lacks := releases.no_nixl()):
        raise typer.Exit(screen.error(f"kvfix lab fuzz: not checked: {lacks}", 77))
    screen.progress("importing vLLM")
    with runner.quiet():
        from kvfix_tools.lab.fuzz import fuzz_run
    gc.freeze()  # without freeze(), each garbage collection checks all imported objects, which takes half a second
    with _refusing("fuzz"):
        run = fuzz_run.Run(connector, fixes, plain, mode, server == "real", transfers == "real", fixes_in)
        done = fuzz_run.fuzz(run, drawn, seconds, shrink, screen.progress, steps, jobs, notes)
    screen.progress("")
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        for violation in done.violations:
            text = violation.schedule.to_json(releases.versions())
            (save / f"{connector}-{violation.rule}-{violation.seed}.json").write_text(text + "\n")
    _print(done.as_json(), json, lambda: _print_fuzzed(done))
    with _refusing("fuzz"):
        if done.tested_nothing and not done.violations:
            raise ValueError(f"the run tested nothing: {done.tested_nothing}")
    raise typer.Exit(int(bool(done.violations)))


@app.command("play")
def play_schedule(
    file: Annotated[Path, typer.Argument(help="A schedule that `lab fuzz --save` wrote.")],
    fixes: Fixes = True,
    lmcache_path: LMCachePath = None,
) -> None:
    """Play a saved schedule once, and print the violations. Exit 1 if a rule is violated."""
    with _refusing("play", file):
        runner.prepare(lmcache_path)
        schedule, found_on = Schedule.from_json(file.read_text())
        here = releases.versions()
        if found_on != here:
            was, has = map(_versions, (found_on, here))
            raise ValueError(f"the schedule was saved with {was}, but {has} is installed. Install {was}")
        if why := releases.cannot_play_options(schedule.options):
            raise ValueError(f"not applicable: {why}")
    with runner.applied(fixes):
        from kvfix_tools.lab.fuzz.fuzz import play

        violations = play(schedule).violations
    for finding in violations:
        print(finding)
    raise typer.Exit(int(bool(violations)))


@app.command("replay")
def replay_recording(
    file: Annotated[Path, typer.Argument(help="A recorder file of an engine.")],
    fixes: Fixes = True,
    lmcache_path: LMCachePath = None,
    json: Json = False,
) -> None:
    """Play the requests of a recorder file in the lab. Exit 1 if a rule is violated."""
    with _refusing("replay", file):
        runner.prepare(lmcache_path)
        with runner.quiet():
            from kvfix_tools.lab.replay_recording import kinds, replay_file
        done = replay_file(file, fixes)
    answer = {"on_record": kinds(done.on_record), "here": kinds(done.findings), "short": done.short}
    _print(answer, json, lambda: _print_replayed(done))
    raise typer.Exit(int(bool(done.findings)))


@app.command("continue")
def continue_state(
    file: Annotated[Path, typer.Argument(help="A file that `kvfix look --save` or kvfix's watchdog wrote.")],
    save: Annotated[Path | None, value("FILE", "Write a short schedule that leads to the stuck state.")] = None,
    shrink: Annotated[float, value("SECONDS", "Search this long for a shorter schedule.")] = 45.0,
    lmcache_path: LMCachePath = None,
    json: Json = False,
) -> None:
    """Rebuild the saved state of an engine. Then continue, first without fixes and then with fixes.

    Exit 1: the run without fixes is stuck or violates a rule. If the run is stuck, the lab repeats it up to 20 times.
    Each repetition aborts one waiting request. If all other requests then end, the output names the aborted request.
    """
    with _refusing("continue", file):
        runner.prepare(lmcache_path)
        with runner.quiet():
            from kvfix_tools.lab.continue_state import continued, shortest
        done = continued(file)
    if save is not None and done.as_released.stuck:
        save.write_text(shortest(done, shrink).to_json(releases.versions()) + "\n")
    _print(done.as_json(releases.versions()), json, lambda: _print_continued(done))
    raise typer.Exit(int(bool(done.as_released.stuck or done.as_released.also)))


@contextmanager
def _refusing(command: str, file: Path | None = None) -> Iterator[None]:
    """If the code in this context raises OSError or ValueError, print the reason and exit with 2."""
    try:
        yield
    except (OSError, ValueError) as error:
        about = f"{file}: " if file is not None else ""
        why = getattr(error, "strerror", None) or error
        screen.progress("")
        raise typer.Exit(screen.error(f"kvfix lab {command}: {about}{why}")) from None


def _find_all(slugs: list[str]) -> list[Scenario]:
    known = {scenario.slug: scenario for scenario in scenarios()}
    unknown = [slug for slug in slugs if slug not in known]
    if unknown or not slugs:
        guess = screen.did_you_mean(unknown[0], known) if unknown else ""
        what = f"no scenario {', '.join(unknown)}.{guess}" if unknown else "name a scenario, or --all."
        raise ValueError(f"{what} `kvfix lab list` lists the scenarios")
    return [known[slug] for slug in dict.fromkeys(slugs)]


def _print(answer: Any, json: bool, show: Callable[[], None]) -> None:
    if json:
        print(jsonlib.dumps(answer, indent=2))
    else:
        show()


def _versions(installed: dict[str, str]) -> str:
    return ", ".join(f"{dist} {version}" for dist, version in installed.items())


def _print_results(wanted: list[Scenario], results: list[runner.Result]) -> None:
    title = _versions(releases.versions())
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for heading in ("scenario", "outcome", "expected without fixes", "message"):
        table.add_column(heading, overflow="fold")
    for scenario, result in zip(wanted, results, strict=True):
        style = {"violated": "[red]", "clean": "[green]"}.get(result.outcome, "[yellow]")
        text = result.message + "".join(f"\nalso: {other}" for other in dict.fromkeys(result.also))
        table.add_row(result.slug, style + result.outcome, runner.expected(scenario), text)
    screen.console().print(table)


def _print_fuzzed(done: "Tally") -> None:
    console = screen.console()
    rate = done.steps / done.seconds if done.seconds else 0
    console.print(
        f"{_versions(releases.versions())}: {done.seeds} seeds, {done.steps} steps ({rate:.0f} a second), "
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


def _print_continued(done: "Continued") -> None:
    console = screen.console()
    console.print(f"{_versions(releases.versions())}, without fixes: {done.as_released}", highlight=False)
    console.print(f"with the fixes: {done.with_fixes}", highlight=False)
    for name in done.frees:
        console.print(f"all other requests end if {name} is aborted", highlight=False)
    if done.as_released.stuck and not done.frees:
        console.print("whichever request is aborted, not all other requests end", highlight=False)
    for text in done.differs:
        console.print(f"different from the state: {text}", style="yellow", highlight=False)


def _print_replayed(done: "Replayed") -> None:
    console = screen.console()
    for title, findings in (("on record", done.on_record), ("in the lab", done.findings)):
        console.print(f"{title}: {len(findings) or 'no'} violations")
        for finding in findings:
            console.print(f"  {finding}", highlight=False)
    for text in done.short:
        console.print(f"different from the file: {text}", style="yellow", highlight=False)
