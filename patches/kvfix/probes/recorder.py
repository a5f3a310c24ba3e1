"""The flight recorder: the last events of this process, in a ring. Cheap: a tuple per event, nothing is formatted.

Only what happens to a request is kept. A hook that had nothing to tell is counted, or steps without a change would
push the story out of the ring.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from kvfix.ledger.events import Event
    from kvfix.probes.watch import Watch

#: Events that are kept. An event takes about 200 bytes.
SIZE = 8192


class Entry(NamedTuple):
    """An event, told by `hook` of a connector. mono: nanoseconds of the monotonic clock; wall: since 1970."""

    mono: int
    wall: int
    connector: int
    hook: str
    event: Event


ring: deque[Entry] = deque(maxlen=SIZE)
#: Every connector and scheduler that is watched here, by number, as long as it lives.
watches: WeakValueDictionary[int, Watch] = WeakValueDictionary()
numbers = count(1)
#: Counts up with each restart: a watch of an earlier life is not used again.
life = 0


def add(connector: int, hook: str, event: Event) -> None:
    ring.append(Entry(time.monotonic_ns(), time.time_ns(), connector, hook, event))


def restart() -> None:
    """Forget everything."""
    global life
    life += 1
    ring.clear()
    watches.clear()


def snapshot() -> list[Entry]:
    """The ring, the oldest first, while other threads may go on adding to it."""
    for _ in range(8):
        with suppress(RuntimeError):  # it was added to meanwhile
            return list(ring)
    return []


# What the parent saw is the parent's to tell; its connectors are not ours.
os.register_at_fork(after_in_child=restart)
