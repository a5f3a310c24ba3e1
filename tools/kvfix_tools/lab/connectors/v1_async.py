"""LMCache's asynchronous loading in the lab, with LMCache's own lookup client and server. Queues replace the sockets.

With `enable_async_loading`, a worker fetches the chunks and then answers the lookup. Until this answer, vLLM gets
"not known yet". Client and server run only when the lab calls them, so runs of the same steps do not differ.
"""

import importlib
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvfix_tools.lab.connectors.connector import CLIENT
from kvfix_tools.lab.connectors.v1 import V1, CacheEngine, tags_of


class MessageQueue:
    """A queue for one direction between client and server. The reader's loop ends when the queue is empty."""

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
        """Run the reader's own loop for the waiting messages."""
        if self.waiting:
            self.reader.running = True
            loop()

    def close(self, linger: int = 0) -> None: ...


class PrefetchingEngine(CacheEngine):
    """A worker's cache with asynchronous loading. A lookup with a hit fetches the chunks of the hit for one load.

    An eviction does not change fetched chunks, because LMCache has references to them. delay: steps from lookup to
    answer. fetched: {lookup: chunks}. LMCache keeps fetched chunks in finished events of type LOADING.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.delay = 0
        #: The worker does not answer the next `lost` lookups.
        self.lost = 0
        self.fetched: dict[str, dict[object, list[int]]] = {}
        self.respond: Callable[[str, int], None] = lambda *_: None
        self.unanswered: set[str] = set()
        self._asked: list[tuple[int, str, list[Any], list[int]]] = []
        events: Any = importlib.import_module("lmcache.v1.event_manager")
        #: True if a load releases fetched chunks (up to 0.3.15). Since 0.4.1, `lookup_unpin` releases chunks (PR 2559).
        self._load_takes = not hasattr(events.EventManager, "get_event_future")
        # Attributes that LMCacheEngine.lookup_unpin reads. The upstream patch of KVF013 reads `_consumed_prefetches`.
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
            self.events.counts["lookups_unanswered"] += 1
        else:
            tags = tags_of(more.get("request_configs"))
            self._asked.append((self.delay, lookup_id, [(key, *tags) for key in hashes], list(offsets)))

    def answer(self) -> None:
        """Fetch the chunks of lookups that are due, and answer the scheduler."""
        due = [each for each in self._asked if each[0] <= 0]
        self._asked = [(delay - 1, *rest) for delay, *rest in self._asked if delay > 0]  # type: ignore[misc]
        for _, name, keys, offsets in due:
            found = self.cache.pinned_prefix(keys, name)
            self.cache.unpin(name)  # references to the fetched chunks replace the pin
            if found:
                self.fetched[name] = {key: list(self.cache.get(key) or ()) for key in keys[:found]}
            self.unanswered.discard(name)
            self.events.found(name, sum(offsets[:found]), self.rank)
            self.respond(name, sum(offsets[:found]))

    def retrieve(self, tokens: Any, mask: Any = None, **more: Any) -> Any:
        name = str(more["req_id"])
        if name not in self.fetched:
            # the error of EventManager.get_event_future and pop_event (0.5.6 event_manager.py:142, :63)
            raise AssertionError(f"Event {name} of type EventType.LOADING is not done or not found.")
        moved = super().retrieve(tokens, mask, **more)
        if self._load_takes:
            del self.fetched[name]
        return moved

    def chunk(self, name: str, key: object) -> list[int] | None:
        return self.fetched[name].get(key)

    def lookup_unpin(self, lookup_ids: str | list[str]) -> None:
        """Let the real engine's code decide which fetched chunks are released."""
        real: Any = importlib.import_module("lmcache.v1.cache_engine").LMCacheEngine
        for name in [lookup_ids] if isinstance(lookup_ids, str) else lookup_ids:
            real.lookup_unpin(self, name)

    def cleanup_memory_objs(self, lookup_id: str) -> None:
        """Release a lookup's chunks. The lookup server and, since LMCache 0.4.1, `lookup_unpin` call this method."""
        self.fetched.pop(lookup_id, None)


class AsyncV1(V1):
    """V1 with `enable_async_loading`, a lookup client, and a lookup server for each rank. now: LMCache's time in s."""

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
        """Let `seconds` seconds pass. Lookups time out after `lookup_timeout_ms`."""
        self.now += seconds

    def tick(self) -> None:
        super().tick()
        self.wait(0.1)

    def exchange(self) -> None:
        """Deliver messages to the workers, let the workers answer, and deliver the answers to the scheduler."""
        for queue, engine in zip(self.to_workers, self.cache_engines, strict=True):
            queue.deliver(queue.reader.process_requests_from_scheduler)
            engine.answer()
        self.to_scheduler.deliver(self.client.process_responses_from_workers)

    def slow_lookups(self, steps: int) -> None:
        """Delay the answers to later lookups by `steps` steps. If there are several ranks, rank 0 answers at once."""
        for engine in self.cache_engines[1:] or self.cache_engines:
            engine.delay = steps

    def lookups_fail(self, how_many: int) -> None:
        """Let the last rank never answer the next `how_many` lookups."""
        self.cache_engines[-1].lost = how_many

    def looking(self) -> set[str]:
        return set().union(*(each.unanswered for each in self.cache_engines))

    def kept(self) -> dict[str, set[str]]:
        """Return the kept state. Omit unanswered lookups, and aborted lookups whose state the next lookup removes."""
        status, unanswered = self.client.reqs_status, self.looking()
        aborted = set(getattr(self.client, "aborted_lookups", ()))
        to_clean = {name for name in aborted if status.get(name) is not None} | unanswered
        return {
            **super().kept(),
            "lookup_client.reqs_status": set(status) - to_clean,
            "lookup_client.aborted_lookups": aborted - set(status) - unanswered,
            "fetched chunks of the worker": set().union(*(each.fetched for each in self.cache_engines)) - to_clean,
        }
