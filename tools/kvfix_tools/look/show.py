"""Format the text of `kvfix look`: verdicts, requests and their waits, transfers, and how kvfix read the engine."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvfix import catalogue, installed_source
from kvfix.engine_state.scheduler import QUEUES
from kvfix.ledger import liveness
from kvfix.ledger.liveness import LOAD, LOOKUP, OUTSIDE, PLACE, Engine, ranks_text
from kvfix.ledger.standstill import Look, Verdict
from kvfix_tools.doctor import servers
from kvfix_tools.look.looking import INSIDE, NOT, Way

ROWS = 40  # maximum number of rows in the table of requests
_COLUMNS = ("request", "status", "waits", "computed", "blocks", "promised", "granted", "load", "stored", "waits for")
_HELD = {"loads": "loads", "stores": "stores", "unreported": "unreported transfers", "fetched": "with fetched chunks"}
_NUMBERS = ("waits", "blocks", "promised", "granted", "stored")


def fixes(verdict: Verdict, processes: Sequence[dict[str, Any]]) -> list[str]:
    """Return the codes of the fixes that match a verdict and the engine's releases, and that no process has applied."""
    applied = {code for each in processes for code in (each.get("kvfix") or {}).get("fixes", ())}
    versions = {dist: version for each in processes for dist, version in (each.get("versions") or {}).items()}
    return [
        fix.code
        for fix in catalogue.handling(verdict.code, verdict.message)
        if fix.code not in applied
        # If the engine's release is unknown, take the release that is installed for kvfix's Python.
        and any(
            _within(versions.get(target.dist) or installed_source.version(target.dist), target.broken)
            for target in fix.targets
            if not target.helper
        )
    ]


def _within(version: str, broken: str) -> bool:
    """Return True if the release has the bug, or if the release is unknown."""
    try:
        return SpecifierSet(broken, prereleases=True).contains(Version(Version(version).public))
    except InvalidVersion:
        return True


def as_dict(verdict: Verdict, processes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "code": verdict.code,
        "name": verdict.name,
        "severity": "hang",
        "verdict": "violated",
        "sentence": verdict.message,
        "request": verdict.request or None,
        "fixes": fixes(verdict, processes),
        "do_now": verdict.now,
        "waiting": verdict.waiting,
    }


def screenful(looks: Sequence[Look], verdicts: Sequence[Verdict], ways: Collection[Way]) -> Group:
    parts: list[RenderableType] = [*_verdicts(verdicts, looks[-1].processes)]
    for engine in liveness.engines(looks[-1].processes):
        parts.append(_head(engine, looks))
        if engine.requests:
            parts.append(_table(engine))
        parts += [Text(f"  {line}") for line in _held(engine)]
    parts += [Text(f"  {servers.line(each)}") for each in servers.of(looks[-1].processes)]
    silent = [each for each in looks[-1].processes if each.get("silent")]
    parts += [Text(f"{each['name']} ({each['pid']}): {(each['stack'] or ['no frames'])[0]}") for each in silent]
    unread = [(each, f"{what}: {why}") for each in looks[-1].processes for what, why in each.get("unread", {}).items()]
    parts += [Text(f"{each['name']} ({each['pid']}): could not read {what}") for each, what in unread]
    parts += [Text(line, style="dim") for line in way_lines(ways)]
    return Group(*parts)


def _verdicts(verdicts: Sequence[Verdict], processes: Sequence[dict[str, Any]]) -> Iterable[Text]:
    if not verdicts:
        yield Text(_nothing(processes), style="bold green")
    for each in verdicts:
        yield Text(each.message, style="bold red")
        known = [f"{code} {fix.slug}" for code in fixes(each, processes) if (fix := catalogue.find(code)) is not None]
        yield Text(f"  {each.code} {each.name}" + (f": {', '.join(known)} (kvfix explain CODE)" if known else ""))
        yield Text(f"  do now: {each.now}")
        yield Text(f"  {each.waiting}")


def _nothing(processes: Sequence[dict[str, Any]]) -> str:
    engines = liveness.engines(processes)
    if not engines:
        return "kvfix could not read a scheduler, so it knows nothing about requests"

    def answer(engine: Engine) -> str:
        paused = engine.scheduler["paused"]
        return f"the scheduler is paused ({paused})" if paused else liveness.can_move(liveness.state(engine)).message

    return f"nothing is known to be wrong: {'; '.join(map(answer, engines))}"


def _head(engine: Engine, looks: Sequence[Look]) -> Text:
    scheduler, pool = engine.scheduler, engine.scheduler["pool"]
    running = sum(row["queue"] == "running" for row in engine.requests)
    reserved = "" if not pool["reserved"] else f", {pool['reserved']} reserved for prefills in flight"
    text = (
        f"engine {engine.process['pid']}: {running} running, {len(liveness.waiting(engine))} waiting; of "
        f"{pool['blocks']} blocks {pool['free']} free{reserved}, {pool['cached']} cached"
    )
    state = f"; paused: {scheduler['paused']}" if scheduler["paused"] else ""
    return Text(f"\n{text}{state}{_rates(engine, looks)}", style="bold")


def _rates(engine: Engine, looks: Sequence[Look]) -> str:
    if len(looks) < 2:
        return ""
    before = next((e for e in liveness.engines(looks[-2].processes) if e.process["pid"] == engine.process["pid"]), None)
    span = looks[-1].at - looks[-2].at  # seconds
    if before is None or span <= 0:
        return ""
    rows = {row["id"]: row["computed"] for row in before.requests}
    tokens = sum(max(0, row["computed"] - rows[row["id"]]) for row in engine.requests if row["id"] in rows)
    gone = len(set(rows) - {row["id"] for row in engine.requests})
    steps = (engine.scheduler["steps"] or 0) - (before.scheduler["steps"] or 0)
    return f"; per second: {steps / span:.0f} steps, {tokens / span:.0f} tokens, {gone / span:.1f} ended requests"


def waited(row: dict[str, Any]) -> float:
    """Return the seconds since the wait began. If this time is unknown, return the seconds since the arrival."""
    return float(row["since"] if row["since"] is not None else row["arrived"])


def waits_for(engine: Engine, row: dict[str, Any]) -> str:
    """Return what the request waits for: the part of the engine that must act, and its task."""
    queue, name = row["queue"], row["id"]
    if queue == "ended":
        ranks = engine.ranks_with(name, "stores", *liveness.KINDS)
        return f"{ranks_text(ranks)}: the transfer of its blocks" if ranks else "a transfer that no worker has"
    if queue not in QUEUES:
        return "the workers: its next tokens"
    kind = next(kind for each, kind in liveness.waits(engine) if each["id"] == name)
    if kind == OUTSIDE:
        return liveness.OUTSIDE_STATUSES[row["status"]]
    if kind == LOAD:
        ranks = engine.ranks_with(name, *liveness.KINDS)
        if not ranks and not engine.sees_transfers:
            return "the connector: its load"
        return f"{ranks_text(ranks)}: its load" if ranks else "a load that no worker has"
    if kind == LOOKUP:
        return "the connector: its lookup"
    if row["report"] == "failed":
        return "the scheduler: to handle its failed load"
    needs, free = row["needs"], engine.scheduler["pool"]["free"]
    first = next(each for each, kind in liveness.waits(engine) if kind == PLACE)
    if first["id"] != name and first["needs"] is not None and first["needs"] > free:  # the queue waits for `first`
        return f"{first['id']}, which is before it in the queue"
    if needs is None:
        return "the scheduler: to be scheduled in a step"
    return f"free blocks: it needs {needs}, {free} are free" if needs > free else "the scheduler: its next step"


def _table(engine: Engine) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in _NUMBERS else "left")
    ordered = sorted(engine.requests, key=lambda row: (row["queue"] == "running", -waited(row)))
    for row in ordered[:ROWS]:
        table.add_row(
            row["id"], row["status"].lower(), _wait(row), f"{row['computed']} of {row['total']}",
            str(row["blocks"]), _or(row["promised"]), _or(row["granted"]), _load(row), _or(row["stored"]),
            waits_for(engine, row),
        )  # fmt: skip
    if len(ordered) > ROWS:
        table.caption = f"and {len(ordered) - ROWS} more"
    return table


def _wait(row: dict[str, Any]) -> str:
    if row["queue"] == "running":
        return ""
    return f"{'' if row['since'] is not None else '<= '}{waited(row):.1f} s"


def _load(row: dict[str, Any]) -> str:
    if row["loading"]:
        return f"{row['loading'][0]} to {row['loading'][1]}"
    if row["report"]:
        return f"{row['report']}, not processed"
    return _or(row["lookup"]) or ("" if row["loaded"] is None else f"{row['loaded']} loaded")


def _or(value: Any) -> str:
    return "" if value is None else str(value)


def _held(engine: Engine) -> Iterable[str]:
    """Yield lines about transfers, reports and lookups, and about state that connectors keep for ended requests."""
    alive = {row["id"] for row in engine.requests}
    for process, each in engine.workers:
        kinds = [f"{len(each[kind])} {name} ({_some(each[kind])})" for kind, name in _HELD.items() if each.get(kind)]
        if each.get("failed_blocks"):
            kinds.append(f"{each['failed_blocks']} blocks of failed loads")
        if pins := {name: count for name, count in (each.get("pins") or {}).items() if name not in alive}:
            kinds.append(f"{sum(pins.values())} chunks pinned for ended requests ({_some(pins)})")
        health = "" if each.get("healthy") is not False else ", LMCache is unavailable"
        what = ", ".join(kinds) or "nothing in flight"
        yield f"rank {each['rank']} ({process['pid']}, {each['class']}{health}): {what}"
    missing = engine.ranks - len({each["rank"] for _, each in engine.workers})
    if missing > 0 and engine.connectors:
        yield f"{missing} of {engine.ranks} ranks could not be read"
    if reports := [row["id"] for row in engine.requests if row["report"]]:
        yield f"loads that have ended, but that the scheduler has not processed: {_some(reports)}"
    if lookups := [row["id"] for row in engine.requests if row["lookup"] == "in flight"]:
        yield f"lookups without an answer: {_some(lookups)}"
    for connector in engine.connectors:
        if kept := [name for name in connector.get("requests") or () if name not in alive]:
            yield f"{connector['class']} of the scheduler still keeps ended requests: {_some(kept)}"
    if engine.scheduler["answers"]:
        yield f"{engine.scheduler['answers']} steps that the workers have not answered"
    if engine.process["hook"]:
        yield f"the scheduler is in {engine.process['hook']}: {engine.process['stack'][0]}"


def _some(names: Iterable[str], most: int = 5) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f", and {len(listed) - most} more" if len(listed) > most else "")


def way_lines(ways: Collection[Way]) -> Iterable[str]:
    """Yield how kvfix read each process, and which setting would let kvfix read the process from inside."""
    if inside := [each for each in ways if each.how == INSIDE]:
        yield f"read from inside: {', '.join(f'{each.name} ({each.pid})' for each in inside)}"
    for each in ways:
        if each.how != INSIDE:
            setting = f" {each.setting}" if each.setting else ""
            how = each.how if each.how == NOT else f"read {each.how}"
            yield f"{each.name} ({each.pid}) was {how}, because {each.reason}.{setting}"


def request(engine: Engine, name: str) -> list[str]:
    """Return the lines about one request, or [] if the engine does not have this request."""
    lines = []
    for row in engine.requests:
        if row["id"] == name or row["id"].startswith(f"{name}-"):
            lines += [f"{key:12} {value}" for key, value in row.items() if value not in (None, "", [])]
            lines.append(f"{'waits for':12} {waits_for(engine, row)}")
    return lines
