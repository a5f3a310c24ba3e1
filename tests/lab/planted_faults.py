"""Faults planted in an engine of the lab, by connector: each one it must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvfix_tools.lab.steps import prompt

CHUNK = 64

Plant = Callable[[Any], None]


class Fault(NamedTuple):
    """`rules`: of which one must find it, with this text in its message. options: of the lab, to play it with.

    schedule: what plays it, if not what plays all of the connector.
    """

    rules: tuple[str, ...]
    text: str
    plant: Plant
    options: dict[str, Any] = {}
    schedule: Plant | None = None


#: (connector, name) -> fault
FAULTS: dict[tuple[str, str], Fault] = {}


def fault(
    *rules: str,
    text: str = "",
    on: tuple[str, ...] = ("v1", "mp"),
    schedule: Plant | None = None,
    **options: dict[str, Any],
) -> Callable[[Plant], Plant]:
    """options: of the lab, by connector; what is not part of a name stands for "-"."""
    of = {name.replace("_", "-"): each for name, each in options.items()}

    def register(plant: Plant) -> Plant:
        for connector in on:
            FAULTS[connector, plant.__name__] = Fault(rules, text, plant, of.get(connector, {}), schedule)
        return plant

    return register


V1, MP = ("v1",), ("mp",)
#: vLLM's OffloadingConnector alone.
OFFLOADING = ("offloading",)


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


@fault("LAB001", on=MP)
def step_writes_a_wrong_slot(engine: Any) -> None:
    write = engine.slots.write

    def shifted(blocks: Any, start: int, contents: Any) -> None:
        write(blocks, start, [*contents[:-1], 7] if len(contents) > 40 else contents)

    engine.slots.write = shifted


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
