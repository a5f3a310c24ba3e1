"""Run LMCache's multi-process connector with a real `lmcache server` over sockets. The server copies real memory.

Each KV slot has eight bytes of shared memory, which the server maps like GPU memory. The lab delays each lookup, load
and store by some steps, and then waits for the server's answer. So two runs of the same lab steps do not differ, except
for the server's own evictions, which depend on real time.
"""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from kvfix_tools.lab.connectors import server_process
from kvfix_tools.lab.connectors.mp import MP, MPWorker, released
from kvfix_tools.lab.connectors.mp_server import Server
from kvfix_tools.lab.engine import kv_layout
from kvfix_tools.lab.engine.byte_memory import SharedBlock
from kvfix_tools.lab.engine.memory import Cache, Slots
from kvfix_tools.lab.options import Options

#: Numbers for model names. Each engine has its own model name, so that no engine finds chunks of another engine.
_ENGINES = itertools.count()


class Client:
    """Wraps LMCache's client. The lab delays lookups, stores and loads, and waits for the server's answer to each."""

    def __init__(self, server: "RealServer", client: Any) -> None:
        self._server = server
        self._client = client
        self._message_queue_client = client._message_queue_client

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        return functools.partial(self.send, operation)

    def send(self, operation: str, *arguments: Any, **more: Any) -> Any:
        """Send a request and return the future. Wait for the server's answer, unless the server is stopped."""
        future = getattr(self._client, operation)(*map(self._server.named, arguments), **more)
        if not (self._server.down or future.wait(server_process.PATIENCE)):
            raise RuntimeError(f"the server does not answer {operation}: ... {self._server.process.log[-1500:]}")
        return future

    def lookup(self, key: Any, tp_size: int) -> Any:
        return self._server.look(self, key, lambda: self.send("lookup", key, tp_size).result())

    def query_prefetch_status(self, request_id: str) -> Any:
        """Wait for the answer, because the server reads from its disk in real time, not in the lab's steps."""
        answer = self.send("wait_prefetch_status", self._server.unique(request_id), server_process.PATIENCE)
        self._server.found(request_id, answer.result())
        return answer

    def end_session(self, request_id: str) -> Any:
        return self.send("end_session", self._server.unique(request_id))

    def clear(self, force: bool = False) -> Any:
        """Clear the server's L1 and its disk. The server's own `clear` does not clear the disk (KVF121)."""
        self._server.empty_disk()
        return self.send("clear", force)

    def free_lookup_locks(self, key: Any, tp_size: int) -> Any:
        self._server.released(key)
        return self.send("free_lookup_locks", key, tp_size)

    def store(self, key: Any, worker: int, blocks: list[list[int]], event: bytes) -> Any:
        blocks = [list(group) for group in blocks]  # a copy, because the list may change before the transfer ends
        return self._server.store(key, blocks, lambda: self.send("store", key, worker, blocks, event).result())

    def retrieve(self, key: Any, worker: int, blocks: list[list[int]], event: bytes, skip: int) -> Any:
        arguments = (key, worker, [list(group) for group in blocks], event, skip)
        return self._server.retrieve(key, lambda: self.send("retrieve", *arguments).result())

    def close(self) -> None:
        self._client.close()


class RealServer(Server):
    """A real server process with the interface of `Server`. model_name: the name of the engine's model."""

    def __init__(self, memories: Sequence[Slots], cache: Cache, options: Options) -> None:
        super().__init__(memories, cache, options)
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.multiprocess.token_hasher import TokenHasher

        self._hasher = TokenHasher(options.chunk_size)
        self._rank = ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)
        self.process = server_process.of_this_process()
        self.model_name = f"lab-{os.getpid()}-{next(_ENGINES)}"
        self._before = self.process.locks()
        #: {request: (client, key) of the request's last lookup}
        self._lookups: dict[str, tuple[Client, Any]] = {}
        #: _looking: requests whose hit is not read yet. _locked: {request whose hit is read: chunks still locked}.
        self._looking: set[str] = set()
        self._locked: dict[str, range] = {}
        #: unanswered_lookups: requests whose lookup gets no answer. _leases: requests whose lookup LMCache may drop.
        self.unanswered_lookups: set[str] = set()
        self._leases: set[str] = set()
        #: {the lab's key of a chunk: the server's key}
        self._keys: dict[Any, dict[str, Any]] = {}
        #: Chunks that were evicted from L1 and are on the server's disk.
        self._on_disk: set[Any] = set()

    def unique(self, request_id: str) -> str:
        """Make this request id unique on the server, because all engines of the lab use the same ids (r1, r2)."""
        return f"{self.model_name}-{request_id}"

    def named(self, argument: Any) -> Any:
        """Return the argument. If the argument is LMCache's key of a request, make the key's request id unique."""
        if hasattr(argument, "request_id"):
            return dataclasses.replace(argument, request_id=self.unique(argument.request_id))
        return argument

    def is_looking(self, request_id: str) -> bool:
        return request_id in self._looking

    def look(self, client: Client, key: Any, lookup: Callable[[], None]) -> Any:
        self._lookups[key.request_id] = client, key
        self._looking.add(key.request_id)
        if not self.unanswered:
            return self._answer_later(lookup)
        self.unanswered -= 1
        self.events.counts["lookups_unanswered"] += 1
        self.unanswered_lookups.add(key.request_id)
        self._answer_later(lookup)
        return self._future()

    def started_again(self) -> None:
        """Reset the lab's state, because a restarted server has no locks, no lookups and no registered worker."""
        self._before = self.process.locks()
        self._looking.clear()
        self._locked.clear()
        self.events.may_fail.add("")
        self.events.counts["server_restarts"] += 1

    def give_up_lookups(self) -> None:
        """Record that LMCache may drop all lookups, because the server seems dead. `_end_leases` releases the locks."""
        self._leases |= self._whose()

    def _end_leases(self) -> None:
        for name in self._leases & self._whose():
            client, key = self._lookups[name]
            if name in self._looking:
                client.query_prefetch_status(name)
            locked, size = self._locked[name], self.chunk_size
            client.free_lookup_locks(dataclasses.replace(key, start=locked.start * size, end=locked.stop * size), 1)
            client.end_session(name)

    def _whose(self) -> set[str]:
        """Return the requests for which the server may hold locks."""
        return self._looking.union(name for name, chunks in self._locked.items() if chunks)

    def found(self, request_id: str, chunks: int) -> None:
        self._looking.discard(request_id)
        self._locked[request_id] = range(chunks)
        hit = self._on_disk.intersection(self._keys_from_start(self._lookups[request_id][1])[:chunks])
        self.events.counts["read_from_disk"] += len(hit)
        self._on_disk -= hit

    def released(self, key: Any) -> None:
        locked = self._locked.get(key.request_id, range(0))
        start, end = key.start // self.chunk_size, key.end // self.chunk_size
        self._locked[key.request_id] = range(end, locked.stop) if start <= locked.start else range(locked.start, start)

    def store(self, key: Any, blocks: list[list[int]], send: Callable[[], Any]) -> Any:
        def store() -> Any:
            self._store(key, blocks)
            hashes = self._hasher.compute_chunk_hashes(list(key.token_ids), start=key.start, end=key.end)
            self._on_disk.difference_update(self._keys_from_start(key))
            for chunk, digest in zip(self._keys_from_start(key), hashes, strict=True):
                names = {"chunk_hash_hex": digest.hex(), "model_name": self.model_name, "cache_salt": key.cache_salt}
                self._keys[chunk] = {**names, "kv_rank": self._rank}
            answer = send()
            self.process.transfers_end()
            return answer

        return self._answer_store_later(key, store)

    def retrieve(self, key: Any, send: Callable[[], Any]) -> Any:
        def load() -> Any:
            fails_after = self.failing[0].pop(key.request_id, None)
            if fails_after is not None:
                self.events.may_fail.add("")  # loads of other requests may need the deleted chunks
                self._delete(self._keys_from_start(key)[fails_after:], "all", force=True)
            answer = send()
            self.process.transfers_end()
            self.released(key)
            return answer

        return self._answer_load_later(key, load, lambda answer: bool(answer[1]))

    def lose_loads(self, rank: int, unreported: set[str]) -> None:
        """Let the server finish all transfers. The worker gets no answer, and treats its loads as failed."""
        self.give_up(rank, unreported.union(self.loading))
        while self._later:
            self._later.popleft().action()

    def _answer_something(self, client: Client) -> None:
        client.send("ping", None)

    def evict(self, chunks: int, forced: bool) -> int:
        """Evict the oldest chunks from L1. forced: include locked chunks, and delete the chunks from the disk too."""
        return self._delete(list(self.chunks.cache)[:chunks], "all" if forced else "l1", forced)

    def _delete(self, chunks: list[Any], tier: str, force: bool) -> int:
        for chunk in chunks:
            self.chunks.cache.pop(chunk, None)
        (self._on_disk.update if tier == "l1" else self._on_disk.difference_update)(chunks)
        keys = [self._keys[chunk] for chunk in chunks if chunk in self._keys]
        return self.process.delete(keys, tier, force) if keys else 0

    def kept(self) -> dict[str, set[str]]:
        """Return requests with locks or unread lookups. The server reports only numbers, so the lab finds the names."""
        self._end_leases()
        now = self.process.locks()
        self.events.counts["evicted_by_server"] += max(0, len(self.chunks.cache) - now["objects"])
        # If a request looks up again, the locks of its dropped lookup belong to no known request. Then name no request.
        whose = self._whose() or (set() if self._leases else {*self._lookups, *self.storing})
        more = {what: now[what] - self._before[what] for what in ("read locks", "write locks", "lookups")}
        return {f"{what} of the server ({number})": whose for what, number in more.items() if number > 0}

    def empty_disk(self) -> None:
        self._delete(list(self._keys), "l2", force=False)

    def close(self) -> None:
        self.empty_disk()
        self.process.clear()


class RealWorker(MPWorker):
    _server: RealServer

    def _register(self, options: Options) -> None:
        """Register one layer, in which each token has one latent vector of eight bytes."""
        self.adapter.model_name = self._server.model_name
        connector: Any = import_module(type(self.in_worker).__module__)
        connector.vllm_layout_hints = lambda *_: {}  # a latent vector needs no layout hint
        layer = torch.zeros((options.num_blocks, options.block_size, 8), dtype=torch.uint8)
        self.in_worker.register_kv_caches({kv_layout.LAYER.format(0): layer})  # moves the layer to shared memory
        self.slots.put_in([SharedBlock(block) for block in layer.view(torch.int64).squeeze(-1).numpy()])


class RealMP(MP):
    server: RealServer
    _worker_class = RealWorker
    _server_class = RealServer

    def __init__(self, options: Options, memories: Sequence[Slots], caches: Sequence[Cache]) -> None:
        super().__init__(options, memories, caches)
        self.scheduler_adapter.model_name = self.server.model_name

    def _replace(self, adapter: Any) -> None:
        server, its = self.server, released()

        class Heartbeat(its.HeartbeatThread):  # type: ignore[misc, name-defined]
            """Replaces LMCache's heartbeat thread. Sends a heartbeat only after the server or a connection failed."""

            def start(self) -> None:
                server.heartbeats.append(self)

            def beat(self) -> None:
                if server.down or server.was_disconnected or not self._health_event.is_set():
                    self._interval = 0.05 if server.down else server_process.PATIENCE  # timeout in seconds
                    self._execute()

        def client(url: str, context: Any = None) -> Client:
            return Client(server, its.RequestClientFactory.create(server.process.url, context=context))

        def transfer_context(caches: Any, *, mode: Any, **more: Any) -> Any:
            return its.create_transfer_context(caches, mode="lmcache_driven", **more)

        adapter.RequestClientFactory = SimpleNamespace(create=client)
        adapter.HeartbeatThread = Heartbeat
        adapter.create_transfer_context = transfer_context

    def tick(self) -> None:
        adapter, server = self.scheduler_adapter, self.server
        if not adapter.is_healthy:
            server.give_up_lookups()
        super().tick()
        for name in server.unanswered_lookups & adapter._unacked_lookups.keys():
            adapter._unacked_lookups[name].submitted_at = -math.inf  # so that the lookup times out

    def server_stops(self) -> None:
        super().server_stops()
        self.server.process.stop()

    def server_goes_on(self) -> None:
        self.server.process.go_on()
        super().server_goes_on()

    def server_dies(self) -> None:
        super().server_stops()
        self.server.process.kill()

    def server_comes_back(self) -> None:
        """Start the server again. The files on its disk are still there."""
        self.server.process.start()
        self.server.started_again()
        super().server_goes_on()

    def kept(self) -> dict[str, set[str]]:
        return {**super().kept(), **self.server.kept()}

    def evict(self, cache: Cache, chunks: int, forced: bool) -> int:
        return self.server.evict(chunks, forced)

    def close(self) -> None:
        self.in_scheduler.shutdown()
        self.workers[0].in_worker.shutdown()
        self.server.close()
