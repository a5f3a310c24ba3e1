"""`kvfix replay FILE ...`: the ledger once more over what recorders kept. The same verdicts, with their stories."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

from kvfix.cures import candidates
from kvfix.fix import find
from kvfix.ledger import Finding, Ledger
from kvfix.probes import report
from kvfix.probes.recorder import Entry
from kvfix_tools import recording, replay_many


class Told(NamedTuple):
    """A finding, and the entry at which it was found."""

    finding: Finding
    entry: Entry


def judged(found: recording.Recording) -> list[Told]:
    """Findings in the order of the events; those that cannot be judged ("unknown") among them."""
    ledgers = {number: Ledger(sees_loads=line.get("sees_loads", True)) for number, line in found.connectors.items()}
    told = []
    for entry in found.entries:
        ledger = ledgers.setdefault(entry.connector, Ledger())
        told += [Told(finding, entry) for finding in ledger.feed(entry.event)]
    return told


def replay(paths: list[Path], json: bool) -> int:
    """Print what is violated. 0: nothing; 1: something; 2: a file cannot be read, or they are of different engines."""
    recordings: list[recording.Recording] = []
    for path in paths:
        try:
            recordings += recording.read_all(path)
        except (OSError, ValueError) as error:  # noqa: PERF203  it is one of a few files
            print(f"kvfix replay: {path}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
            return 2
    if len(recordings) == 1:
        return _alone(recordings[0], json)
    try:
        return replay_many.replay(recordings, json)
    except ValueError as error:
        print(f"kvfix replay: {error}", file=sys.stderr)
        return 2


def _alone(found: recording.Recording, json: bool) -> int:
    told = judged(found)
    violated = [each for each in told if each.finding.verdict == "violated"]
    if json:
        print(jsonlib.dumps(_as_json(found, told), indent=2))
    else:
        for each in violated:
            print(_text(found, each), end="")
        unknown = len(told) - len(violated)
        reason, events = found.head["reason"], len(found.entries)
        print(
            f"{found.path}: {events} events of pid {found.head['pid']} ({reason}): {len(violated)} violations"
            + (f", {unknown} not to be judged: the record began after the request did" if unknown else "")
        )
    return int(bool(violated))


def _text(found: recording.Recording, told: Told) -> str:
    finding, entry = told
    connector = found.connectors.get(entry.connector, {})
    role = f" ({connector['role']})" if connector.get("role") else ""
    story = [
        each
        for each in found.entries
        if (each.connector, each.event.request) == (entry.connector, finding.request) and each.mono <= entry.mono
    ]
    return report.told(
        finding,
        story,
        where=f"{entry.hook} of {connector.get('name', 'a connector')}{role}, pid {found.head['pid']}",
        whose=finding.request or "the engine",
        holds=[],
        cured=[
            f"{code} {fix.slug} cures findings of this kind." for code in candidates(finding) if (fix := find(code))
        ],
        recording=found.path,
    )


def _as_json(found: recording.Recording, told: list[Told]) -> dict[str, Any]:
    findings = [
        {
            "code": finding.code,
            "name": finding.name,
            "verdict": finding.verdict,
            "request": finding.request,
            "message": finding.message,
            "connector": entry.connector,
            "hook": entry.hook,
            "mono": entry.mono,
            "wall": entry.wall,
            "cures": candidates(finding),
        }
        for finding, entry in told
    ]
    return {"recorder": found.head, "events": len(found.entries), "findings": findings}
