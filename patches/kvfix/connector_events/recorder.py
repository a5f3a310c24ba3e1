"""The flight recorder: the last events of this process, in a bounded queue. Cheap: a tuple per event, no formatting.

Hook calls without an event are only counted: otherwise steps without a change would push the history out of the queue.
"""

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from kvfix.ledger.events import Event
from kvfix.session import session

if TYPE_CHECKING:
    from kvfix.connector_events.watched import WatchedConnector


class Entry(NamedTuple):
    """An event, and the connector and hook that caused it. mono, wall: nanoseconds, see `dump`."""

    mono: int
    wall: int
    connector: int
    hook: str
    event: Event


def add(connector: int, hook: str, event: Event) -> None:
    session.events.append(Entry(time.monotonic_ns(), time.time_ns(), connector, hook, event))


def snapshot() -> list[Entry]:
    """Return the events, oldest first."""
    for _ in range(8):
        with suppress(RuntimeError):  # another thread added an event meanwhile
            return list(session.events)
    return []


def connectors() -> "list[WatchedConnector]":
    """Return every watched connector and scheduler of this process that still exists."""
    return list(session.connectors.values()) if session.connectors is not None else []


def schedulers() -> list[Any]:
    """Return every scheduler of this process that still exists and has run a watched function."""
    return [found for each in list(session.schedulers) if (found := each()) is not None]


def register(watched: "WatchedConnector") -> None:
    if session.connectors is None:
        session.connectors = WeakValueDictionary()
    session.connectors[watched.number] = watched
