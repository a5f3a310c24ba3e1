"""`kvfix replay FILE ...`: check recorded events with the ledger, and print findings with their histories.

A ledger checks the events of one process against rules. With several processes, kvfix also compares each rank's loads
with the scheduler's loads. Only the scheduler's ledger checks ends of leases, and loads that rank and scheduler have
recorded. A lease is the time for which one engine keeps blocks for another engine (peer_recordings.py).
With a router's log (`router`), a finding about several engines names the log's lines that have the request's id.
"""

import json as jsonlib
from pathlib import Path
from typing import Any, NamedTuple

from kvfix import catalogue
from kvfix.connector_events import violations
from kvfix.connector_events.recorder import Entry
from kvfix.ledger import Finding, Ledger
from kvfix.ledger import events as ev
from kvfix_tools import engine_recordings, recording, screen
from kvfix_tools.engine_recordings import Engine, Part
from kvfix_tools.ledger import RankDiffers
from kvfix_tools.peer_recordings import Peers, RouterLog
from kvfix_tools.recording import Recording


class Judged(NamedTuple):
    """A finding, and the recorder's entry at which the ledger reported the finding."""

    finding: Finding
    entry: Entry
    part: Part | None = None  # the recorded process, if kvfix read several recordings
    history: list[tuple[str, Entry]] | None = None  # [(process, entry)] for a finding about several engines


def replay(paths: list[Path], json: bool, router: Path | None = None) -> int:
    """Print violations. Return 1 if a rule is violated, 2 for an unreadable file or two files of one rank, else 0."""
    recordings: list[Recording] = []
    for path in paths:
        try:
            recordings += recording.read_all(path)
        except (OSError, ValueError) as error:  # noqa: PERF203  there are few files
            return screen.error(f"kvfix replay: {path}: {getattr(error, 'strerror', None) or error}")
    if len(recordings) == 1:
        return _replay_process(recordings[0], json)
    try:
        log = RouterLog(router) if router is not None else None
        return _replay_engines(Peers(engine_recordings.engines(recordings), log), json)
    except (OSError, ValueError) as error:
        return screen.error(f"kvfix replay: {error}")


def judged(found: Recording) -> list[Judged]:
    """Return the findings of one process in the order of the events, even findings with the verdict "unknown"."""
    ledgers = {number: Ledger(sees_loads=line.get("sees_loads", True)) for number, line in found.connectors.items()}
    findings = []
    for entry in found.entries:
        ledger = ledgers.setdefault(entry.connector, Ledger())
        findings += [Judged(finding, entry) for finding in ledger.feed(entry.event)]
    return findings


def judged_engine(engine: Engine) -> list[Judged]:
    """Return findings about the scheduler, about each rank, and about ranks whose loads differ from the scheduler's."""
    compared = engine.compared
    findings = []
    for part in engine.parts:
        pairs = compared[part.rank].pairs if not part.is_scheduler and part.rank in compared else []
        judged_with_scheduler = {there for _, there in pairs}
        ledger = Ledger(sees_loads=part.line.get("sees_loads", True))
        for at, entry in enumerate(part.entries):
            found = ledger.feed(entry.event)
            if at not in judged_with_scheduler and (part.is_scheduler or not isinstance(entry.event, ev.LeaseEnded)):
                findings += [Judged(finding, entry, part) for finding in found]
    if scheduler := engine.scheduler:
        for comparison in compared.values():
            for at, event in comparison.differs:
                ledger = Ledger()
                for entry in scheduler.entries[: at + 1]:
                    if entry.event.request == event.request:
                        ledger.feed(entry.event)
                findings += [Judged(finding, scheduler.entries[at], scheduler) for finding in ledger.feed(event)]
    return findings


def _replay_process(found: Recording, json: bool) -> int:
    findings = judged(found)
    violated = _violated(findings)
    if json:
        where = ("connector", "hook", "mono", "wall")
        rows = [_as_dict(each.finding) | {name: getattr(each.entry, name) for name in where} for each in findings]
        print(jsonlib.dumps({"recorder": found.head, "events": len(found.entries), "findings": rows}, indent=2))
        return int(bool(violated))
    for each in violated:
        print(_process_report(found, each), end="")
    unknown = len(findings) - len(violated)
    more = f", {unknown} events not checked, because their request began before the recording" if unknown else ""
    events = f"{len(found.entries)} events of pid {found.head['pid']} ({found.head['reason']})"
    print(f"{found.path}: {events}: {len(violated)} violations{more}")
    return int(bool(violated))


def _replay_engines(peers: Peers, json: bool) -> int:
    engines = peers.engines
    findings = [judged_engine(engine) for engine in engines]
    for finding, keeps, history in peers.findings():
        findings[engines.index(keeps)].append(Judged(finding, history[-1][1], keeps.scheduler, history))
    if json:
        print(jsonlib.dumps([*map(_engine_as_dict, engines, findings)], indent=2))
    else:
        for engine, found in zip(engines, findings, strict=True):
            print("".join(_engine_report(engine, each, peers) for each in _violated(found)), end="")
        for engine, found in zip(engines, findings, strict=True):
            print("\n".join(_summary(engine, found, peers)))
    return int(any(_violated(found) for found in findings))


def _violated(findings: list[Judged]) -> list[Judged]:
    return [each for each in findings if each.finding.verdict == "violated"]


def _process_report(found: Recording, each: Judged) -> str:
    finding, entry, *_ = each
    connector = found.connectors.get(entry.connector, {})
    role = f" ({connector['role']})" if connector.get("role") else ""
    key = entry.connector, finding.request
    history = [one for one in found.entries if (one.connector, one.event.request) == key and one.mono <= entry.mono]
    where = f"{entry.hook} of {connector.get('name', 'a connector')}{role}, pid {found.head['pid']}"
    return _report(finding, history, found, where=where, holds=[])


def _engine_report(engine: Engine, each: Judged, peers: Peers) -> str:
    finding, entry, part, history = each
    assert part is not None
    where, holds = "the records of both engines", list[str]()
    if history is None:
        where = f"{entry.hook} of {engine.connector} ({part.label})"
        its = engine.history(finding.request)
        if not isinstance(finding.event, RankDiffers):  # show the history only up to the event of the finding
            ends = (n for n, (one, other) in enumerate(its) if one is part and other.event == entry.event)
            its = its[: next(ends, len(its)) + 1]
        history = [(one.label, other) for one, other in its]
    elif peers.router is not None:
        holds = [peers.router.text(finding.request)]
    labels, entries = [label for label, _ in history], [one for _, one in history]
    return _report(finding, entries, part.recording, where=where, holds=holds, who=labels)


def _report(finding: Finding, history: list[Entry], found: Recording, **more: Any) -> str:
    fixes = catalogue.handling(finding.code, finding.message)
    texts = [f"{fix.code} {fix.slug} may fix it: kvfix explain {fix.code}" for fix in fixes]
    return violations.compose(finding, history, fixes=texts, recording=found.path, **more)


def _summary(engine: Engine, findings: list[Judged], peers: Peers) -> list[str]:
    lines = [f"engine {engine.name}, {engine.connector}:"]
    lines += [f"  {part.label}: {len(part.entries)} events" for part in engine.parts]
    if engine.scheduler is None:
        lines.append("  scheduler: no recording was given, so kvfix cannot compare its loads with the ranks' loads")
    lines += [f"  rank {rank}: no recording was given, so its loads are unknown" for rank in engine.missing]
    if not engine.ranks:
        lines.append("  no recording states the number of ranks")
    lines += [
        f"  rank {rank}: {comparison.unknown} loads were not checked: this rank's recording does not cover them"
        for rank, comparison in engine.compared.items()
        if comparison.unknown
    ]
    for boot, clock in engine.clocks.items():
        node = next(part.recording.head.get("node") for part in engine.parts if part.boot == boot)
        lines.append(f"  clock of {node}: " + clock.text("the scheduler's"))
    lines += peers.summary(engine)
    verdicts = [each.finding.verdict for each in findings]
    lines.append(f"  {verdicts.count('violated')} violations, {verdicts.count('unknown')} events not checked")
    return lines


def _as_dict(finding: Finding) -> dict[str, Any]:
    about = {name: getattr(finding, name) for name in ("code", "name", "verdict", "request", "message")}
    return {**about, "cures": [fix.code for fix in catalogue.handling(finding.code, finding.message)]}


def _engine_as_dict(engine: Engine, findings: list[Judged]) -> dict[str, Any]:
    rows = [{**_as_dict(finding), "part": part.label if part else ""} for finding, _, part, _ in findings]
    return {
        "engine": engine.name,
        "connector": engine.connector,
        "scheduler": engine.scheduler.recording.path if engine.scheduler else None,
        "ranks": {rank: part.recording.path for rank, part in sorted(engine.workers.items())},
        "missing": engine.missing,
        "unknown_loads": {rank: comparison.unknown for rank, comparison in engine.compared.items()},
        "clocks": {boot: clock._asdict() for boot, clock in engine.clocks.items()},
        "findings": rows,
    }
