"""In place of `lmcache server`: lookups that lock, prefetch status, and a clock for whatever takes some steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvfix_tools.lab.memory import Cache, Prefix

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
    """What LMCache's adapters ask of their client is answered under its own names; the transfers are mp_transfer.py's.

    A lookup is done `delay` steps after it was asked for, or at once.
    """

    events: RequestEvents

    def __init__(self, cache: Cache, chunk_size: int, delay: int) -> None:
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
        self.cache = cache
        self.chunk_size = chunk_size
        self.delay = delay
        self.now = 0
        self.unanswered = 0
        self.heartbeats: list[Heartbeat] = []
        #: request -> chunks found, until that is answered; None: the prefetch is in flight
        self._hits: dict[str, int | None] = {}
        #: When it is due, whether it is a load, and what is done then.
        self._later: deque[tuple[int, bool, Callable[[], None]]] = deque()

    def tick(self) -> None:
        """A step of the engine has begun: what is due by now happens."""
        self.now += 1
        for heartbeat in self.heartbeats:
            heartbeat.beat()
        while self._later and self._later[0][0] <= self.now:
            self._later.popleft()[-1]()

    def finish(self) -> None:
        """All that is in flight is done now."""
        while self._later:
            self._later.popleft()[-1]()

    def drop_loads(self) -> None:
        """Loads in flight are never done, stores and lookups at once."""
        in_flight, self._later = self._later, deque()
        for _, is_load, action in in_flight:
            if not is_load:
                action()

    @property
    def busy(self) -> int:
        return len(self._later)

    def is_looking(self, request_id: str) -> bool:
        return self._hits.get(request_id, 0) is None

    def keys(self, tokens: Any, end: int, salt: str) -> tuple[list[Any], list[int]]:
        """Keys of the whole chunks up to `end`, and the right contents: a key stands for all tokens up to its chunk."""
        contents = Prefix(hash((1, salt or 1))).of(list(tokens[:end]))
        ends = range(self.chunk_size, end + 1, self.chunk_size)
        return [(salt, contents[last - 1]) for last in ends], contents

    def answer(self, result: Any) -> Any:
        future = self._future()
        future.set_result(result)
        return future

    def later(self, action: Callable[[], Any], is_load: bool = False) -> Any:
        """A future of what `action` returns when it is due."""
        future = self._future()
        if self.delay:
            self._later.append((self.now + self.delay, is_load, lambda: future.set_result(action())))
        else:
            future.set_result(action())
        return future

    def unlock(self, request_id: str, keys: list[Any]) -> None:
        """The request has no need of these chunks any more."""
        held = [key for key in self.cache.pins.get(request_id, ()) if key not in keys]
        if held:
            self.cache.pins[request_id] = held
        else:
            self.cache.unpin(request_id)

    # ------------------------------------------------------------------ by the client's own names

    def get_chunk_size(self) -> Any:
        return self.answer(self.chunk_size)

    def get_experimental(self) -> Any:
        return self.answer([])

    def lookup(self, key: Any, tp_size: int) -> Any:
        if self.unanswered > 0:
            self.unanswered -= 1
            self.events.lookup_unanswered()
            self._hits[key.request_id] = 0
            return self.answer(None)

        self._hits[key.request_id] = None

        def prefetch() -> None:
            keys, _ = self.keys(key.token_ids, key.end, key.cache_salt)
            self._hits[key.request_id] = self.cache.pinned_prefix(keys, key.request_id)

        self.later(prefetch)
        return self.answer(None)

    def query_prefetch_status(self, request_id: str) -> Any:
        found = self._hits.get(request_id, 0)
        if found is not None:
            self._hits.pop(request_id, None)  # it is answered once
        return self.answer(found)

    def free_lookup_locks(self, key: Any, tp_size: int) -> Any:
        keys, _ = self.keys(key.token_ids, key.end, key.cache_salt)
        self.unlock(key.request_id, keys[key.start // self.chunk_size :])
        return self.answer(None)

    def end_session(self, request_id: str) -> Any:
        """A prefetch in flight goes on, and locks what it finds (modules/lookup.py 0.5.6:462)."""
        return self.answer(None)

    def report_block_allocation(self, *args: Any) -> Any:
        return self.answer(None)

    clear = report_block_allocation

    def close(self) -> None:
        """The lab's server ends with its engine."""
