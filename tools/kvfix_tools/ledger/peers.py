"""Compare the records of two engines, one of which keeps a request's blocks for the other. Pure, like the ledger.

Two facts order the records without clocks. A lease begins before the router can forward its parameters. A request of
the peer arrives before the release message that it sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvfix.ledger import events as ev
from kvfix_tools.ledger.events import LeaseRead, NotReturned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvfix.ledger.events import Event

#: Maximum nanoseconds until a release message has arrived and the engine, if it makes steps, has read it.
NOTICE = 1_000_000_000


class Kept(NamedTuple):
    """A request whose blocks are kept, from the record of its engine. Times are ns of this engine's clock.

    events: events of the scheduler, in order.
    ended: end of the lease; None if the lease has not ended.
    expired: as in LeaseEnded.
    seen: time of the engine's last step.
    """

    request: str
    events: Sequence[Event]
    ended: int | None
    expired: bool | None
    seen: int


class Reader(NamedTuple):
    """A request of the peer that reads kept blocks, from the record of its own engine.

    loaded: the request has loaded the blocks.
    failed: the load has failed, or the request ended before the blocks were pushed. vLLM then sends no release message.
    done: latest possible time at which the load or the request ended, in ns of the keeping engine's clock. None if a
        load is in flight, the request has not ended, or the difference of the clocks has no bound.
    pushed: as in ReadsFrom.
    """

    request: str
    loaded: bool
    failed: bool
    done: int | None
    pushed: bool = False


def compare(kept: Kept, readers: Sequence[Reader]) -> Iterator[Event]:
    """Yield the events of the kept request for a ledger, with the events of its readers inserted in order."""
    lost = _lost(kept, readers)
    leased = any(isinstance(event, ev.Leased) for event in kept.events)
    read = [each for each in readers if each.loaded and not each.failed]
    reads: list[Event] = [LeaseRead(kept.request, each.request, each.pushed) for each in read]
    ends: list[Event] = [ev.LeaseEnded(kept.request, kept.expired)] if leased and kept.ended is not None else []
    yield from (event for event in kept.events if not isinstance(event, ev.LeaseEnded))
    yield from [*ends, *reads] if lost is None else [*reads, *ends]
    if lost is not None and leased:
        yield NotReturned(kept.request, lost.request, lost.loaded, kept.expired is True)


def _lost(kept: Kept, readers: Sequence[Reader]) -> Reader | None:
    """Return a reader whose release message is missing: all readers were done well before the lease timed out."""
    if kept.expired is False or any(each.failed or each.done is None for each in readers):
        return None
    if kept.ended is not None and kept.expired is None:
        return None
    until = kept.seen if kept.ended is None else kept.ended
    times = [each.done for each in readers if each.done is not None]
    if not times or max(times) + NOTICE >= until:
        return None
    return next((each for each in readers if each.loaded), readers[0])
