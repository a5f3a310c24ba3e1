"""`kvfix lab fuzz`: play a random schedule per seed, until time, steps or seeds run out, in one or more processes."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvfix import catalogue
from kvfix.ledger import Finding
from kvfix_tools.lab import releases
from kvfix_tools.lab.engine.counts import COUNTED
from kvfix_tools.lab.fuzz.fuzz import play, shrink, signature
from kvfix_tools.lab.fuzz.schedule import Schedule, draw
from kvfix_tools.lab.pair import pair_engine
from kvfix_tools.lab.runner import applied

#: A process plays this many seeds, in a second or two, before it returns a tally.
BATCH = 32


class Violation(NamedTuple):
    """All findings with one signature. times: number of findings. schedule: the shrunk schedule of the first seed."""

    rule: str
    times: int
    seed: int
    message: str
    schedule: Schedule

    def as_json(self) -> dict[str, Any]:
        schedule = {"options": vars(self.schedule.options), "steps": [list(step) for step in self.schedule.steps]}
        own = {"rule": self.rule, "count": self.times, "seed": self.seed, "message": self.message}
        return {**own, "schedule": schedule}


class Tally(msgspec.Struct):
    """The results of a run: sums over all played seeds. steps: steps of the scheduler. seconds: duration."""

    steps: int = 0
    seeds: int = 0
    seconds: float = 0.0
    options: dict[str, int] = {}  # {option: number of seeds that were played with the option}
    counts: dict[str, int] = {}  # see counts.py
    found: dict[str, tuple[int, int, str, str]] = {}  # {signature: (times, first seed, rule, message)}
    violations: list[Any] = []  # filled at the end of the run, the most frequent violation first

    def add(self, other: "Tally") -> None:
        self.seeds += other.seeds
        self.steps += other.steps
        self.counts = dict(Counter(self.counts) + Counter(other.counts))
        self.options = dict(Counter(self.options) + Counter(other.options))
        for wanted, new in other.found.items():
            first = self.found.get(wanted, (0, *new[1:]))
            self.found[wanted] = (first[0] + new[0], *first[1:])

    @property
    def tested_nothing(self) -> str:
        """Return why the run proves nothing, or ""."""
        needed = {
            "loaded_tokens": "loaded no token",
            "stored_tokens": "stored no token",
            "preemptions": "preempted no request",
            "full_steps": "never filled the blocks",
        }
        return ", ".join(missing for count, missing in needed.items() if not self.counts[count])

    def as_json(self) -> dict[str, Any]:
        own = {name: value for name, value in msgspec.structs.asdict(self).items() if name != "found"}
        names = {"preemptions": "preemptions", "retrieved_tokens": "loaded_tokens", "stored_tokens": "stored_tokens"}
        own |= {name: self.counts[count] for name, count in names.items()}
        violations = [violation.as_json() for violation in self.violations]
        return {**own, "violations": violations, "tested_nothing": self.tested_nothing}


class Run(msgspec.Struct, frozen=True):
    """The settings of a run. With equal settings, a seed always gives the same result."""

    connector: str
    fixes: bool
    plain: bool = False
    mode: str = "fix"  # argument of `kvfix.apply`
    real_server: bool = False  # see Options
    real_transfers: bool = False
    #: The engines with fixes: "both", "prefill", "decode", or "one" (the first of two engines that share a cache).
    #: If only one engine has fixes, this engine has only the default fixes.
    fixes_in: str = "both"

    def schedules(self, seeds: Iterable[int]) -> Iterator[Schedule]:
        lacks = releases.lacking()
        drawn = (draw(seed, self.connector, self.plain, lacks, self.real_server) for seed in seeds)
        more: dict[str, Any] = {"real_transfers": self.real_transfers, "neighbours": self.fixes_in == "one"}
        return (each._replace(options=replace(each.options, **more)) for each in drawn)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the fixes in the engines of `fixes_in` while this context is open."""
        if self.fixes_in == "both" or not self.fixes:
            with applied(self.fixes, self.mode):
                yield
            return
        default = [fix.code for fix in catalogue.fixes() if not fix.opt_in]
        engine = "first" if self.fixes_in == "one" else self.fixes_in
        with pair_engine.fixes_in(engine), applied(True, self.mode, default):
            yield

    def not_as_released(self, schedule: Schedule, violations: list[Finding]) -> list[Finding]:
        """If only one engine has fixes, return only the violations that do not appear without fixes.

        If the schedule has any violation without fixes, return []. Without fixes, the same bug may need a slightly
        different schedule. So leave out each step once, play the rest without fixes, and omit violations that appear.
        """
        if not violations or self.fixes_in == "both" or not self.fixes:
            return violations
        with pair_engine.as_released():
            if play(schedule).violations:
                return []
            for at in range(len(schedule.steps)):
                nearby = schedule._replace(steps=schedule.steps[:at] + schedule.steps[at + 1 :])
                shown = {signature(finding) for finding in play(nearby).violations}
                violations = [finding for finding in violations if signature(finding) not in shown]
                if not violations:
                    break
        return violations

    def play(self, seeds: range, until: float) -> Tally:
        """Play the seeds in order, until `time.monotonic()` exceeds `until`."""
        counts, options, tally = Counter[str](), Counter[str](), Tally()
        with self.applied():
            for seed, schedule in zip(seeds, self.schedules(seeds), strict=True):
                if time.monotonic() > until:
                    break
                done = play(schedule)
                tally.seeds += 1
                tally.steps += done.steps
                counts.update(done.counts)
                options.update(schedule.options.changed)
                violations = self.not_as_released(schedule, done.violations)
                counts["violated_as_released"] += bool(done.violations) and not violations
                for finding in violations:
                    tally.add(Tally(found={signature(finding): (1, seed, finding.code, str(finding))}))
        tally.counts, tally.options = dict(counts), dict(options)
        return tally


class Notes(msgspec.Struct):
    """The content of the file that `--notes` names: the run and its progress."""

    releases: dict[str, str]
    code: str
    options: Run
    first_seed: int
    tally: Tally


def fuzz(
    run: Run,
    seeds: range,
    seconds: float,
    shrinking: float = 45.0,
    progress: Callable[[str], None] = lambda _: None,
    most: float = math.inf,
    jobs: int = 1,
    notes: Path | None = None,
) -> Tally:
    """Play the seeds in order for at most `seconds`.

    - shrinking: seconds to shrink the schedule of each kind of violation. With 0, return the schedule as drawn.
    - most: number of steps after which the run plays no more seeds
    - jobs: number of processes
    - notes: a file with the progress, from which the run continues. Raise ValueError if the file is of another run.
    """
    start = time.monotonic()
    kept = Notes(releases.versions(), releases.code() if notes else "", run, seeds.start, Tally())
    if notes is not None and notes.exists():
        kept.tally = _noted(kept, notes)
    tally, before = kept.tally, kept.tally.seconds
    for done in _batches(run, seeds[tally.seeds :], start + seconds, jobs):
        tally.add(done)
        tally.seconds = before + time.monotonic() - start
        if notes is not None:
            part = notes.with_name(notes.name + ".part")
            part.write_bytes(msgspec.json.encode(kept))
            part.replace(notes)
        found = f"{len(tally.found)} kinds of violation"
        progress(f"{tally.seconds:.0f} s: {tally.seeds} seeds, {tally.steps} steps, {found}")
        if tally.steps >= most:
            break
    if run.fixes_in != "both":
        shrinking = 0  # a shorter schedule may have the violation without fixes too
    with run.applied():
        for wanted, (times, seed, rule, message) in sorted(tally.found.items(), key=lambda item: -item[1][0]):
            (schedule,) = run.schedules([seed])
            if shrinking:
                schedule = shrink(schedule, wanted, shrinking)
                message = str(next(each for each in play(schedule).findings if signature(each) == wanted))
            tally.violations.append(Violation(rule, times, seed, message, schedule))
    tally.seconds = round(tally.seconds, 3)
    tally.counts = {**dict.fromkeys(COUNTED, 0), **tally.counts}
    return tally


def _batches(run: Run, seeds: range, until: float, jobs: int) -> Iterator[Tally]:
    """Yield tallies of the seeds in order. Stop after the first batch that runs out of time."""
    batches = (seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH))
    here = (run.play(batch, until) for batch in batches)
    for done in here if jobs == 1 else _in_processes(run, batches, until, jobs):
        yield done
        if done.seeds < BATCH:
            return


def _in_processes(run: Run, batches: Iterable[range], until: float, jobs: int) -> Iterator[Tally]:
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        ahead: deque[Future[Tally]] = deque()
        try:
            for batch in batches:
                ahead.append(pool.submit(run.play, batch, until))
                if len(ahead) > 2 * jobs:
                    yield ahead.popleft().result()
            yield from (future.result() for future in ahead)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _noted(now: Notes, notes: Path) -> Tally:
    try:
        kept = msgspec.json.decode(notes.read_bytes(), type=Notes)
    except msgspec.DecodeError as error:
        raise ValueError(f"{notes} has no notes of a run of `kvfix lab fuzz`: {error}") from None
    names = [name for name in Notes.__struct_fields__ if name != "tally"]
    changed = [name for name in names if getattr(kept, name) != getattr(now, name)]
    if changed:
        raise ValueError(f"{notes} notes a run with different {' and '.join(changed)}: remove it or name another file")
    return kept.tally
