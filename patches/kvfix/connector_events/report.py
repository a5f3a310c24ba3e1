"""Write the report of a violation."""

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
    """Write the report next to the recorder file and return its path. Raises OSError."""
    entries = [entry for entry in recorder.snapshot() if entry.event.request == finding.request]
    text = compose(
        finding,
        [entry for entry in entries if entry.connector == watched.number],
        where=f"{hook} of {watched.name}{f' ({watched.role})' if watched.role else ''}, pid {os.getpid()}",
        whose=finding.request or "the engine",
        holds=_holds(dump.scheduler_state(), dump.kept(watched)),
        fixes=[_fix(row) for row in fixes],
        recording=recording,
    )
    with files.folder() as folder:
        return files.write(folder, f"{os.path.basename(recording).removesuffix('.jsonl')}.txt", text.encode())


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
    """Return the report of a finding from any source.

    who: the process of each history entry, for records of several processes.
    """
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
    parts += ["", f"The history of {whose}, in seconds before its last event:", *_history(history, who)]
    parts += ["", *holds] if holds else []
    parts += ["", *(fixes or ["This installation of kvfix has no fix for this violation."])]
    parts += ["", f"Recorder: {recording}", f"  kvfix replay {recording}", summary(finding), RULE, ""]
    return "\n".join(parts)


def summary(finding: Finding) -> str:
    whose = f" request {finding.request}" if finding.request else ""
    return f"SUMMARY: kvfix {finding.code} {finding.name}{whose}: {finding.message}"


def _history(history: list[Entry], who: Sequence[str]) -> list[str]:
    if not history:
        return ["  (the recorder has no events of this request)"]
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
        what = "is applied in this process, but the rule was violated: please report this"
    elif row.verdict == "applicable":
        what = f"fixes this, but is not applied in this process ({row.reason}): kvfix.apply(), or kvfix run -- CMD"
    elif row.verdict == "opt-in":
        what = f"fixes this, but is opt-in: kvfix explain {row.code}, then kvfix run --plus {row.code} -- CMD"
    else:
        what = f"may fix this; {row.verdict}: {row.reason}"
    return f"{row.code} {row.slug} {what}"
