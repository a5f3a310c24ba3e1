"""LMCache's asynchronous loading in the lab: the real lookup client and server, over queues instead of sockets.

With `enable_async_loading` a lookup is sent and answered later; until then the connector answers "not known yet", and
the worker fetches the chunks ahead of the load. Real: both ends' message handling, the client's states, time-outs and
clean-up. Replaced: sockets, threads, and where the fetched chunks are kept. Each end runs when the lab calls it, never
by itself: the same schedule gives the same run.
"""

from __future__ import annotations

import importlib
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvfix_tools.lab.connector import CLIENT
from kvfix_tools.lab.v1 import V1, CacheEngine, tags_of


class MessageQueue:
    """One direction between client and server. Read by the loop of `reader`, which ends with the last message."""

    def __init__(self, reader: Any) -> None:
        self.waiting: deque[bytes] = deque()
        self.reader = reader

    def send(self, message: bytes, copy: bool = True) -> None:
        self.waiting.append(bytes(message))

    def recv(self, copy: bool = True) -> bytes:
        message = self.waiting.popleft()
        if not self.waiting:
            self.reader.running = False
        return message

    def deliver(self, loop: Callable[[], None]) -> None:
        """Run the reader's own loop over what waits."""
        if self.waiting:
            self.reader.running = True
            loop()

    def close(self, linger: int = 0) -> None: ...


class PrefetchingEngine(CacheEngine):
    """A worker's cache with asynchronous loading: a lookup that hits has its chunks fetched, for one load.

    Chunks are taken as they are when the lookup is answered: a later eviction does not touch them, as in LMCache,
    where a fetched object is referenced. `delay`: steps until a lookup is answered. `fetched`: LMCache's events of
    type LOADING that are done.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.delay = 0
        #: So many of the next lookups are never answered.
        self.lost = 0
        self.fetched: dict[str, dict[object, list[int]]] = {}
        self.respond: Callable[[str, int], None] = lambda *_: None
        #: Lookups that were never answered, or not yet.
        self.unanswered: set[str] = set()
        self._asked: list[tuple[int, str, list[Any], list[int]]] = []
        events: Any = importlib.import_module("lmcache.v1.event_manager")
        #: To 0.3.15 a load takes the event away; since 0.4.1 it stays until the lookup is unpinned (LMCache PR 2559).
        self._load_takes = not hasattr(events.EventManager, "get_event_future")
        # What LMCacheEngine.lookup_unpin reads of itself; the last with the patch for upstream of KVF013.
        self.lookup_pins = {}
        self._consumed_prefetches: set[str] = set()
        self.async_loading = True
        status = events.EventStatus
        self.event_manager = SimpleNamespace(
            get_event_status=lambda kind, name: status.DONE if name in self.fetched else status.NOT_FOUND
        )

    def async_lookup_and_prefetch(self, lookup_id: str, hashes: Any, offsets: Any, **more: Any) -> None:
        self.unanswered.add(lookup_id)
        if self.lost > 0:
            self.lost -= 1
            self.events.lookup_unanswered()
        else:
            tags = tags_of(more.get("request_configs"))
            self._asked.append((self.delay, lookup_id, [(key, *tags) for key in hashes], list(offsets)))

    def answer(self) -> None:
        """A step has passed: fetch for the lookups that are due and answer the scheduler."""
        due = [each for each in self._asked if each[0] <= 0]
        self._asked = [(delay - 1, *rest) for delay, *rest in self._asked if delay > 0]  # type: ignore[misc]
        for _, name, keys, offsets in due:
            found = self.cache.pinned_prefix(keys, name)
            self.cache.unpin(name)  # what is fetched is referenced, not looked for again
            if found:
                self.fetched[name] = {key: list(self.cache.get(key) or ()) for key in keys[:found]}
            self.unanswered.discard(name)
            self.events.found(name, sum(offsets[:found]), self.rank)
            self.respond(name, sum(offsets[:found]))

    def retrieve(self, tokens: Any, mask: Any = None, **more: Any) -> Any:
        name = str(more["req_id"])
        if name not in self.fetched:
            # EventManager.get_event_future / pop_event (0.5.6 event_manager.py:142, :61)
            raise AssertionError(f"Event {name} of type EventType.LOADING is not done or not found.")
        moved = super().retrieve(tokens, mask, **more)
        if self._load_takes:
            del self.fetched[name]
        return moved

    def chunk(self, name: str, key: object) -> list[int] | None:
        return self.fetched[name].get(key)

    def lookup_unpin(self, lookup_ids: str | list[str]) -> None:
        """The real engine's own code decides whether what was fetched is released."""
        real: Any = importlib.import_module("lmcache.v1.cache_engine").LMCacheEngine
        for name in [lookup_ids] if isinstance(lookup_ids, str) else lookup_ids:
            real.lookup_unpin(self, name)

    def cleanup_memory_objs(self, lookup_id: str) -> None:
        """The server's answer to a clean-up message of the client: an aborted lookup's chunks are released."""
        self.fetched.pop(lookup_id, None)


class AsyncV1(V1):
    """The v1 connector with `enable_async_loading`: the client in the scheduler, and a server over each rank's cache.

    `now`: the time of day at all ends, in seconds. Sleeping between polls makes it pass, and so does `wait`.
    """

    engine = PrefetchingEngine
    cache_engines: list[PrefetchingEngine]  # type: ignore[assignment]

    def _join(self, client: Any) -> None:
        module: Any = sys.modules[CLIENT]
        self.client = client
        self.to_scheduler, self.to_workers = MessageQueue(client), []
        for engine in self.cache_engines:
            server = module.LMCacheAsyncLookupServer.__new__(module.LMCacheAsyncLookupServer)
            server.lmcache_engine = engine
            server.pull_socket, server.push_socket = MessageQueue(server), self.to_scheduler
            self.to_workers.append(server.pull_socket)
            engine.respond = server.send_response_to_scheduler
        client.push_sockets, client.pull_socket = list(self.to_workers), self.to_scheduler
        self.sockets = []
        self.now = 0.0
        module.time = SimpleNamespace(time=lambda: self.now, sleep=self.wait)

    def wait(self, seconds: float) -> None:
        """A step: so much time passes for lookups, which are given up after `lookup_timeout_ms`."""
        self.now += seconds

    def tick(self) -> None:
        """A step takes a tenth of a second of the lookups' time: one that is never answered is given up after 30."""
        super().tick()
        self.wait(0.1)

    def exchange(self) -> None:
        """First messages to the workers, their answers, messages to the scheduler."""
        for queue, engine in zip(self.to_workers, self.cache_engines, strict=True):
            queue.deliver(queue.reader.process_requests_from_scheduler)
            engine.answer()
        self.to_scheduler.deliver(self.client.process_responses_from_workers)

    def slow_lookups(self, steps: int) -> None:
        """A step: lookups made from now on are answered so many steps later than they could be.

        The first rank answers at once: where there are several, one waits for another.
        """
        for engine in self.cache_engines[1:] or self.cache_engines:
            engine.delay = steps

    def lookups_fail(self, how_many: int) -> None:
        """A step: so many of the next lookups are never answered by the last rank."""
        self.cache_engines[-1].lost = how_many

    def looking(self) -> set[str]:
        first, *others = (each.unanswered for each in self.cache_engines)
        return first.union(*others) if others else first

    def in_flight(self, request: str) -> set[str]:
        looking = {"looking"} if request in self.looking() else set()
        return looking | super().in_flight(request)

    def kept(self) -> dict[str, set[str]]:
        """A finished lookup of an aborted request is cleaned up by the next lookup of any other, and so is not counted,
        nor is one that waits for an answer; an aborted id without either is kept for ever."""
        status, unanswered = self.client.reqs_status, self.looking()
        aborted = set(getattr(self.client, "aborted_lookups", ()))
        to_clean = {name for name in aborted if status.get(name) is not None} | unanswered
        return {
            **super().kept(),
            "lookup_client.reqs_status": set(status) - to_clean,
            "lookup_client.aborted_lookups": aborted - set(status) - unanswered,
            "fetched chunks of the worker": set().union(*(each.fetched for each in self.cache_engines)) - to_clean,
        }
