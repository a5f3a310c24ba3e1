"""vLLM's SimpleCPUOffloadConnector in the lab. The lab replaces the GPU and the copy thread (offload_copies.py)."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, resolve_block_hashes

from kvfix.connector_events import readers
from kvfix_tools.lab.connectors.offload_copies import Copies, CopyQueue, stand_in
from kvfix_tools.lab.connectors.offloading import BothRoles, note_stored
from kvfix_tools.lab.engine import kv_layout, rules
from kvfix_tools.lab.engine.byte_memory import contents_of
from kvfix_tools.lab.engine.kv_layout import KVGroup
from kvfix_tools.lab.engine.memory import NOTHING, Slots
from kvfix_tools.lab.options import Options


class Rank(Copies):
    def __init__(self, rank: int, slots: Slots, options: Options, in_worker: Any) -> None:
        super().__init__(rank, slots, options)
        stand_in()
        self._handler = handler = in_worker.worker_handler
        in_worker.register_kv_caches(kv_layout.kv_caches(options, self.gpu))
        self.thread: CopyQueue = handler._backend._queue
        self.thread.copies = handler.load_stream.copies = handler.store_stream.copies = self
        self._launch_copy, handler._backend.launch_copy = handler._backend.launch_copy, self._launch
        #: The CPU memory of this rank, with a row for each block.
        (memory,) = handler.cpu_kv_caches.values()
        self.blocks = memory.numpy()

    def _launch(
        self, source: list[int], to: list[int], is_store: bool, event_idx: int, events_list: Any, wait_event: Any = None
    ) -> None:
        if self.thread.died:
            return
        names = self.owner.requests_of(event_idx, is_store)
        failing = self.failing_stores.intersection(names) if is_store else self.failing.keys() & set(names)
        for name in failing:
            self.failing_stores.discard(name) if is_store else self.failing.pop(name)

        def done() -> None:
            for name in () if is_store or self.thread.died else names:
                self.owner.loaded(self.rank, name, bool(failing))

        if is_store:
            self.owner.store_begins(self.rank, event_idx, source)
            self.blocks[to] = NOTHING
        with self.of_job(bool(failing), done):
            self._launch_copy(source, to, is_store, event_idx, events_list, wait_event)

    def loading(self) -> set[str]:
        """Return the requests whose load is not reported yet. The worker reports loads in the order of their start."""
        return {name for event, _ in self._handler._load_events for name in self.owner.requests_of(event, False)}

    def contents(self, block: int, size: int) -> list[int]:
        return contents_of(self.blocks[block], size)


class Offloading(BothRoles):
    def __init__(self, options: Options, ranks: Sequence[Rank], scheduler: Any, in_scheduler: Any) -> None:
        super().__init__(options, ranks)
        self.reader = readers.SimpleOffload(in_scheduler)
        self._scheduler = scheduler
        self._manager = in_scheduler.scheduler_manager
        self._hash_tokens = options.block_size
        #: {request: (first token, end) of the load in flight}
        self._due: dict[str, tuple[int, int]] = {}
        self._process_store_event = self._manager._process_store_event
        self._manager._process_store_event = self._stored

    def requests_of(self, event: int, is_store: bool) -> list[str]:
        of_events = self._manager._store_event_to_reqs if is_store else self._manager._load_event_to_reqs
        return list(of_events.get(event, ()))

    def take_due(self, metadata: Any) -> None:
        self._due.update({name: (start, end) for name, start, end in self.reader.loads(metadata) or ()})

    def store_begins(self, rank: int, event: int, source: list[int]) -> None:
        """Record a store when it begins, as kvfix's hooks do. The request may lose the blocks before the store ends."""
        blocks, size = set(source), self._groups[0].block_size
        for name in self.requests_of(event, True) if self.alone and not rank else ():
            of_request = self._scheduler.kv_cache_manager.get_block_ids(name)[0]
            ends = [(place + 1) * size for place, block in enumerate(of_request) if block in blocks]
            blocks.difference_update(of_request)
            note_stored(self.events, name, ends, size)

    def loaded(self, rank: int, name: str, fails: bool) -> None:
        if fails:
            self.events.may_fail.add(name)
        self.has_loaded(rank, name, self._due[name] if self.alone else (0, 0), len(self._groups) > 1, fails)

    def _stored(self, event: int) -> None:
        """Check the content of each block when the scheduler completes the store of the block."""
        transfer = self._manager._store_event_to_blocks.get(event)
        names = self.requests_of(event, True)
        self._process_store_event(event)
        for block in transfer.cpu_block_ids if transfer else ():
            key = self._manager.cpu_block_pool.blocks[block].block_hash
            if key is not None:  # a block whose copy has failed has no key
                group = self._groups[get_group_id(key)]
                self.events.counts["stores_offloaded"] += 1
                self.events.counts["stores_of_groups"] += bool(group.window)
                self._compare(get_block_hash(key), group, block, names)

    def _compare(self, key: bytes, group: KVGroup, block: int, names: list[str]) -> None:
        """Report a stored block if its content is wrong for every request that has a block with this key."""
        found = [rank.contents(block, group.block_size) for rank in self.ranks]
        owner = "", 0
        for name, end in self._owners(key, group, names):
            owner = name, end
            if all(each == group.right(self.events.model.right(name)[end - group.block_size : end]) for each in found):
                return
        message = f"SimpleCPUOffloadConnector stores wrong KV for tokens {owner[1] - group.block_size} to {owner[1]}"
        self.events.wrong_content(owner[0], message + (f" in KV group {group.number}" if group.window else ""))

    def _owners(self, key: bytes, group: KVGroup, names: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Yield (request, end of the block in tokens) for each request with a block of this key, `names` first."""
        requests = self.events.model.requests
        for name in chain(names, reversed(requests)):
            keys = resolve_block_hashes(requests[name].block_hashes, self._hash_tokens, group.block_size)
            place = next((place for place in range(len(keys)) if keys[place] == key), None)
            if place is not None:
                yield name, (place + 1) * group.block_size

    def evict(self, chunks: int, forced: bool = False) -> int:
        """Evict older blocks by allocating `chunks` blocks, as other requests' stores do. Then free the new blocks."""
        pool = self._manager.cpu_block_pool
        before = len(pool.cached_block_hash_to_block)
        taken = pool.get_new_blocks(min(chunks, pool.get_num_free_blocks()))
        for rank in self.ranks:
            rank.blocks[[block.block_id for block in taken]] = NOTHING
        pool.free_blocks(taken)
        return before - len(pool.cached_block_hash_to_block)

    @property
    def busy(self) -> bool:
        """Return True if a copy is in flight or a store is unreported. Ignore stores if a copy thread has died."""
        under_way = any(rank.pending for rank in self.ranks)
        return under_way or (self._manager.has_pending_stores() and not any(rank.thread.died for rank in self.ranks))

    def requests(self, loads: bool) -> set[str]:
        if loads:
            return set().union(*(rank.loading() for rank in self.ranks))
        return {name for name, state in self._manager._reqs_to_store.items() if state.store_events}

    def kept(self) -> dict[str, set[str]]:
        kept = () if self.alone else self.reader.kept()
        return {f"SimpleCPUOffloadConnector.{where}": set(names) for where, names in kept}

    def never_given_back(self) -> None:
        """At the end of a run, report copies in flight, or else blocks that are still held."""
        if self.busy:
            self.events.violated(rules.NEVER_RESTS, "", "the requests ended many steps ago, but copies go on")
            return
        deferred = {block.block_id for _, blocks in self._scheduler.deferred_frees for block in blocks}
        gpu = "GPU", self._scheduler.kv_cache_manager.block_pool, deferred
        for where, pool, later in (gpu, ("CPU", self._manager.cpu_block_pool, set())):
            held = {block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null} - later
            if held:
                message = f"{len(held)} of {len(pool.blocks)} {where} blocks are held, although all requests have ended"
                self.events.violated(rules.MEMORY_HELD, "", message)
