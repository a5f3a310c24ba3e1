"""In place of `lmcache server`, its client and the transfer context: lookups that lock, loads, stores, and a clock.

Whatever takes some steps is done `delay` steps after it was asked for, or at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvfix_tools.lab import releases
from kvfix_tools.lab.memory import Cache, Slots
from kvfix_tools.lab.mp_chunks import Chunks
from kvfix_tools.lab.options import Options

if TYPE_CHECKING:
    from kvfix_tools.lab.request_events import RequestEvents


class Heartbeat:
    """In place of LMCache's HeartbeatThread: it beats once in each step."""

    def __init__(self, server: Server, health_event: Any, instance_id: int | None = None, **more: Any) -> None:
        self._server = server
        self._event = health_event
        self.is_of_worker = instance_id is not None
        self.stop_requested = False
        self._recover: Callable[[], bool] = lambda: True

    def register_recover_callback(self, callback: Callable[[], bool]) -> None:
        self._recover = callback

    def start(self) -> None:
        self._server.heartbeats.append(self)

    def stop(self, *_: Any, **__: Any) -> None:
        self.stop_requested = True

    def beat(self) -> None:
        if not self._event.is_set() and self._recover():
            self._event.set()


class Server:
    """What LMCache's adapters ask of their client and of their transfer context is answered under its own names.

    Each load and store goes to `events`.
    """

    events: RequestEvents

    def __init__(self, slots: Slots, cache: Cache, options: Options) -> None:
        from lmcache.v1.multiprocess.futures import MessagingFuture

        server = self

        class Future(MessagingFuture):  # type: ignore[misc]
            """To wait for it lets time pass: what is in flight is done, in its order, until this is."""

            def wait(self, timeout: float | None = None) -> bool:
                while not self.query() and server._later:
                    server._later.popleft()[-1]()
                return bool(super().wait(0))

            def to_cuda_future(self, device: Any = None) -> Any:
                """Here a transfer is done when its future is."""
                return self

        self._future = Future
        self.chunks = Chunks(slots, cache, options)
        self.chunk_size = options.chunk_size
        self._delay = options.delay
        self._now = 0
        #: When it is due, whether it is a load, and what is done then.
        self._later: deque[tuple[int, bool, Callable[[], None]]] = deque()
        #: So many of the next lookups are not answered.
        self.unanswered = 0
        self.heartbeats: list[Heartbeat] = []
        #: Whether the server knows the worker's KV memory.
        self._registered = True
        #: Requests whose next load fails.
        self.failing: dict[str, int] = {}
        self.loading: set[str] = set()
        #: request -> stores in flight
        self.storing: Counter[str] = Counter()
        #: request -> chunks found, until that is answered; None: the prefetch is in flight
        self._hits: dict[str, int | None] = {}

    # ------------------------------------------------------------------ time

    def tick(self) -> None:
        """A step of the engine has begun: what is due by now happens."""
        self._now += 1
        for heartbeat in self.heartbeats:
            heartbeat.beat()
        while self._later and self._later[0][0] <= self._now:
            self._later.popleft()[-1]()

    @property
    def busy(self) -> int:
        return len(self._later)

    def _answer(self, result: Any) -> Any:
        future = self._future()
        future.set_result(result)
        return future

    def _answer_later(self, action: Callable[[], Any], is_load: bool = False) -> Any:
        """A future of what `action` returns when it is due."""
        if not self._delay:
            return self._answer(action())
        future = self._future()
        self._later.append((self._now + self._delay, is_load, lambda: future.set_result(action())))
        return future

    # ------------------------------------------------------------------ lookups and their locks

    def _keys_from_start(self, key: Any) -> list[Any]:
        """Keys of the chunks that LMCache's key of a whole transfer stands for."""
        return self.chunks.keys(key.token_ids, key.end, key.cache_salt)[0][key.start // self.chunk_size :]

    def is_looking(self, request_id: str) -> bool:
        return self._hits.get(request_id, 0) is None

    def lookup(self, key: Any, tp_size: int) -> Any:
        if self.unanswered > 0:
            self.unanswered -= 1
            self.events.lookup_unanswered()
            self._hits[key.request_id] = 0
            return self._answer(None)

        self._hits[key.request_id] = None

        def prefetch() -> None:
            keys, _ = self.chunks.keys(key.token_ids, key.end, key.cache_salt)
            self._hits[key.request_id] = self.chunks.lock(keys, key.request_id)

        self._answer_later(prefetch)
        return self._answer(None)

    def query_prefetch_status(self, request_id: str) -> Any:
        found = self._hits.get(request_id, 0)
        if found is not None:
            self._hits.pop(request_id, None)  # it is answered once
        return self._answer(found)

    def free_lookup_locks(self, key: Any, tp_size: int) -> Any:
        self.chunks.unlock(key.request_id, self._keys_from_start(key))
        return self._answer(None)

    # ------------------------------------------------------------------ other questions of the client

    def get_chunk_size(self) -> Any:
        return self._answer(self.chunk_size)

    def get_experimental(self) -> Any:
        return self._answer([])

    def end_session(self, *args: Any) -> Any:
        """A prefetch in flight goes on, and locks what it finds (modules/lookup.py 0.5.6:462)."""
        return self._answer(None)

    report_block_allocation = end_session

    def close(self) -> None:
        """The lab's server ends with its engine."""

    def clear(self, force: bool = False) -> Any:
        """All chunks go but those with a read lock, which are in use (v1/distributed/storage_manager.py 0.5.6:1244)."""
        self.chunks.cache.evict(len(self.chunks.cache))
        return self._answer(None)

    # ------------------------------------------------------------------ transfers

    def register(self, *args: Any, **more: Any) -> Any:
        self._registered = True
        return self._answer(None)

    def create_recorded_event(self) -> Any:
        return None

    def submit_store(self, request_id: str, key: Any, *rest: Any, **more: Any) -> Any:
        groups, counts = _block_ids(rest), self.events.counts
        self.events.stored(request_id, list(key.token_ids), key.start, key.end)
        self.storing[request_id] += 1

        def store() -> bool:
            self.storing[request_id] -= 1
            if not self._registered:
                return False
            chunks, right = self._keys_from_start(key), self.events.right(request_id)
            if not self.chunks.covered(groups, len(chunks)):
                return False
            counts["stores_of_groups"] += len(groups) > 1
            left_out = self.chunks.not_stored(groups, len(chunks))
            for number, chunk in enumerate(chunks):
                place = number + key.start // self.chunk_size
                for stored in self.chunks.objects:
                    if left_out[stored.number][number]:
                        counts["null_objects_left_out"] += 1
                        continue
                    read, null = self.chunks.read(stored, groups, number)
                    if read != self.chunks.right(stored, right, place):
                        message = f"other KV than that of tokens {place * self.chunk_size} on is stored under their key"
                        self.events.wrong_content(request_id, message + ", from null blocks" * null)
                    self.chunks.cache[stored.key(chunk)] = read
            return True

        return self._answer_later(store)

    def submit_retrieve(self, request_id: str, key: Any, *rest: Any, skip_first_n_tokens: int = 0, **more: Any) -> Any:
        groups = _block_ids(rest)
        self.loading.add(request_id)

        def load() -> bool:
            self.loading.discard(request_id)
            wanted = self._keys_from_start(key)
            fails = request_id in self.failing or not self._registered
            self.failing.pop(request_id, None)
            done = not fails and self.chunks.load(groups, wanted, skip_first_n_tokens)
            self.chunks.unlock(request_id, wanted)
            if not done:
                self.events.loaded(request_id, 0, 0)
                return False
            self.events.counts["loads_of_groups"] += len(groups) > 1
            self.events.loaded(request_id, key.end, key.end - key.start)
            return True

        return self._answer_later(load, is_load=True)

    def flush_inflight_stores(self, *args: Any, **more: Any) -> None:
        """All that is in flight is done before this returns, in releases whose transfer on CUDA waits for it at all."""
        if not releases.missing(releases.FLUSHES):
            while self._later:
                self._later.popleft()[-1]()

    def lose_loads(self, unreported: set[str]) -> None:
        """Loads in flight are never done, `unreported` ones were for nothing; stores and lookups are done at once."""
        in_flight, self._later = self._later, deque()
        for _, is_load, action in in_flight:
            if not is_load:
                action()
        for name in sorted(self.loading | unreported):
            self.chunks.cache.unpin(name)
            self.events.loaded(name, 0, 0)
        self.loading.clear()

    def forget_silent_worker(self) -> None:
        """As the server does when `worker_registration_grace_seconds` are over, in releases that have it."""
        pinged = any(heartbeat.is_of_worker for heartbeat in self.heartbeats)
        self._registered = pinged or bool(releases.missing(releases.FORGETS))


def _block_ids(arguments: tuple[Any, ...]) -> list[list[int]]:
    """The blocks in each KV group among a transfer's arguments: their place and nesting differ by release."""
    found: list[Any] = next(argument for argument in arguments if isinstance(argument, list))
    return found if found and isinstance(found[0], list) else [found]
