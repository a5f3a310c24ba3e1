"""Compares the records of two engines, of which one keeps a request's blocks for the other. Pure, like the ledger.

What is certain orders them, whatever their clocks show: a lease begins before the router can hand its parameters on,
and a notice comes after the request that sends it has arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvfix.ledger import events as ev
from kvfix_tools.ledger.events import LeaseRead, NotReturned

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvfix.ledger.events import Event

#: Nanoseconds after which a notice is there, and seen by an engine that makes steps.
NOTICE = 1_000_000_000


class Kept(NamedTuple):
    """A request whose blocks are kept, as the record of its engine has it; times in ns of that engine's clock.

    events: the scheduler's, in order. ended: when its lease has ended; None: it goes on. expired: how it has ended, as
    in LeaseEnded. seen: when the engine has made its last step.
    """

    request: str
    events: Sequence[Event]
    ended: int | None
    expired: bool | None
    seen: int


class Reader(NamedTuple):
    """A request of the peer that names those blocks, as the record of its own engine has it.

    loaded: it has loaded them. failed: its load has failed, or it has ended before they were pushed: vLLM gives nothing
    back. pushed: as in ReadsFrom. done: when it has
    loaded them or ended, in ns of the keeping engine's clock and at the latest. None: a load of it is in flight, it has
    not ended, or nothing bounds the clock.
    """

    request: str
    loaded: bool
    failed: bool
    done: int | None
    pushed: bool = False


def compare(kept: Kept, readers: Sequence[Reader]) -> Iterator[Event]:
    """The events of the kept request, with those that come of its readers in their place, for a ledger."""
    lost = _lost(kept, readers)
    leased = False
    for event in kept.events:
        leased = leased or isinstance(event, ev.Leased)
        if not isinstance(event, ev.LeaseEnded):
            yield event
    if lost is not None:
        yield from _reads(kept, readers)
    if leased and kept.ended is not None:
        yield ev.LeaseEnded(kept.request, kept.expired)
    if lost is None:
        yield from _reads(kept, readers)
    elif leased:
        yield NotReturned(kept.request, lost.request, lost.loaded, kept.expired is True)


def _reads(kept: Kept, readers: Iterable[Reader]) -> Iterator[Event]:
    for each in readers:
        if each.loaded and not each.failed:
            yield LeaseRead(kept.request, each.request, each.pushed)


def _lost(kept: Kept, readers: Sequence[Reader]) -> Reader | None:
    """The reader whose notice has not come: all are done, long before the lease ended by its time, or goes on still."""
    if kept.expired is False or any(each.failed or each.done is None for each in readers):
        return None
    if kept.ended is not None and kept.expired is None:
        return None
    until = kept.seen if kept.ended is None else kept.ended
    times = [each.done for each in readers if each.done is not None]
    if not times or max(times) + NOTICE >= until:
        return None
    return next((each for each in readers if each.loaded), readers[0])
