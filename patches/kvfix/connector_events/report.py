"""The report of a violation, like a sanitizer's: the rule and its arithmetic, this event and the one it contradicts,
the request's history, the state of scheduler and connector, the fix, and one line to grep for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvfix.connector_events import dump, files, recorder
from kvfix.ledger import RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfix.connector_events.recorder import Entry
    from kvfix.connector_events.watched import WatchedConnector
    from kvfix.fix_status import FixRow
    from kvfix.ledger import Finding
    from kvfix.ledger.events import Event

RULE = "=" * 80
#: Maximum events of the history in a report.
LONGEST = 40


def write(watched: WatchedConnector, hook: str, finding: Finding, fixes: Sequence[FixRow], recording: str) -> str:
    """Write the report next to the recorder file; its path. Raises OSError."""
    name = f"{os.path.basename(recording).removesuffix('.jsonl')}.txt"
    with files.folder() as folder:
        return files.write(folder, name, text(watched, hook, finding, fixes, recording).encode())


def text(watched: WatchedConnector, hook: str, finding: Finding, fixes: Sequence[FixRow], recording: str) -> str:
    """The whole report."""
    whose = finding.request or "the engine"
    entries = [entry for entry in recorder.snapshot() if entry.event.request == finding.request]
    return compose(
        finding,
        [entry for entry in entries if entry.connector == watched.number],
        where=f"{hook} of {watched.name}{f' ({watched.role})' if watched.role else ''}, pid {os.getpid()}",
        whose=whose,
        holds=_holds(dump.scheduler_state(), dump.kept(watched)),
        fixes=[_fix(row) for row in fixes],
        recording=recording,
    )


def compose(
    finding: Finding,
    history: list[Entry],
    where: str,
    whose: str,
    holds: list[str],
    fixes: list[str],
    recording: str,
    who: Sequence[str] = (),
) -> str:
    """The report of a finding from any source. who: for records of several processes, the one of each history entry."""
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
        f"  {_at(history, finding.event)}{finding.event.text()}",
    ]
    if finding.earlier is not None:
        parts += ["", "contradicts this one:", f"  {_at(history, finding.earlier)}{finding.earlier.text()}"]
    parts += ["", f"The history of {whose}, seconds before the end:", *_history(history, who)]
    parts += ["", *holds] if holds else []
    parts += ["", *(fixes or ["No fix of kvfix is known for it in this installation."])]
    parts += ["", f"Recorder: {recording}", f"  kvfix replay {recording}", summary(finding), RULE, ""]
    return "\n".join(parts)


def summary(finding: Finding) -> str:
    whose = f" request {finding.request}" if finding.request else ""
    return f"SUMMARY: kvfix {finding.code} {finding.name}{whose}: {finding.message}"


def _history(history: list[Entry], who: Sequence[str]) -> list[str]:
    if not history:
        return ["  (the recorder has no events of it)"]
    shown, end = history[-LONGEST:], history[-1].mono
    left_out = [f"  ... {len(history) - len(shown)} before"] if len(history) > len(shown) else []
    lines = [f"  {(entry.mono - end) / 1e9:+9.3f}  {entry.event.text()}" for entry in shown]
    labels = [f"  [{label}]" for label in who[-LONGEST:]] or [""] * len(lines)
    return [*left_out, *map("".join, zip(lines, labels, strict=True))]


def _at(history: list[Entry], event: Event) -> str:
    found = next((entry for entry in reversed(history) if entry.event == event), None)
    return f"{(found.mono - history[-1].mono) / 1e9:+.3f} s, {found.hook}: " if found else ""


def _holds(scheduler: dict[str, int], kept: dict[str, int]) -> list[str]:
    lines = []
    if scheduler:
        free = f"{scheduler['free_blocks']} of {scheduler['blocks']} blocks free"
        lines.append(f"Scheduler: {scheduler['running']} running, {scheduler['waiting']} waiting, {free}")
    if kept:
        lines.append("Connector: " + ", ".join(f"{where} {count}" for where, count in kept.items()))
    return lines


def _fix(row: FixRow) -> str:
    if row.verdict == "applied":
        what = "is applied here, and the rule was violated anyway: please report it"
    elif row.verdict == "applicable":
        what = f"fixes it, and is not applied here ({row.reason}): kvfix.apply(), or kvfix run -- CMD"
    elif row.verdict == "opt-in":
        what = f"fixes it, and is opt-in: kvfix explain {row.code}, then kvfix run --plus {row.code} -- CMD"
    else:
        what = f"may fix it; {row.verdict}: {row.reason}"
    return f"{row.code} {row.slug} {what}"
