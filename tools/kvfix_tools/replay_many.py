"""`kvfix replay FILE FILE ...`, or of a bundle: the recordings of an engine's processes judged and told as one.

Each process' own events go through a ledger, as alone; then each rank is laid beside the scheduler. What a rank loads
that the scheduler told it has been judged there. A rank that is missing, or whose record ends before, is unknown.
"""

from __future__ import annotations

import json as jsonlib
from typing import Any, NamedTuple

from kvfix.cures import candidates
from kvfix.ledger import Finding, Ledger
from kvfix.ledger import events as ev
from kvfix.probes import report
from kvfix_tools import merge
from kvfix_tools.recording import Recording


class Told(NamedTuple):
    """A finding, and the part whose entry, the `at`th, it was found at."""

    finding: Finding
    part: merge.Part
    at: int


def replay(recordings: list[Recording], json: bool) -> int:
    """0: nothing is violated; 1: something. Raises ValueError where they are not of one engine each."""
    judgements = [(engine, judged(engine)) for engine in merge.engines(recordings)]
    violated = [(engine, each) for engine, told in judgements for each in told if each.finding.verdict == "violated"]
    if json:
        print(jsonlib.dumps([_as_json(engine, told) for engine, told in judgements], indent=2))
    else:
        for engine, each in violated:
            print(_text(engine, each), end="")
        for engine, told in judgements:
            print("\n".join(_summary(engine, told)))
    return int(bool(violated))


def judged(engine: merge.Engine) -> list[Told]:
    """Findings of the scheduler, of each rank, and of each rank beside the scheduler."""
    compared = engine.compared()
    told = []
    for part in engine.parts:
        paired = set() if part.is_scheduler or part.rank not in compared else {b for _, b in compared[part.rank].pairs}
        ledger = Ledger(sees_loads=part.line.get("sees_loads", True))
        for at, entry in enumerate(part.entries):
            found = ledger.feed(entry.event)
            if at not in paired:  # else it has been judged where it was told
                told += [Told(finding, part, at) for finding in found]
    for comparison in compared.values():
        assert engine.scheduler is not None
        for at, event in comparison.differs:
            told += [Told(finding, engine.scheduler, at) for finding in _beside(engine.scheduler, at, event)]
    return told


def _beside(scheduler: merge.Part, at: int, event: ev.RankDiffers) -> list[Finding]:
    ledger = Ledger()
    for entry in scheduler.entries[: at + 1]:
        if entry.event.request == event.request:
            ledger.feed(entry.event)
    return ledger.feed(event)


def _text(engine: merge.Engine, told: Told) -> str:
    finding, part, at = told
    entry = part.entries[at]
    story = engine.story(finding.request)
    labels = {id(each): each.label for each in engine.parts}
    end = next((n for n, (one, other) in enumerate(story) if one is part and other.event == entry.event), len(story))
    shown = story if isinstance(finding.event, ev.RankDiffers) else story[: end + 1]
    return report.told(
        finding,
        [each for _, each in shown],
        where=f"{entry.hook} of {engine.connector} ({part.label})",
        whose=finding.request or "the engine",
        holds=[],
        cured=[f"{code} may cure it: kvfix explain {code}" for code in candidates(finding)],
        recording=part.recording.path,
        who=[labels[id(each)] for each, _ in shown],
    )


def _summary(engine: merge.Engine, told: list[Told]) -> list[str]:
    lines = [f"engine {engine.name}, {engine.connector}:"]
    lines += [f"  {part.label}: {len(part.entries)} events" for part in engine.parts]
    if engine.scheduler is None:
        lines.append("  scheduler: no recording of it is here; what the ranks were told is unknown")
    lines += [f"  rank {rank}: no recording of it is here; what it did is unknown" for rank in engine.missing]
    if not engine.ranks:
        lines.append("  how many ranks there are is not on record")
    lines += [
        f"  rank {rank}: {comparison.unknown} loads lie outside of what is certainly on record here"
        for rank, comparison in engine.compared().items()
        if comparison.unknown
    ]
    for boot, clock in engine.clocks().items():
        node = next(part.recording.head.get("node") for part in engine.parts if _boot(part) == boot)
        bounds = [f"{value / 1e9:+.6f}" if value is not None else "?" for value in (clock.low, clock.high)]
        lines.append(
            f"  clock of {node}: {clock.ahead / 1e9:+.6f} s beside the scheduler's, within {' and '.join(bounds)}"
        )
    verdicts = [each.finding.verdict for each in told]
    lines.append(f"  {verdicts.count('violated')} violations, {verdicts.count('unknown')} events not to be judged")
    return lines


def _boot(part: merge.Part) -> str:
    return str(part.recording.head.get("boot", ""))


def _as_json(engine: merge.Engine, told: list[Told]) -> dict[str, Any]:
    return {
        "engine": engine.name,
        "connector": engine.connector,
        "scheduler": engine.scheduler.recording.path if engine.scheduler else None,
        "ranks": {rank: part.recording.path for rank, part in sorted(engine.workers.items())},
        "missing": engine.missing,
        "unknown_loads": {rank: comparison.unknown for rank, comparison in engine.compared().items()},
        "clocks": {boot: clock._asdict() for boot, clock in engine.clocks().items()},
        "findings": [
            {
                "code": finding.code,
                "name": finding.name,
                "verdict": finding.verdict,
                "request": finding.request,
                "message": finding.message,
                "part": part.label,
                "cures": candidates(finding),
            }
            for finding, part, _ in told
        ],
    }
