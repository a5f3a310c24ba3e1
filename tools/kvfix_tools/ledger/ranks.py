"""Compare the scheduler's record with the record of each rank's worker. Pure, like the ledger.

The scheduler's metadata reach every worker completely and in order. The loads and stores of a worker are therefore a
part of the scheduler's sequence. This sequence orders the records without clocks.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from kvfix.ledger import events as ev
from kvfix_tools.ledger.events import RankDiffers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfix.ledger.events import Event


class Compared(NamedTuple):
    """The comparison of a scheduler's record and a rank's record.

    pairs: (index in the scheduler's events, index in the rank's events) of each event in both records, in order.
    differs: (index of the scheduler's event before it, event) for each load that is in one record only.
    unknown: number of the scheduler's loads before the first or after the last pair, and of loads whose request was
        aborted before the rank started them. With `enable_fault_tolerance`, vLLM continues after a step in which a
        rank failed, and aborts all requests (v1/fault_tolerance/engine_core_sentinel.py 0.33.0:90).
    """

    pairs: list[tuple[int, int]]
    differs: list[tuple[int, RankDiffers]]
    unknown: int


def compare(rank: int, scheduler: Sequence[Event], worker: Sequence[Event]) -> Compared:
    """Compare the loads and stores of the scheduler and the rank, in the order of each record."""
    due = [(at, event) for at, event in enumerate(scheduler) if isinstance(event, ev.LoadDue | ev.Stored)]
    started = [(at, event) for at, event in enumerate(worker) if isinstance(event, ev.LoadDue | ev.Stored)]
    anchors = _anchors([_key(event) for _, event in due], [_key(event) for _, event in started])
    pairs = [(due[one][0], started[other][0]) for one, other in anchors]
    differs: list[tuple[int, RankDiffers]] = []
    unknown = 0
    for (one, other), (next_one, next_other) in pairwise(anchors):
        scheduled = Counter(event for _, event in due[one + 1 : next_one] if isinstance(event, ev.LoadDue))
        loaded = Counter(event for _, event in started[other + 1 : next_other] if isinstance(event, ev.LoadDue))
        aborted = {
            event.request
            for event in scheduler[due[one][0] : due[next_one][0]]
            if isinstance(event, ev.Finished) and event.aborted
        }
        missing = list((scheduled - loaded).elements())
        unknown += sum(event.request in aborted for event in missing)
        missing = [event for event in missing if event.request not in aborted]
        for found, is_scheduled in ((missing, True), ((loaded - scheduled).elements(), False)):
            differs += [
                (due[one][0], RankDiffers(event.request, rank, event.start, event.end, is_scheduled)) for event in found
            ]
    first, last = (anchors[0][0], anchors[-1][0]) if anchors else (len(due), -1)
    outside = [event for at, (_, event) in enumerate(due) if not first <= at <= last]
    return Compared(pairs, differs, unknown + sum(isinstance(event, ev.LoadDue) for event in outside))


def _key(event: ev.LoadDue | ev.Stored) -> tuple[str, ...]:
    """Return the part of an event that both records share. Only the scheduler knows `covered` of a store."""
    return (type(event).__name__, *map(str, event[:3]))


def _anchors(due: list[tuple[str, ...]], started: list[tuple[str, ...]]) -> list[tuple[int, int]]:
    """Return pairs of indexes of the same event: those with a unique key in both records, and equal ones next to them.

    If two unique keys have different orders in the two records, the records are of different engines, and no pair is
    certain.
    """
    once = {key for key, count in Counter(due).items() if count == 1}
    once &= {key for key, count in Counter(started).items() if count == 1}
    places = {key: at for at, key in enumerate(started)}
    sure = [(at, places[key]) for at, key in enumerate(due) if key in once]
    if any(other >= next_other for (_, other), (_, next_other) in pairwise(sure)):
        return []
    found = set(sure)
    for one, other in sure:
        for step in (-1, 1):
            here, there = one + step, other + step
            while 0 <= here < len(due) and 0 <= there < len(started) and due[here] == started[there]:
                if (here, there) in found:
                    break
                found.add((here, there))
                here, there = here + step, there + step
    return _increasing(sorted(found))


def _increasing(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Remove pairs that contradict each other, e.g. if one of two equal loads is missing."""
    ones, others = Counter(one for one, _ in pairs), Counter(other for _, other in pairs)
    kept = [(one, other) for one, other in pairs if ones[one] == others[other] == 1]
    return kept if all(a[1] < b[1] for a, b in pairwise(kept)) else []
