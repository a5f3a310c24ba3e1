"""Replace `lmcache server`, its client and transfer context. Lookups, loads and stores take `Options.delay` steps."""

import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvfix_tools.lab import releases
from kvfix_tools.lab.connectors.mp_chunks import Chunks
from kvfix_tools.lab.engine.memory import Cache, Slots
from kvfix_tools.lab.engine.request_events import RequestEvents
from kvfix_tools.lab.options import Options


class Heartbeat:
    """Replaces LMCache's HeartbeatThread. The lab sends one heartbeat in each step."""

    stop_requested = False

    def __init__(self, server: "Server", health_event: Any, instance_id: int | None = None, **more: Any) -> None:
        self._server, self._event, self.is_of_worker = server, health_event, instance_id is not None
        self._recover: Callable[[], bool] = lambda: True

    def register_recover_callback(self, callback: Callable[[], bool]) -> None:
        self._recover = callback

    def start(self) -> None:
        self._server.heartbeats.append(self)

    def stop(self, *_: Any, **__: Any) -> None:
        self.stop_requested = True

    def beat(self) -> None:
        if self._server.down:
            self._event.clear()
        elif not self._event.is_set() and self._recover():
            self._event.set()


def _client_without_socket() -> Any:
    """Return LMCache's queue client without a socket, to simulate lost connections (None before LMCache 0.5.6)."""
    try:
        from lmcache.v1.multiprocess.transport.zmq_impl.mq import MessageQueueClient
    except ImportError:
        return None
    client = MessageQueueClient.__new__(MessageQueueClient)
    vars(client).update(pending_futures={}, pending_streams={}, socket=SimpleNamespace(recv_multipart=list))
    client.process_inbound()
    return client


class Due(NamedTuple):
    """An action that is due in `step`. load: (rank, request) of a load. late: replaces `action` after `give_up`."""

    step: int
    action: Callable[[], Any]
    load: tuple[int, str] | None = None
    late: Callable[[], Any] | None = None


class Server:
    """Replaces LMCache's client and transfer context, with all methods that LMCache's adapters call.

    One server serves all ranks. In LMCache's key, `worker_id` is the rank for a transfer, and None for a lookup.
    The server records loads and stores in `events`.
    """

    events: RequestEvents

    def __init__(self, memories: Sequence[Slots], cache: Cache, options: Options) -> None:
        from lmcache.v1.multiprocess.futures import MessagingFuture

        server = self

        class Future(MessagingFuture):  # type: ignore[misc]
            """A future whose `wait` runs the actions in flight, in order, until the future is done."""

            def wait(self, timeout: float | None = None) -> bool:
                while not self.query() and server._later and not server.down:
                    server._later.popleft().action()
                return bool(super().wait(0))

            def to_cuda_future(self, device: Any = None) -> Any:
                """Return the future itself, because a transfer in the lab has ended when its future is done."""
                return self

        self._future = Future
        self._delay = options.delay
        self._rank_delay = options.rank_delay
        self._now = 0
        #: The actions in flight, sorted by the step in which they are due.
        self._later: deque[Due] = deque()
        self._message_queue_client = _client_without_socket()
        #: True while the server does nothing and answers no heartbeat.
        self.down = False
        self.heartbeats: list[Heartbeat] = []
        #: True if a client has lost its connection since the last step.
        self.was_disconnected = False
        self.chunks = Chunks(memories, cache, options)
        self.chunk_size = options.chunk_size
        #: How many of the next lookups get no answer.
        self.unanswered = 0
        #: True if the server knows the worker's KV memory.
        self.registered = True
        #: For each rank: {request whose next load fails: number of chunks before the failure}
        self.failing: list[dict[str, int]] = [{} for _ in memories]
        #: {request: number of its loads in flight, in all ranks together}
        self.loading: Counter[str] = Counter()
        #: {request: number of its stores in flight, in all ranks together}
        self.storing: Counter[str] = Counter()
        #: {request: number of chunks found, or None during the prefetch}. A query returns and removes a number.
        self._hits: dict[str, int | None] = {}

    def tick(self) -> None:
        self._now += 1
        for heartbeat in self.heartbeats:
            heartbeat.beat()
        self.was_disconnected = False
        while self._later and self._later[0].step <= self._now and not self.down:
            self._later.popleft().action()

    @property
    def busy(self) -> int:
        return len(self._later)

    def _answer(self, result: Any) -> Any:
        future = self._future()
        future.set_result(result)
        return future

    def _answer_later(self, action: Callable[[], Any], rank: int = 0, **of_load: Any) -> Any:
        """Run `action` after the delay. Return a future of the result. of_load: fields `load` and `late` of `Due`."""
        delay = self._delay + rank * self._rank_delay
        if not (delay or self.down):
            return self._answer(action())
        future = self._future()
        due = Due(self._now + delay, lambda: future.set_result(action()), **of_load)
        self._later.insert(bisect.bisect_right(self._later, due.step, key=lambda each: each.step), due)
        return future

    @contextmanager
    def disconnected(self, client: Any) -> Iterator[None]:
        """In this context the client has lost its connection, and has noticed the loss."""
        queue = getattr(client, "_message_queue_client", None)
        if queue is not None:
            self.was_disconnected = True
            queue.cancel_streams()
        yield
        if queue is not None:
            self._answer_something(client)

    def _answer_something(self, client: Any) -> None:
        client._message_queue_client.process_inbound()

    def _keys_from_start(self, key: Any) -> list[Any]:
        """Return the keys of the chunks from token `key.start` to `key.end`. key: LMCache's key of a transfer."""
        return self.chunks.keys(key.token_ids, key.end, key.cache_salt)[0][key.start // self.chunk_size :]

    def is_looking(self, request_id: str) -> bool:
        return self._hits.get(request_id, 0) is None

    def lookup(self, key: Any, tp_size: int) -> Any:
        if self.unanswered > 0:
            self.unanswered -= 1
            self.events.counts["lookups_unanswered"] += 1
            self._hits[key.request_id] = 0
            return self._answer(None)

        self._hits[key.request_id] = None

        def prefetch() -> None:
            keys, _ = self.chunks.keys(key.token_ids, key.end, key.cache_salt)
            self._hits[key.request_id] = found = self.chunks.lock(keys, key.request_id)
            self.events.counts["ranks_differ"] += found < len(keys) and self.chunks.in_one_rank_only(keys[found])

        self._answer_later(prefetch)
        return self._answer(None)

    def query_prefetch_status(self, request_id: str) -> Any:
        found = self._hits.get(request_id, 0)
        if found is not None:
            self._hits.pop(request_id, None)  # the client can read the answer only once
        return self._answer(found)

    def free_lookup_locks(self, key: Any, tp_size: int) -> Any:
        self.chunks.unlock(key.request_id, self._keys_from_start(key))
        return self._answer(None)

    def get_chunk_size(self) -> Any:
        return self._answer(self.chunk_size)

    def get_experimental(self) -> Any:
        return self._answer([])

    def end_session(self, *args: Any) -> Any:
        """Do nothing. A prefetch in flight continues and locks its chunks (modules/lookup.py 0.5.6:462)."""
        return self._answer(None)

    report_block_allocation = end_session

    def close(self) -> None:
        """Do nothing, because the lab's server ends with its engine."""

    def clear(self, force: bool = False) -> Any:
        """Remove all chunks without a read lock (v1/distributed/storage_manager.py 0.5.6:1244)."""
        self.chunks.cache.evict(len(self.chunks.cache))
        return self._answer(None)

    def register(self, *args: Any, **more: Any) -> Any:
        self.registered = True
        return self._answer(None)

    def create_recorded_event(self) -> None: ...

    def submit_store(self, request_id: str, key: Any, *rest: Any, **more: Any) -> Any:
        groups = _block_ids(rest)
        return self._answer_store_later(key, lambda: self.registered and self._store(key, groups))

    def _answer_store_later(self, key: Any, store: Callable[[], Any]) -> Any:
        request_id, rank = key.request_id, key.worker_id or 0
        self.events.stored(request_id, list(key.token_ids), key.start, key.end, rank)
        self.storing[request_id] += 1

        def due() -> Any:
            self.storing[request_id] -= 1
            return store()

        return self._answer_later(due, rank)

    def _store(self, key: Any, groups: list[list[int]]) -> bool:
        """Store blocks, and check their contents. groups: each KV group's blocks from token key.start to key.end."""
        request_id, rank, counts = key.request_id, key.worker_id or 0, self.events.counts
        chunks, right = self._keys_from_start(key), self.events.model.right(request_id)
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
                read, null = self.chunks.read(stored, groups, number, rank)
                if read != self.chunks.right(stored, right, place, rank):
                    message = f"the chunk that begins at token {place * self.chunk_size} is stored with wrong KV"
                    self.events.wrong_content(request_id, message + ", from null blocks" * null)
                self.chunks.cache[self.chunks.key(stored, chunk, rank)] = read
        return True

    def submit_retrieve(self, request_id: str, key: Any, *rest: Any, skip_first_n_tokens: int = 0, **more: Any) -> Any:
        groups, rank = _block_ids(rest), key.worker_id or 0

        def load() -> bool:
            wanted = self._keys_from_start(key)
            fails = request_id in self.failing[rank] or not self.registered
            self.failing[rank].pop(request_id, None)
            done = not fails and self.chunks.load(groups, wanted, skip_first_n_tokens, rank)
            self.chunks.unlock(request_id, wanted, rank)
            return done

        return self._answer_load_later(key, load, bool, len(groups) > 1)

    def _answer_load_later(
        self, key: Any, load: Callable[[], Any], brought: Callable[[Any], bool], several_groups: bool = False
    ) -> Any:
        """Return a future of `load`. brought: takes the result of `load`, returns True if all tokens were loaded."""
        request_id, rank = key.request_id, key.worker_id or 0
        self.loading[request_id] += 1

        def load_in_time() -> Any:
            self.loading -= Counter([request_id])
            answer = load()
            tokens = key.end - key.start if brought(answer) else 0
            self.events.counts["loads_of_groups"] += several_groups and tokens > 0
            self.events.loaded(request_id, key.end if tokens else 0, tokens, rank)
            return answer

        return self._answer_later(load_in_time, rank, load=(rank, request_id), late=load)

    def flush_inflight_stores(self, *args: Any, **more: Any) -> None:
        """Run all actions in flight, even if `down`. Before LMCache 0.5.6, do nothing, as LMCache does (FLUSHES)."""
        if not releases.missing(releases.FLUSHES):
            self.down = False
            while self._later:
                self._later.popleft().action()

    def give_up(self, rank: int, requests: set[str]) -> None:
        """Record that the worker reports these loads as failed. The server still runs the loads when they are due."""
        for place, due in enumerate(self._later):
            if due.load is not None and due.load[0] == rank and due.load[1] in requests:
                self._later[place] = Due(due.step, due.late or due.action)
                self.loading -= Counter([due.load[1]])
        for name in sorted(requests):
            self.events.may_fail.add(name)
            self.events.loaded(name, 0, 0, rank)

    def lose_loads(self, rank: int, unreported: set[str]) -> None:
        """Drop this rank's loads. Run stores and lookups now. unreported: requests with an ended, unreported load."""
        in_flight, self._later = self._later, deque()
        lost = set(unreported)
        for due in in_flight:
            if due.load is None:
                due.action()
            elif due.load[0] == rank:
                lost.add(due.load[1])
                self.loading -= Counter([due.load[1]])
            else:
                self._later.append(due)
        for name in sorted(lost):
            self.chunks.unlock_all(name, rank)
            self.events.loaded(name, 0, 0, rank)


def _block_ids(arguments: tuple[Any, ...]) -> list[list[int]]:
    """Find the blocks of each KV group in a transfer's arguments. The arguments differ between LMCache releases."""
    found: list[Any] = next(argument for argument in arguments if isinstance(argument, list))
    return found if found and isinstance(found[0], list) else [found]
