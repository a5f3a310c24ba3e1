"""A violation in words, as a sanitizer tells one: the rule and its arithmetic, this event, the one that it contradicts,
the request's story, what scheduler and connector hold, what cures it, and one line to grep for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvfix.ledger import RULES
from kvfix.ledger.wording import line
from kvfix.probes import dump, recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfix.cures import Cure
    from kvfix.ledger import Finding
    from kvfix.ledger.events import Event
    from kvfix.probes.recorder import Entry
    from kvfix.probes.watch import Watch

RULE = "=" * 80
#: Events of the story that are told.
LONGEST = 40


def text(watch: Watch, hook: str, finding: Finding, cures: Sequence[Cure], recording: str) -> str:
    """The whole report."""
    whose = finding.request or "the engine"
    entries = [entry for entry in recorder.snapshot() if entry.event.request == finding.request]
    return told(
        finding,
        [entry for entry in entries if entry.connector == watch.number],
        where=f"{hook} of {watch.name}{f' ({watch.role})' if watch.role else ''}, pid {os.getpid()}",
        whose=whose,
        holds=_holds(dump.scheduler_state(), dump.kept(watch)),
        cured=[_cure(cure) for cure in cures],
        recording=recording,
    )


def told(
    finding: Finding,
    story: list[Entry],
    where: str,
    whose: str,
    holds: list[str],
    cured: list[str],
    recording: str,
    who: Sequence[str] = (),
) -> str:
    """The report, of what any source knows of a finding. who: tells each entry of the story, where several do."""
    doc = next((rule.doc for rule in RULES if rule.code == finding.code), "").strip()
    parts = [
        RULE,
        f"kvfix: {finding.code} {finding.name}: request {whose}",
        f"  {finding.message}",
        f"  in {where}",
        "",
        "The rule: " + doc.partition("\n")[0],
        "",
        "This event:",
        f"  {_at(story, finding.event)}{line(finding.event)}",
    ]
    if finding.earlier is not None:
        parts += ["", "contradicts this one:", f"  {_at(story, finding.earlier)}{line(finding.earlier)}"]
    parts += ["", f"The story of {whose}, seconds before the end:", *_story(story, who)]
    parts += ["", *holds] if holds else []
    parts += ["", *(cured or ["No fix of kvfix is known to cure it in this installation."])]
    parts += ["", f"Recorder: {recording}", f"  kvfix replay {recording}", summary(finding), RULE, ""]
    return "\n".join(parts)


def summary(finding: Finding) -> str:
    whose = f" request {finding.request}" if finding.request else ""
    return f"SUMMARY: kvfix {finding.code} {finding.name}{whose}: {finding.message}"


def _story(story: list[Entry], who: Sequence[str]) -> list[str]:
    if not story:
        return ["  (nothing of it is in the recorder)"]
    shown, end = story[-LONGEST:], story[-1].mono
    left_out = [f"  ... {len(story) - len(shown)} before"] if len(story) > len(shown) else []
    told = [f"  {(entry.mono - end) / 1e9:+9.3f}  {line(entry.event)}" for entry in shown]
    labels = [f"  [{label}]" for label in who[-LONGEST:]] or [""] * len(told)
    return [*left_out, *map("".join, zip(told, labels, strict=True))]


def _at(story: list[Entry], event: Event) -> str:
    found = next((entry for entry in reversed(story) if entry.event == event), None)
    return f"{(found.mono - story[-1].mono) / 1e9:+.3f} s, {found.hook}: " if found else ""


def _holds(scheduler: dict[str, int], kept: dict[str, int]) -> list[str]:
    lines = []
    if scheduler:
        free = f"{scheduler['free_blocks']} of {scheduler['blocks']} blocks free"
        lines.append(f"Scheduler: {scheduler['running']} running, {scheduler['waiting']} waiting, {free}")
    if kept:
        lines.append("Connector: " + ", ".join(f"{where} {count}" for where, count in kept.items()))
    return lines


def _cure(cure: Cure) -> str:
    if cure.verdict == "applied":
        what = "is applied here, and it happened all the same: please report it"
    elif cure.verdict == "applicable":
        what = f"cures it, and is not applied here ({cure.reason}): kvfix.apply(), or kvfix run -- CMD"
    else:
        what = f"may cure it; {cure.verdict}: {cure.reason}"
    return f"{cure.code} {cure.slug} {what}"
