"""Faults planted in an engine of the lab, by connector: each one it must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvfix_tools.lab.steps import prompt

CHUNK = 64

Plant = Callable[[Any], None]


class Fault(NamedTuple):
    """`rules`: of which one must find it, with this text in its message. options: of the lab, to play it with."""

    rules: tuple[str, ...]
    text: str
    plant: Plant
    options: dict[str, Any] = {}


#: (connector, name) -> fault
FAULTS: dict[tuple[str, str], Fault] = {}


def fault(
    *rules: str, text: str = "", on: tuple[str, ...] = ("v1", "mp"), **options: dict[str, Any]
) -> Callable[[Plant], Plant]:
    """options: of the lab, by connector."""

    def register(plant: Plant) -> Plant:
        FAULTS.update(
            {(connector, plant.__name__): Fault(rules, text, plant, options.get(connector, {})) for connector in on}
        )
        return plant

    return register


V1, MP = ("v1",), ("mp",)
#: `mp` with KV groups of sliding windows, in objects of their own.
WINDOWS = ("mp-windows",)
#: vLLM's OffloadingConnector alone.
OFFLOADING = ("offloading",)
#: `mp` with a KV group of states.
STATES = ("mp-states",)
#: Speculative decoding, and a connector that stores what is generated.
DRAFTS: dict[str, dict[str, Any]] = {
    "v1": {"drafter": "eagle", "drafts": 3, "acceptance": 70, "lmcache": {"save_decode_cache": True}},
    "mp": {"drafter": "eagle", "drafts": 3, "acceptance": 70, "lmcache": {"mp.save_decode_cache": True}},
}

#: Two ranks, of which the second takes longer.
RANKS: dict[str, dict[str, Any]] = {"v1": {"ranks": 2}, "mp": {"ranks": 2, "rank_delay": 3}}

#: Two ranks that have every other token each.
SHARES: dict[str, dict[str, Any]] = {"mp": {"ranks": 2, "context": True}}

#: Three stages: up to three steps are in flight.
STAGES: dict[str, dict[str, Any]] = {each: {"ranks": 3, "pipeline": True} for each in ("v1", "mp")}


@fault("LAB001")
def load_goes_one_slot_too_far(engine: Any) -> None:
    put = engine.slots.put
    engine.slots.put = lambda slot, content: put(slot + 1 if slot % 16 < 15 else slot, content)


@fault("LAB001")
def load_moves_nothing_and_says_it_did(engine: Any) -> None:
    engine.slots.put = lambda slot, content: None


@fault("LAB001")
def load_takes_the_chunk_of_another_key(engine: Any) -> None:
    engine.cache.get = lambda key: next(reversed(engine.cache.values()))


@fault("LAB001")
def store_reads_the_next_block(engine: Any) -> None:
    get = engine.slots.get
    engine.slots.get = lambda slot: get((slot + 16) % (engine.options.num_blocks * 16))


@fault("LAB001", text="computed ones, its slot holds other KV in KV group 1", on=WINDOWS)
def load_of_a_window_goes_to_blocks_of_another(engine: Any) -> None:
    chunks = engine.connector.server.chunks
    load = chunks.load
    chunks.load = lambda groups, *more: load([groups[0], groups[2], groups[1]], *more)


@fault("LAB001", text="is stored under their key", on=WINDOWS)
def store_of_a_window_reads_other_blocks(engine: Any) -> None:
    chunks = engine.connector.server.chunks
    read = chunks.read
    chunks.read = lambda stored, groups, *more: read(stored, [groups[0], groups[2], groups[1]], *more)


@fault("LAB001", text="computed ones, its slot holds other KV in KV group 1", on=STATES)
def load_of_a_state_goes_to_the_block_before(engine: Any) -> None:
    chunks = engine.connector.server.chunks
    load = chunks.load
    chunks.load = lambda groups, *more: load([groups[0], [*groups[1][1:], 0]], *more)


@fault("LAB001", text="is stored under their key", on=STATES)
def store_takes_the_state_for_that_of_the_chunk_before(engine: Any) -> None:
    chunks = engine.connector.server.chunks
    read = chunks.read
    chunks.read = lambda stored, groups, *more: read(stored, [groups[0], [*groups[1][1:], 0]], *more)


@fault("LAB001", on=MP)
def step_writes_a_wrong_slot(engine: Any) -> None:
    write = engine.slots.write

    def shifted(blocks: Any, start: int, contents: Any) -> None:
        write(blocks, start, [*contents[:-1], 7] if len(contents) > 40 else contents)

    engine.slots.write = shifted


@fault("LAB001", text="store", **DRAFTS)
def drafts_are_stored_before_they_are_accepted(engine: Any) -> None:
    """The connector takes the scheduled drafts for tokens of the request."""
    connector = engine.scheduler.connector
    build = connector.build_connector_meta

    def with_drafts(output: Any) -> Any:
        known = {name: len(engine.requests[name].all_token_ids) for name in output.scheduled_spec_decode_tokens}
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            engine.requests[name]._all_token_ids += drafts
        try:
            return build(output)
        finally:
            for name, tokens in known.items():
                del engine.requests[name]._all_token_ids[tokens:]

    connector.build_connector_meta = with_drafts


@fault("LAB001", text="the step reads", **DRAFTS)
def rejected_drafts_stay_computed(engine: Any) -> None:
    """The scheduler does not take back the computed tokens of rejected drafts."""
    update = engine.scheduler.update_from_output

    def update_from_output(output: Any, answer: Any) -> Any:
        computed = {name: engine.requests[name].num_computed_tokens for name in output.scheduled_spec_decode_tokens}
        outputs = update(output, answer)
        for name, tokens in computed.items():
            engine.requests[name].num_computed_tokens = tokens
        return outputs

    engine.scheduler.update_from_output = update_from_output


@fault("LAB001", text="the step reads", **STAGES)
def tokens_of_a_step_in_flight_count_twice(engine: Any) -> None:
    """The scheduler adds a block to the computed tokens of a request, for a step in flight."""
    schedule, done = engine.scheduler.schedule, set()

    def scheduled() -> Any:
        for request in engine.scheduler.running if engine._answers else ():
            if request.request_id not in done and request.num_computed_tokens + 16 < request.num_prompt_tokens:
                done.add(request.request_id)
                request.num_computed_tokens += 16
        return schedule()

    engine.scheduler.schedule = scheduled


@fault(
    "LAB001", text="the OffloadingConnector stores", on=("v1", "mp", "offloading"),
    v1={"offloading": "last"}, mp={"offloading": "last"},
)  # fmt: skip
def copy_takes_the_next_block(engine: Any) -> None:
    copies, blocks = engine.connector.offloading.ranks[0].copies, engine.options.num_blocks
    read = copies._slots.read
    copies._slots.read = lambda numbers, *more: read([(number + 1) % blocks for number in numbers], *more)


@fault("LAB001", text="the step reads", on=OFFLOADING)
def a_load_is_reported_before_it_is_done(engine: Any) -> None:
    copies = engine.connector.offloading.ranks[0].copies
    copies.is_done = lambda copy: True


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

    load = tier.submit_load

    def submit_load(job: Any) -> None:
        tier.file_mapper.get_file_name = first
        load(job)
        tier.file_mapper.get_file_name = name

    tier.submit_load = submit_load


@fault("KVR009", text="_req_status", on=OFFLOADING)
def a_job_is_never_reported(engine: Any) -> None:
    """A request keeps its state as long as it has a store in flight."""
    scheduler = engine.connector.offloading.scheduler
    scheduler._req_status = _Kept(scheduler._req_status)


@fault("LAB010", text="max_offload_tokens 0", on=OFFLOADING)
def what_a_request_asks_for_is_not_read(engine: Any) -> None:
    scheduler = engine.connector.offloading.scheduler
    asked = scheduler.on_new_request

    def on_new_request(request: Any) -> None:
        asked(request)
        request.kv_transfer_params = {"max_offload_tokens": 0}

    scheduler.on_new_request = on_new_request


@fault("LAB001", "KVR006", "KVR011", v1={"offloading": "last"}, mp={"offloading": "last"})
def promise_is_granted_to_another(engine: Any) -> None:
    """The MultiConnector has another one load than the one that has promised."""
    multi = engine.scheduler.connector
    grant = multi.update_state_after_alloc

    def granted(request: Any, blocks: Any, external: int) -> None:
        if external:
            multi._requests_to_connector[request.request_id] ^= 1
        grant(request, blocks, external)

    multi.update_state_after_alloc = granted


@fault("LAB010", text="this instance is a kv_consumer", on=V1, v1={"kv_role": "kv_consumer"})
def a_consumer_does_not_know_its_role(engine: Any) -> None:
    engine.connector.scheduler_adapter.kv_role = engine.workers[0].adapter.kv_role = "kv_both"


@fault("LAB001", text="of rank 1", on=MP, **RANKS)
def report_of_one_rank_counts_for_all(engine: Any) -> None:
    engine.executor._aggregator = None


@fault("LAB001", text="of rank 1", on=MP, **RANKS)
def a_rank_reports_a_load_before_it_is_done(engine: Any) -> None:
    server = engine.connector.server
    submit = server.submit_retrieve

    def reported(request_id: str, key: Any, *more: Any, **named: Any) -> Any:
        future = submit(request_id, key, *more, **named)
        return server._answer(True) if key.worker_id else future

    server.submit_retrieve = reported


@fault("LAB001", text="is stored under their key", on=MP, **SHARES)
def a_block_is_taken_for_that_of_one_rank(engine: Any) -> None:
    engine.scheduler.connector._group_tokens_per_block = [engine.options.block_of_rank]


@fault("LAB001", text="of rank 1", on=MP, **SHARES)
def a_rank_loads_the_tokens_of_another(engine: Any) -> None:
    chunks = engine.connector.server.chunks
    load = chunks.load
    chunks.load = lambda groups, keys, skip, rank: load(groups, keys, skip, 0)


@fault("LAB001", text="is stored under their key", on=MP, **RANKS)
def a_rank_stores_after_it_has_said_so(engine: Any) -> None:
    """Others write to the blocks meanwhile."""
    server, iterate, done = engine.connector.server, engine.iterate, []
    submit = server.submit_store

    def others_come() -> None:
        iterate()
        if not done and "a" not in engine.scheduler.requests:
            done.append(True)
            engine.take_blocks(engine.free())
            iterate()
            engine.free_blocks()

    engine.iterate = others_come

    def reported(request_id: str, key: Any, *more: Any, **named: Any) -> Any:
        server._rank_delay += 20
        future = submit(request_id, key, *more, **named)
        server._rank_delay -= 20
        return server._answer(True) if key.worker_id else future

    server.submit_store = reported


@fault("LAB001", text="of rank 1", on=V1, **RANKS)
def a_rank_loads_what_another_has_stored(engine: Any) -> None:
    engine.caches[1].get = engine.caches[0].get


@fault("LAB001", on=V1)
def two_blocks_are_exchanged(engine: Any) -> None:
    iterate, memory, done = engine.iterate, engine.slots._blocks, []

    def exchange() -> None:
        iterate()
        blocks = engine.model.blocks("again")
        if not done and len(blocks) > 1:
            memory[blocks[0]], memory[blocks[1]] = memory[blocks[1]], memory[blocks[0]]
            done.append(True)

    engine.iterate = exchange


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
            meta.load_spec.lmcache_cached_tokens -= CHUNK

    _metadata(engine, less)


@fault("KVR006", text="no load of them was started", on=V1)
def load_is_forgotten(engine: Any) -> None:
    def forget(meta: Any) -> None:
        meta.load_spec = None

    _metadata(engine, forget)


@fault("KVR006", "KVR010", on=MP)
def loads_are_dropped(engine: Any) -> None:
    build = engine.scheduler.connector.build_connector_meta

    def without(output: Any) -> Any:
        meta = build(output)
        meta.requests = [each for each in meta.requests if each.direction != "RETRIEVE"]
        return meta

    engine.scheduler.connector.build_connector_meta = without


@fault("KVR007", text="never are", on=V1)
def store_skips_a_chunk(engine: Any) -> None:
    def skip(meta: Any) -> None:
        if meta.req_id == "other" and meta.save_spec is not None:
            meta.save_spec.skip_leading_tokens += CHUNK

    _metadata(engine, skip)


@fault("KVR007", on=MP)
def store_has_a_gap(engine: Any) -> None:
    stored = engine.request_events.stored
    engine.request_events.stored = lambda name, tokens, start, end, rank=0: stored(name, tokens, start + 32, end + 32)


@fault("KVR008", text="are computed")
def store_reports_more_than_there_is(engine: Any) -> None:
    stored = engine.request_events.stored
    engine.request_events.stored = lambda name, tokens, start, end, rank=0: stored(name, tokens, start, end + CHUNK)


@fault("KVR009", text="pins of the worker", on=V1)
def pins_are_kept(engine: Any) -> None:
    engine.cache.unpin = lambda lookup_id: None


@fault("KVR009", text="load_specs", on=V1)
def a_load_spec_is_kept(engine: Any) -> None:
    class Sticky(dict):  # type: ignore[type-arg]
        def pop(self, key: Any, default: Any = None) -> Any:
            return self.get(key, default)

    engine.connector.scheduler_adapter.load_specs = Sticky()


@fault("KVR009", on=MP)
def a_lookup_is_kept(engine: Any) -> None:
    settle = engine.settle

    def leaking() -> None:
        engine.connector.scheduler_adapter._finished_lookup_results["a"] = 0
        settle()

    engine.settle = leaking


@fault("KVR011", text="ZeroDivisionError")
def a_hook_raises(engine: Any) -> None:
    engine.scheduler.connector.build_connector_meta = lambda output: 1 // 0


@fault("LAB003", text="is PREEMPTED for ever", on=V1)
def no_question_is_ever_answered(engine: Any) -> None:
    _answer(engine, lambda request, computed, promised: None if request.num_preemptions else promised)


@fault("LAB009", text="again needs ", on=V1)
def blocks_of_others_never_come_free(engine: Any) -> None:
    engine.free_blocks = engine._held.clear


class _Kept(dict):  # type: ignore[type-arg]
    def __delitem__(self, key: Any) -> None: ...


def _answer(engine: Any, change: Callable[[Any, int, Any], Any]) -> None:
    """The hook itself promises otherwise; the lab's wrapper is put around it again."""
    connector = engine.scheduler.connector
    ask = type(connector).get_num_new_matched_tokens.__get__(connector)

    def answer(request: Any, computed: int) -> tuple[Any, bool]:
        promised, later = ask(request, computed)
        changed = change(request, computed, promised)
        return changed, later and changed != 0

    connector.get_num_new_matched_tokens = answer
    connector.update_state_after_alloc = type(connector).update_state_after_alloc.__get__(connector)
    engine.request_events.wrap_hooks(connector)


def _metadata(engine: Any, changed: Callable[[Any], None]) -> None:
    """Change each request's metadata, between the adapter in the scheduler and that in the worker."""
    adapter = engine.connector.scheduler_adapter
    build = adapter.build_connector_meta

    def built(output: Any) -> Any:
        metadata = build(output)
        for meta in metadata.requests:
            changed(meta)
        return metadata

    adapter.build_connector_meta = built
