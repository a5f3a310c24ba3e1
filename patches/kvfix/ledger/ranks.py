"""One engine on record in several processes: the scheduler's, and a worker's for each rank. Pure, as the ledger is.

What the scheduler's metadata say reaches every worker, whole and in order. So a worker's loads and stores are a stretch
of the scheduler's own sequence, and that orders their records, whatever their clocks say.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from kvfix.ledger import events as ev

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfix.ledger.events import Event


class Compared(NamedTuple):
    """pairs: (place in the scheduler's events, place in the rank's) of what both have on record, in order.

    differs: what is on record once only, each with the place in the scheduler's events behind which it belongs.
    unknown: loads of the scheduler that lie outside of what the rank has on record for certain.
    """

    pairs: list[tuple[int, int]]
    differs: list[tuple[int, ev.RankDiffers]]
    unknown: int


def compare(rank: int, scheduler: Sequence[Event], worker: Sequence[Event]) -> Compared:
    """Loads and stores of both, each in the order in which its process told them."""
    told = [(at, event) for at, event in enumerate(scheduler) if isinstance(event, ev.LoadDue | ev.Stored)]
    begun = [(at, event) for at, event in enumerate(worker) if isinstance(event, ev.LoadDue | ev.Stored)]
    anchors = _anchors([_key(event) for _, event in told], [_key(event) for _, event in begun])
    pairs = [(told[one][0], begun[other][0]) for one, other in anchors]
    differs: list[tuple[int, ev.RankDiffers]] = []
    for (one, other), (next_one, next_other) in pairwise(anchors):
        due = Counter(event for _, event in told[one + 1 : next_one] if isinstance(event, ev.LoadDue))
        done = Counter(event for _, event in begun[other + 1 : next_other] if isinstance(event, ev.LoadDue))
        for found, is_told in ((due - done, True), (done - due, False)):
            differs += [
                (told[one][0], ev.RankDiffers(event.request, rank, event.start, event.end, is_told))
                for event in found.elements()
            ]
    first, last = (anchors[0][0], anchors[-1][0]) if anchors else (len(told), -1)
    outside = [event for at, (_, event) in enumerate(told) if not first <= at <= last]
    return Compared(pairs, differs, sum(isinstance(event, ev.LoadDue) for event in outside))


def _key(event: Event) -> tuple[str, ...]:
    """What is the same in both records: `covered` of a store is the scheduler's alone."""
    return (type(event).__name__, *map(str, event[:3]))


def _anchors(told: list[tuple[str, ...]], begun: list[tuple[str, ...]]) -> list[tuple[int, int]]:
    """Places of what is certainly the same: on record once in either, then its neighbours as far as they agree.

    Should two of them stand in another order, the records are not of one engine, and nothing is certain.
    """
    once = {key for key, count in Counter(told).items() if count == 1}
    once &= {key for key, count in Counter(begun).items() if count == 1}
    places = {key: at for at, key in enumerate(begun)}
    sure = [(at, places[key]) for at, key in enumerate(told) if key in once]
    if any(other >= next_other for (_, other), (_, next_other) in pairwise(sure)):
        return []
    found = set(sure)
    for one, other in sure:
        for step in (-1, 1):
            here, there = one + step, other + step
            while 0 <= here < len(told) and 0 <= there < len(begun) and told[here] == begun[there]:
                if (here, there) in found:
                    break
                found.add((here, there))
                here, there = here + step, there + step
    return _increasing(sorted(found))


def _increasing(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without those that their neighbours contradict, as where one of two equal loads is missing."""
    ones, others = Counter(one for one, _ in pairs), Counter(other for _, other in pairs)
    kept = [(one, other) for one, other in pairs if ones[one] == others[other] == 1]
    return kept if all(a[1] < b[1] for a, b in pairwise(kept)) else []
