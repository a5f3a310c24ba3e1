"""Combine the recordings of several engines, and find the requests that read blocks of another engine.

The `kv_transfer_params` of a decode request name the engine and the request whose blocks the decode request reads. The
event ReadsFrom records the two names. Two facts order the events of two engines whose clocks differ. First, a lease
begins before the router forwards the parameters. Second, a release message ends a lease after decode got the request.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvfix.connector_events.recorder import Entry
from kvfix.ledger import Finding, Ledger
from kvfix.ledger import events as ev
from kvfix_tools.engine_recordings import Clock, Engine, Part
from kvfix_tools.ledger import LeaseRead, NotReturned

#: vLLM's request id is cmpl-ID-0 or chatcmpl-ID, followed by a random suffix. ID is the router's X-Request-Id.
_OF_CLIENT = re.compile(r"(?:chat)?cmpl-(.+?)(?:-\d+)?(?:-[0-9a-f]{8})?$")
#: Maximum nanoseconds between sending a release message and its arrival in an engine that runs steps.
NOTICE = 1_000_000_000


class Link(NamedTuple):
    """The decode request `reader` of engine `reads` loads blocks of the prefill request `kept` of engine `keeps`."""

    reads: Engine
    reader: str
    keeps: Engine
    kept: str


class Reader(NamedTuple):
    """A request that reads blocks of another engine. All fields are from the recording of the reader's own engine."""

    request: str
    loaded: bool
    failed: bool  # the load failed, or the request ended before the push. In both cases vLLM sends no release message
    #: The latest possible end of the load (or of a request without a load), in ns of the keeping engine's clock. None
    #: if the reader's recording has no end, or if the clock difference has no known lower bound.
    done: int | None
    pushed: bool  # True: prefill writes the blocks (push)


class RouterLog:
    """The log of a router. kvfix reports line numbers but no text of the log, because the log may hold prompts."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._lines = path.read_bytes().splitlines()

    def lines(self, request: str) -> list[int]:
        """Return the numbers of the log lines with the router's id of a request. vLLM's request id contains this id."""
        found = _OF_CLIENT.match(request)
        wanted = (found[1] if found else request).encode()
        return [number for number, line in enumerate(self._lines, 1) if wanted in line]

    def text(self, request: str) -> str:
        lines = ", ".join(map(str, self.lines(request)))
        if not lines:
            return f"The router's log {self._name} does not name the request"
        return f"The router's log names the request in line {lines} of {self._name}"


class Peers:
    def __init__(self, engines: Sequence[Engine], router: RouterLog | None = None) -> None:
        self.engines = engines
        self.router = router
        self.links: list[Link] = []
        #: {(reading engine, engine without a recording): number of requests that read blocks of the second engine}
        self.missing: Counter[tuple[str, str]] = Counter()
        names = {(engine.name, event.name): event.request for engine in engines for event in _events(engine, ev.Leased)}
        for reads in engines:
            for event in dict.fromkeys(_events(reads, ev.ReadsFrom)):
                keeps = self._named(event.engine, reads)
                if keeps is None:
                    self.missing[reads.name, event.engine] += 1
                else:
                    kept = names.get((keeps.name, event.peer), event.peer)
                    self.links.append(Link(reads, event.request, keeps, kept))
        #: clock(reads, keeps): how far the scheduler's clock of `reads` is ahead of the scheduler's clock of `keeps`.
        self.clock = functools.cache(self._clock)

    def _named(self, name: str, reads: Engine) -> Engine | None:
        """Return a replica of the engine with this name, or None. The replica must have a recorded scheduler."""
        found = [each for each in self.engines if each.name.rpartition(".")[0] == name and each.scheduler is not None]
        return next((each for each in found if each.connector == reads.connector), found[0] if found else None)

    def _clock(self, reads: Engine, keeps: Engine) -> Clock:
        here, there = _scheduler(keeps), _scheduler(reads)
        if here.boot and here.boot == there.boot:
            return Clock(0, 0, 0)
        lows, highs = [], []
        links = [link for link in self.links if link.reads is reads and link.keeps is keeps]
        readers = Counter(link.kept for link in links)
        for link in links:
            leased = _first(_of_scheduler(keeps, link.kept), ev.Leased)
            named = _first(_of_scheduler(reads, link.reader), ev.ReadsFrom)
            if leased is not None and named is not None:
                highs.append(named.mono - leased.mono)
            told = _first(_of_scheduler(reads, link.reader), ev.LoadDue) or named
            ended, expired = _end(keeps.history(link.kept))
            if expired is False and ended is not None and told is not None and readers[link.kept] == 1:
                lows.append(told.mono - ended)
        return Clock.within(there.mono_at_wall_0 - here.mono_at_wall_0, lows, highs)

    def findings(self) -> Iterator[tuple[Finding, Engine, list[tuple[str, Entry]]]]:
        """Yield each finding, even if its verdict is "unknown", as (finding, engine that keeps the blocks, history)."""
        by_kept: dict[tuple[str, str], list[Link]] = {}
        for link in self.links:
            by_kept.setdefault((link.keeps.name, link.kept), []).append(link)
        for links in by_kept.values():
            keeps, kept = links[0].keeps, links[0].kept
            ledger = Ledger()
            for event in _with_readers(keeps, kept, [self._reader(link) for link in links]):
                findings = ledger.feed(event)
                if isinstance(event, LeaseRead | NotReturned):
                    yield from ((finding, keeps, self.history(links)) for finding in findings)

    def _reader(self, link: Link) -> Reader:
        own = _of_scheduler(link.reads, link.reader)
        loads = [each for each in own if isinstance(each.event, ev.LoadDue)]
        loaded = [each for each in own if isinstance(each.event, ev.Loaded)]
        pushed = any(isinstance(each.event, ev.ReadsFrom) and each.event.pushed for each in own)
        failed = any(isinstance(each.event, ev.LoadFailed) for each in own) or (pushed and not loaded)
        done = loaded if loads else [each for each in own if isinstance(each.event, ev.Finished)]
        low = self.clock(link.reads, link.keeps).low
        at = done[0].mono - low if done and low is not None else None
        return Reader(link.reader, bool(loaded), failed, at, pushed)

    def history(self, links: Sequence[Link]) -> list[tuple[str, Entry]]:
        """Return the entries of a prefill request and its readers. `mono` is by the clock of the prefill engine."""
        found = [(links[0].keeps, *each) for each in links[0].keeps.history(links[0].kept)]
        for link in links:
            ahead = self.clock(link.reads, link.keeps).ahead
            for part, entry in link.reads.history(link.reader):
                found.append((link.reads, part, entry._replace(mono=entry.mono - ahead)))
        found.sort(key=lambda each: each[2].mono)
        return [(f"engine {engine.name}, {part.label}", entry) for engine, part, entry in found]

    def summary(self, engine: Engine) -> list[str]:
        lines = [
            f"  {count} requests read blocks of engine {name}, but no recording of {name} was given"
            for (reads, name), count in self.missing.items()
            if reads == engine.name
        ]
        unread = {event.request for event in _events(engine, ev.Leased)}
        unread -= {link.kept for link in self.links if link.keeps is engine}
        if unread:
            named = sum(bool(self.router.lines(each)) for each in unread) if self.router is not None else None
            by_router = "" if named is None else f"; the router's log names {named} of these requests"
            kept = f"this engine keeps blocks of {len(unread)} requests for a peer"
            lines.append(f"  {kept}, but no recorded request reads the blocks{by_router}")
        for reads in {link.reads.name: link.reads for link in self.links if link.keeps is engine}.values():
            count = len({link.reader for link in self.links if link.keeps is engine and link.reads is reads})
            clock = self.clock(reads, engine)
            read = f"{count} requests of engine {reads.name} read blocks of this engine"
            lines.append(f"  {read}; the clock of {reads.name}: " + clock.text("this engine's"))
            if clock.low is None:
                lines.append("  kvfix cannot tell whether the blocks were released: no release message is on record")
            elif clock.high is not None and clock.low > clock.high:
                lines.append("  the two engines' records contradict each other: the order of the events is unknown")
        return lines


def _with_readers(engine: Engine, kept: str, readers: Sequence[Reader]) -> Iterator[ev.Event]:
    """Yield a request's events, its lease's end, and its reads. If a release message is missing, reads come first."""
    ended, expired = _end(engine.history(kept))
    events = [entry.event for entry in _of_scheduler(engine, kept)]
    leased = any(isinstance(event, ev.Leased) for event in events)
    read = [each for each in readers if each.loaded and not each.failed]
    reads: list[ev.Event] = [LeaseRead(kept, each.request, each.pushed) for each in read]
    ends: list[ev.Event] = [ev.LeaseEnded(kept, expired)] if leased and ended is not None else []
    lost = None
    if ended is None or expired:
        lost = _lost(readers, int(_scheduler(engine).line.get("stepped") or 0) if ended is None else ended)
    yield from (event for event in events if not isinstance(event, ev.LeaseEnded))
    yield from [*ends, *reads] if lost is None else [*reads, *ends]
    if lost is not None and leased:
        yield NotReturned(kept, lost.request, lost.loaded, expired is True)


def _lost(readers: Sequence[Reader], until: int) -> Reader | None:
    """Return a reader whose release message is missing. Return None if the message may still be on its way."""
    times = [each.done for each in readers if each.done is not None and not each.failed]
    if not times or len(times) < len(readers) or max(times) + NOTICE >= until:
        return None
    return next((each for each in readers if each.loaded), readers[0])


def _scheduler(engine: Engine) -> Part:
    assert engine.scheduler is not None
    return engine.scheduler


def _of_scheduler(engine: Engine, request: str) -> list[Entry]:
    return [entry for part, entry in engine.history(request) if part.is_scheduler]


def _events(engine: Engine, kind: Any) -> list[Any]:
    entries = engine.scheduler.entries if engine.scheduler is not None else []
    return [entry.event for entry in entries if isinstance(entry.event, kind)]


def _first(entries: list[Entry], kind: type) -> Entry | None:
    return next((each for each in entries if isinstance(each.event, kind)), None)


def _end(entries: list[tuple[Part, Entry]]) -> tuple[int | None, bool | None]:
    """Return (end of the lease by the scheduler's clock, True if the lease timed out). Only workers record timeouts."""
    ends: list[tuple[Part, Any]] = [each for each in entries if isinstance(each[1].event, ev.LeaseEnded)]
    how = [entry.event.expired for part, entry in ends if not part.is_scheduler]
    expired = True if True in how else False if how and all(each is False for each in how) else None
    return min((entry.mono for _, entry in ends), default=None), expired
