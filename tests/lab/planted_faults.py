"""Faults planted in one engine of the lab."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvfix_tools.lab.steps import prompt
from tests.lab.planted import fault, wrap

V1, MP, OFFLOADING, SIMPLE = ("v1",), ("mp",), ("offloading",), ("simple-offload",)
#: LMCache's connector in a MultiConnector with OffloadingConnector.
LAST: dict[str, Any] = {"v1": {"offloading": "last"}, "mp": {"offloading": "last"}}


@fault("LAB001")
def load_goes_one_slot_too_far(engine: Any) -> None:
    wrap(engine.slots, "put", lambda put, slot, content: put(slot + 1 if slot % 16 < 15 else slot, content))


@fault("LAB001")
def load_moves_nothing_and_says_it_did(engine: Any) -> None:
    engine.slots.put = lambda slot, content: None


@fault("LAB001")
def load_takes_the_chunk_of_another_key(engine: Any) -> None:
    engine.cache.get = lambda key: next(reversed(engine.cache.values()))


@fault("LAB001")
def store_reads_the_next_block(engine: Any) -> None:
    wrap(engine.slots, "get", lambda get, slot: get((slot + 16) % (engine.options.num_blocks * 16)))


@fault("LAB001", on=MP)
def step_writes_a_wrong_slot(engine: Any) -> None:
    wrap(
        engine.slots,
        "write",
        lambda write, blocks, start, contents: write(
            blocks, start, [*contents[:-1], 7] if len(contents) > 40 else contents
        ),
    )


@fault("LAB001", text="Connector stores", on=("v1", "mp", "offloading", "simple-offload", "v1-simple"), **LAST)
def copy_takes_the_next_block(engine: Any) -> None:
    copies = engine.connector.offloading.ranks[0].copies
    (start, page), end = (copies.gpu.data_ptr(), copies.gpu.shape[1]), copies.gpu.data_ptr() + copies.gpu.numel()

    def submit(original: Any, pieces: Any) -> None:
        moved = [(source + page if start <= source < end - page else source, *more) for source, *more in pieces]
        original(moved)

    wrap(copies, "_submit", submit)


@fault("LAB001", text="the step reads", on=(*OFFLOADING, *SIMPLE))
def a_load_is_reported_before_it_is_done(engine: Any) -> None:
    engine.connector.offloading.ranks[0].copies.is_done = lambda copy: True


@fault("LAB001", text="the OffloadingConnector stores", on=OFFLOADING)
def a_store_is_not_waited_for(engine: Any) -> None:
    """The worker does not wait for the copies of blocks that others get."""
    for rank in engine.connector.offloading.ranks:
        rank.connector.worker.wait = lambda jobs: None


@fault("LAB001", text="the step reads", on=OFFLOADING, offloading={"tier": "fs"})
def a_file_is_that_of_another_chunk(engine: Any) -> None:
    tier = engine.connector.offloading.manager.secondary_tiers[0]
    name, names = tier.file_mapper.get_file_name, []

    def first(key: Any) -> Any:
        names.append(name(key))
        return names[0]

    def submit_load(load: Any, job: Any) -> None:
        tier.file_mapper.get_file_name = first
        load(job)
        tier.file_mapper.get_file_name = name

    wrap(tier, "submit_load", submit_load)


@fault("KVR009", text="_req_status", on=OFFLOADING)
def a_job_is_never_reported(engine: Any) -> None:
    """A request keeps its state as long as it has a store in flight."""
    scheduler = engine.connector.offloading.scheduler
    scheduler._req_status = _Kept(scheduler._req_status)


@fault("LAB010", text="max_offload_tokens 0", on=OFFLOADING)
def what_a_request_asks_for_is_not_read(engine: Any) -> None:
    def on_new_request(asked: Any, request: Any) -> None:
        asked(request)
        request.kv_transfer_params = {"max_offload_tokens": 0}

    wrap(engine.connector.offloading.scheduler, "on_new_request", on_new_request)


@fault("LAB001", "KVR006", "KVR011", **LAST)
def promise_is_granted_to_another(engine: Any) -> None:
    """The MultiConnector has another one load than the one that has promised."""
    multi = engine.scheduler.connector

    def granted(grant: Any, request: Any, blocks: Any, external: int) -> None:
        if external:
            multi._requests_to_connector[request.request_id] ^= 1
        grant(request, blocks, external)

    wrap(multi, "update_state_after_alloc", granted)


@fault("LAB010", text="this instance is a kv_consumer", on=V1, v1={"kv_role": "kv_consumer"})
def a_consumer_does_not_know_its_role(engine: Any) -> None:
    engine.connector.scheduler_adapter.kv_role = engine.workers[0].adapter.kv_role = "kv_both"


@fault("LAB001", on=V1)
def two_blocks_are_exchanged(engine: Any) -> None:
    memory, done = engine.slots._blocks, []

    def exchange(iterate: Any) -> None:
        iterate()
        blocks = engine.model.blocks("again")
        if not done and len(blocks) > 1:
            memory[blocks[0]], memory[blocks[1]] = memory[blocks[1]], memory[blocks[0]]
            done.append(True)

    wrap(engine, "iterate", exchange)


@fault("LAB002", text="loaded up to 192 of 256", on=V1)
def load_comes_short_for_no_reason(engine: Any) -> None:
    engine.workers[0].failing["again"] = 3


@fault("LAB002")
def chunk_is_lost(engine: Any) -> None:
    engine.cache.get = lambda key: None


@fault("KVR001")
def promises_one_too_many(engine: Any) -> None:
    _answer(engine, lambda request, computed, promised: promised if promised is None else request.num_tokens - computed)


@fault("KVR002", text="promised 0 where", on=V1)
def changes_its_mind(engine: Any) -> None:
    asked = []

    def answer(request: Any, computed: int, promised: Any) -> Any:
        asked.append(request.num_preemptions)
        return 0 if asked.count(1) > 1 else promised

    _answer(engine, answer)


@fault("KVR002", on=MP)
def changes_its_promise(engine: Any) -> None:
    answers = []

    def change(request: Any, computed: int, promised: Any) -> Any:
        answers.append(promised)
        return promised if promised is None or len(answers) % 2 else 0

    _answer(engine, change)
    engine.do("stored_elsewhere", prompt(64))
    engine.keep_blocks(0)
    engine.admit("z", prompt(64))
    engine.step(5)
    engine.free_blocks()


@fault("KVR004", on=V1)
def load_of_less_than_was_granted(engine: Any) -> None:
    def less(meta: Any) -> None:
        if meta.load_spec is not None and meta.load_spec.can_load:
            meta.load_spec.lmcache_cached_tokens -= engine.options.chunk_size

    change_metadata(engine, less)


@fault("KVR006", text="no load of them was started", on=V1)
def load_is_forgotten(engine: Any) -> None:
    change_metadata(engine, lambda meta: setattr(meta, "load_spec", None))


@fault("KVR006", "KVR010", on=MP)
def loads_are_dropped(engine: Any) -> None:
    def without(build: Any, output: Any) -> Any:
        meta = build(output)
        meta.requests = [each for each in meta.requests if each.direction != "RETRIEVE"]
        return meta

    wrap(engine.scheduler.connector, "build_connector_meta", without)


@fault("KVR007", text="never are", on=V1)
def store_skips_a_chunk(engine: Any) -> None:
    def skip(meta: Any) -> None:
        if meta.req_id == "other" and meta.save_spec is not None:
            meta.save_spec.skip_leading_tokens += engine.options.chunk_size

    change_metadata(engine, skip)


@fault("KVR007", on=MP)
def store_has_a_gap(engine: Any) -> None:
    _stored(engine, 32, 32)


@fault("KVR008", text="are computed")
def store_reports_more_than_there_is(engine: Any) -> None:
    _stored(engine, 0, 64)


@fault("KVR009", text="pins of the worker", on=V1)
def pins_are_kept(engine: Any) -> None:
    engine.cache.unpin = lambda lookup_id: None


@fault("KVR009", text="load_specs", on=V1)
def a_load_spec_is_kept(engine: Any) -> None:
    engine.connector.scheduler_adapter.load_specs = _Kept()


@fault("KVR009", on=MP)
def a_lookup_is_kept(engine: Any) -> None:
    def leaking(settle: Any) -> None:
        engine.connector.scheduler_adapter._finished_lookup_results["a"] = 0
        settle()

    wrap(engine, "settle", leaking)


@fault("KVR011", text="ZeroDivisionError")
def a_hook_raises(engine: Any) -> None:
    engine.scheduler.connector.build_connector_meta = lambda output: 1 // 0


@fault("LAB003", text="is PREEMPTED for ever", on=V1)
def no_question_is_ever_answered(engine: Any) -> None:
    _answer(engine, lambda request, computed, promised: None if request.num_preemptions else promised)


@fault("LAB009", text="again needs ", on=V1)
def blocks_of_others_never_come_free(engine: Any) -> None:
    engine.free_blocks = engine._held.clear


# ---------------------------------------------------------------------- SimpleCPUOffloadConnector


@fault("LAB001", "KVR011", on=SIMPLE)
def a_store_holds_no_blocks(engine: Any) -> None:
    """Others get the blocks while they are copied."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    manager = engine.connector.in_scheduler.scheduler_manager
    manager._gpu_block_pool = SimpleNamespace(
        blocks=pool.blocks, touch=lambda blocks: None, free_blocks=lambda blocks: None,
        cached_block_hashes_by_block=pool.cached_block_hashes_by_block,
    )  # fmt: skip


@fault("KVR009", on=SIMPLE)
def a_hit_is_kept(engine: Any) -> None:
    manager = engine.connector.in_scheduler.scheduler_manager

    def get_num_new_matched_tokens(ask: Any, request: Any, computed: int) -> Any:
        answer = ask(request, computed)
        manager._pending_cpu_hits.setdefault(request.request_id, (([],), 0, computed))
        return answer

    wrap(manager, "get_num_new_matched_tokens", get_num_new_matched_tokens)
    manager.request_finished_all_groups = lambda request, blocks: (False, None)


@fault("KVR004", "LAB002", on=SIMPLE)
def a_load_ends_a_block_early(engine: Any) -> None:
    def early(loads: Any, metadata: Any) -> Any:
        return [(name, start, end - 16) for name, start, end in loads(metadata)]

    wrap(engine.connector.reader, "loads", early)


@fault("KVR006", "KVR010", "LAB003", on=SIMPLE)
def a_load_is_lost(engine: Any) -> None:
    """The worker is told of no load."""

    def build_connector_meta(build: Any, output: Any) -> Any:
        metadata = build(output)
        metadata.load_cpu_blocks, metadata.load_event = [], -1
        return metadata

    wrap(engine.scheduler.connector, "build_connector_meta", build_connector_meta)


@fault("LAB028", on=SIMPLE)
def a_load_holds_its_memory_for_ever(engine: Any) -> None:
    manager = engine.connector.in_scheduler.scheduler_manager
    manager._cleanup_load_request = lambda name: manager._reqs_to_load.pop(name, None) and 0


@fault("LAB001", text="the step reads", on=("v1-simple",))
def lmcache_loads_other_kv(engine: Any) -> None:
    load_other_kv(engine.connector)


@fault("LAB028", on=("v1-simple",))
def a_hit_is_never_released(engine: Any) -> None:
    """LMCache, which is asked first, has the request: the other one's hit is not used."""
    engine.connector.offloading._manager._free_pending_cpu_hit = lambda pending: None


@fault("KVR009", on=("v1-simple",))
def a_load_keeps_its_request(engine: Any) -> None:
    engine.connector.offloading._manager.request_finished = lambda request, block_ids: (False, None)


# ---------------------------------------------------------------------- parts of faults


class _Kept(dict):  # type: ignore[type-arg]
    """Keeps what is removed."""

    def __delitem__(self, key: Any) -> None: ...

    def pop(self, key: Any, default: Any = None) -> Any:
        return self.get(key, default)


def load_other_kv(connector: Any) -> None:
    """Each chunk that LMCache loads has other KV."""
    wrap(connector.cache_engines[0], "chunk", lambda chunk, name, key: [7] * len(chunk(name, key) or ()) or None)


def _stored(engine: Any, start_later: int, end_later: int) -> None:
    """Report stores with another start and end."""

    def stored(report: Any, name: str, tokens: list[int], start: int, end: int, rank: int = 0) -> None:
        report(name, tokens, start + start_later, end + end_later)

    wrap(engine.request_events, "stored", stored)


def _answer(engine: Any, change: Callable[[Any, int, Any], Any]) -> None:
    """Let the hook promise otherwise, and put the lab's wrapper around it again."""
    connector = engine.scheduler.connector
    ask = type(connector).get_num_new_matched_tokens.__get__(connector)

    def answer(request: Any, computed: int) -> tuple[Any, bool]:
        promised, later = ask(request, computed)
        changed = change(request, computed, promised)
        return changed, later and changed != 0

    connector.get_num_new_matched_tokens = answer
    connector.update_state_after_alloc = type(connector).update_state_after_alloc.__get__(connector)
    engine.request_events.wrap_hooks(connector)


def change_metadata(engine: Any, changed: Callable[[Any], None]) -> None:
    """Change each request's metadata between the adapter in the scheduler and the adapter in the worker."""

    def built(build: Any, output: Any) -> Any:
        metadata = build(output)
        for meta in metadata.requests:
            changed(meta)
        return metadata

    wrap(engine.connector.scheduler_adapter, "build_connector_meta", built)
