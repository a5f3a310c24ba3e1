"""Plant faults in one engine of the lab, at least one fault for each feature that the fuzzer draws."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.engine.memory import GARBAGE
from kvfix_tools.lab.fuzz.parameters import CONFIGURED
from kvfix_tools.lab.steps import prompt
from tests.lab.planted import SETUPS, counted, fault, noted, row, rows, steps, until, wrap

V1, MP, OFFLOADING, SIMPLE, BOTH = ("v1",), ("mp",), ("offloading",), ("simple-offload",), ("v1-simple",)
#: Play LMCache's connector in a MultiConnector, before OffloadingConnector.
LAST: dict[str, Any] = {"v1": {"offloading": "last"}, "mp": {"offloading": "last"}}
#: Play speculative decoding, and a connector that stores generated tokens.
DRAFTS: dict[str, dict[str, Any]] = {
    "v1": {"drafter": "eagle", "drafts": 3, "acceptance": 70, "lmcache": {"save_decode_cache": True}},
    "mp": {"drafter": "eagle", "drafts": 3, "acceptance": 70, "lmcache": {"mp.save_decode_cache": True}},
}
#: Paths from the engine to methods that faults replace, or to the objects that have these methods.
COPIES, BUILD = "connector.offloading.ranks.0", "scheduler.connector.build_connector_meta"
IN_SCHEDULER = "connector.in_scheduler.scheduler_manager"
TIER, MANAGER = "connector.offloading.manager.secondary_tiers.0", "connector.offloading._manager"
METADATA = "connector.scheduler_adapter.build_connector_meta"


def _promise(change: Callable[..., Any]) -> Callable[[Any], None]:
    """Return a fault that promises the tokens that `change` returns. `asked` lists num_preemptions at each lookup."""

    def plant(engine: Any) -> None:
        connector, asked = engine.scheduler.connector, []
        ask = type(connector).get_num_new_matched_tokens.__get__(connector)

        def answer(request: Any, computed: int) -> tuple[Any, bool]:
            promised, later = ask(request, computed)
            asked.append(request.num_preemptions)
            changed = promised if promised is None else change(request, computed, promised, asked)
            return changed, later and changed != 0

        connector.get_num_new_matched_tokens = answer
        connector.update_state_after_alloc = type(connector).update_state_after_alloc.__get__(connector)
        engine.request_events.wrap_hooks(connector)

    return plant


def _built(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def built(engine: Any, build: Any, output: Any) -> Any:
        metadata = build(output)
        change(engine, metadata)
        return metadata

    return built


def _in_metadata(change: Callable[[Any, Any], None]) -> Callable[..., Any]:
    return _built(lambda engine, metadata: [change(engine, meta) for meta in metadata.requests])


def _less(engine: Any, meta: Any) -> None:
    if meta.load_spec is not None and meta.load_spec.can_load:
        meta.load_spec.lmcache_cached_tokens -= engine.options.chunk_size


def _skip(engine: Any, meta: Any) -> None:
    if meta.req_id == "other" and meta.save_spec is not None:
        meta.save_spec.skip_leading_tokens += engine.options.chunk_size


def _stored(start_later: int, end_later: int) -> Any:
    """Return a fault that shifts the reported start and end of each store by these numbers of tokens."""
    return lambda _, report, name, tokens, start, end, rank=0: report(
        name, tokens, start + start_later, end + end_later
    )


class _Kept(dict):  # type: ignore[type-arg]
    def __delitem__(self, key: Any) -> None: ...

    def pop(self, key: Any, default: Any = None) -> Any:
        return self.get(key, default)


def _keep(owner: Any, name: str) -> None:
    setattr(owner, name, _Kept(getattr(owner, name)))


def load_other_kv(connector: Any) -> None:
    """Put wrong KV into each chunk that LMCache loads."""
    wrap(connector.cache_engines[0], "chunk", lambda chunk, name, key: [7] * len(chunk(name, key) or ()) or None)


rows({
    "load_goes_one_slot_too_far": ("slots.put", lambda _, put, slot, kv: put(slot + (slot % 16 < 15), kv), "LAB001"),
    "load_moves_nothing_and_says_it_did": ("slots.put", lambda *_: None, "LAB001"),
    "load_takes_the_chunk_of_another_key": ("cache.get", lambda engine, *_: [*engine.cache.values()][-1], "LAB001"),
    "store_reads_the_next_block": ("slots.get",
        lambda engine, get, slot: get((slot + 16) % (engine.options.num_blocks * 16)), "LAB001"),
    "store_reports_more_than_there_is": ("request_events.stored", _stored(0, 64), "KVR008 are computed"),
    "chunk_is_lost": ("cache.get", lambda *_: None, "LAB002"),
    "a_hook_raises": (BUILD, lambda *_: 1 // 0, "KVR011 ZeroDivisionError"),
    "promises_one_too_many": ("", _promise(lambda request, computed, *_: request.num_tokens - computed), "KVR001"),
})  # fmt: skip
rows({
    "pins_are_kept": ("cache.unpin", lambda *_: None, "KVR009 pins of the worker"),
    "load_comes_short_for_no_reason": ("",
        lambda engine: engine.workers[0].failing.update(again=3), "LAB002 up to token 192, but promised up to 256"),
    "blocks_of_others_never_come_free": ("free_blocks",
        lambda engine, _: engine._held.clear(), "LAB009 again needs "),
    "changes_its_mind": ("",
        _promise(lambda _, __, promised, asked: 0 if asked.count(1) > 1 else promised), "KVR002 promised 0, but"),
    "no_question_is_ever_answered": ("",
        _promise(lambda request, _, promised, __: None if request.num_preemptions else promised),
        "LAB003 is PREEMPTED for ever"),
    "load_of_less_than_was_granted": (METADATA, _in_metadata(_less), "KVR004"),
    "load_is_forgotten": (METADATA,
        _in_metadata(lambda _, meta: setattr(meta, "load_spec", None)), "KVR006 no load of them was started"),
    "store_skips_a_chunk": (METADATA, _in_metadata(_skip), "KVR007 are never stored"),
    "a_load_spec_is_kept": ("",
        lambda engine: _keep(engine.connector.scheduler_adapter, "load_specs"), "KVR009 load_specs"),
}, on=V1)  # fmt: skip
rows({
    "step_writes_a_wrong_slot": ("model.groups.0._memories.*.write",
        lambda _, write, blocks, start, kv: write(blocks, start, [*kv[:-1], 7] if len(kv) > 40 else kv), "LAB001"),
    "loads_are_dropped": (BUILD, _built(lambda _, metadata: vars(metadata).update(
        requests=[each for each in metadata.requests if each.direction != "RETRIEVE"]
    )), "KVR006", "KVR010"),
    "store_has_a_gap": ("request_events.stored", _stored(32, 32), "KVR007"),
}, on=MP)  # fmt: skip
row(
    "changes_its_promise", "", _promise(lambda _, __, promised, asked: promised if len(asked) % 2 else 0), "KVR002",
    on=MP, schedule=steps(
        [do.stored_elsewhere(prompt(64)), do.keep_blocks(0), do.admit("z", prompt(64)), do.step(5)],
        [do.free_blocks(), lambda engine: SETUPS["mp"].schedule(engine)],
    ),
)  # fmt: skip
rows({
    # vLLM gives blocks to other requests during a copy, because the worker does not wait for the end of the copy
    "a_store_is_not_waited_for": ("connector.offloading.ranks.0.connector.worker.wait",
        lambda *_: None, "LAB001 OffloadingConnector stores"),
    # the connector deletes a request's state when the request's last job is reported. The fault keeps all states
    "a_job_is_never_reported": ("",
        lambda engine: _keep(engine.connector.offloading.scheduler, "_req_status"), "KVR009 _req_status"),
}, on=OFFLOADING)  # fmt: skip
row(
    "a_load_is_reported_before_it_is_done", f"{COPIES}.is_done", lambda *_: True, "LAB001 the step reads",
    on=(*OFFLOADING, *SIMPLE),
)  # fmt: skip
rows({
    "a_load_ends_a_block_early": ("connector.reader.loads",
        lambda _, loads, metadata: [(name, start, end - 16) for name, start, end in loads(metadata)],
        "KVR004", "LAB002"),
    "a_load_is_lost": (BUILD,
        _built(lambda _, metadata: vars(metadata).update(load_cpu_blocks=[], load_event=-1)),
        "KVR006", "KVR010", "LAB003"),
    "a_load_holds_its_memory_for_ever": (f"{IN_SCHEDULER}._cleanup_load_request",
        lambda engine, _, name: engine.connector.in_scheduler.scheduler_manager._reqs_to_load.pop(name, None) and 0,
        "LAB028"),
}, on=SIMPLE)  # fmt: skip
rows({
    "lmcache_loads_other_kv": ("", lambda engine: load_other_kv(engine.connector), "LAB001 the step"),
    # vLLM asks LMCache first. LMCache has the prompt, so vLLM drops the hit of SimpleCPUOffloadConnector.
    "a_hit_is_never_released": (f"{MANAGER}._free_pending_cpu_hit", lambda *_: None, "LAB028"),
    "a_load_keeps_its_request": (f"{MANAGER}.request_finished", lambda *_: (False, None), "KVR009"),
}, on=BOTH)  # fmt: skip


@fault("LAB001 Connector stores", on=("v1", "mp", *OFFLOADING, *SIMPLE, *BOTH), at=f"{COPIES}._submit", **LAST)
def copy_takes_the_next_block(engine: Any, submit: Any, pieces: Any) -> Any:
    memory = engine.connector.offloading.ranks[0].gpu
    start, block, end = memory.data_ptr(), memory.shape[1], memory.data_ptr() + memory.numel()
    return submit([(source + block * (start <= source < end - block), *more) for source, *more in pieces])


@fault("LAB001 the step reads", on=OFFLOADING, at=f"{TIER}.submit_load", offloading={"tier": "fs"})
def a_file_is_that_of_another_chunk(engine: Any, load: Any, job: Any) -> None:
    mapper = engine.connector.offloading.manager.secondary_tiers[0].file_mapper
    name, noting = mapper.get_file_name, noted(engine)
    with mock.patch.object(mapper, "get_file_name", lambda key: noting.setdefault("name", name(key))):
        load(job)


@fault("LAB010 max_offload_tokens 0", on=OFFLOADING, at="connector.offloading.scheduler.on_new_request")
def what_a_request_asks_for_is_not_read(engine: Any, on_new_request: Any, request: Any) -> None:
    on_new_request(request)
    request.kv_transfer_params = {"max_offload_tokens": 0}


@fault("LAB001", "KVR006", "KVR011", at="scheduler.connector.update_state_after_alloc", **LAST)
def promise_is_granted_to_another(engine: Any, grant: Any, request: Any, blocks: Any, external: int) -> None:
    """Let the MultiConnector give the blocks for the load to the child that has promised no tokens."""
    if external:
        engine.scheduler.connector._requests_to_connector[request.request_id] ^= 1
    grant(request, blocks, external)


@fault("LAB010 this instance is a kv_consumer", on=V1, v1={"kv_role": "kv_consumer"})
def a_consumer_does_not_know_its_role(engine: Any) -> None:
    engine.connector.scheduler_adapter.kv_role = engine.workers[0].adapter.kv_role = "kv_both"


@fault("LAB001", on=V1, at="iterate")
def two_blocks_are_exchanged(engine: Any, iterate: Any) -> None:
    iterate()
    memory, blocks = engine.slots._blocks, engine.model.blocks("again")
    if not noted(engine) and len(blocks) > 1:
        memory[blocks[0]], memory[blocks[1]] = memory[blocks[1]], memory[blocks[0]]
        noted(engine)["done"] = True


@fault("KVR009", on=MP, at="settle")
def a_lookup_is_kept(engine: Any, settle: Any) -> None:
    engine.connector.scheduler_adapter._finished_lookup_results["a"] = 0
    settle()


@fault("LAB001", "KVR011", on=SIMPLE)
def a_store_holds_no_blocks(engine: Any) -> None:
    """Let vLLM give blocks to other requests while the connector copies the blocks."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    engine.connector.in_scheduler.scheduler_manager._gpu_block_pool = SimpleNamespace(
        blocks=pool.blocks, touch=lambda blocks: None, free_blocks=lambda blocks: None,
        cached_block_hashes_by_block=pool.cached_block_hashes_by_block,
    )  # fmt: skip


@fault("KVR009", on=SIMPLE, at=f"{IN_SCHEDULER}.get_num_new_matched_tokens")
def a_hit_is_kept(engine: Any, ask: Any, request: Any, computed: int) -> Any:
    manager = engine.connector.in_scheduler.scheduler_manager
    manager.request_finished_all_groups = lambda request, blocks: (False, None)
    answer = ask(request, computed)
    manager._pending_cpu_hits.setdefault(request.request_id, (([],), 0, computed))
    return answer


@fault("LAB001 store", at=BUILD, **DRAFTS)
def drafts_are_stored_before_they_are_accepted(engine: Any, build: Any, output: Any) -> Any:
    known = {name: len(engine.requests[name].all_token_ids) for name in output.scheduled_spec_decode_tokens}
    for name, drafts in output.scheduled_spec_decode_tokens.items():
        engine.requests[name]._all_token_ids += drafts
    try:
        return build(output)
    finally:
        for name, tokens in known.items():
            del engine.requests[name]._all_token_ids[tokens:]


@fault("LAB001 the step reads", at="scheduler.update_from_output", **DRAFTS)
def rejected_drafts_stay_computed(engine: Any, update: Any, output: Any, answer: Any) -> Any:
    computed = {name: engine.requests[name].num_computed_tokens for name in output.scheduled_spec_decode_tokens}
    outputs = update(output, answer)
    for name, tokens in computed.items():
        engine.requests[name].num_computed_tokens = tokens
    return outputs


@fault("LAB001 the step reads", on=MP, at="scheduler.kv_cache_manager.coordinator.find_longest_cache_hit", **DRAFTS)
def last_block_of_a_hit_is_dropped_and_counts(_: Any, find: Any, *args: Any) -> Any:
    """Let vLLM count the last block of a hit as computed, although vLLM drops this block for EAGLE."""
    blocks, hit, more = find(*args)
    return blocks, hit + 16 if hit else 0, more


@fault("LAB001 the step reads", on=MP, at="model.groups.0.begin", mp={"model_runner_v2": True})
def a_resumed_request_that_comes_as_new_keeps_its_old_blocks(engine: Any, update: Any, output: Any) -> None:
    update(output)
    rows = engine.model.groups[0].rows
    for new in output.scheduled_new_reqs:
        rows[new.req_id][:] = noted(engine).setdefault(new.req_id, list(rows[new.req_id]))


STORED = steps(do.serve("r", prompt(200), max_tokens=3), do.settle(), do.expect_stored("r"))


@fault("LAB004", on=MP, at="workers.0.called.get_finished", schedule=STORED, every={"save_last": True})
def nothing_is_saved_after_the_report(engine: Any, report: Any, ended: set[str]) -> Any:
    engine.workers[0].called.wait_for_save = lambda: None
    return report(ended)


SESSION = steps(
    [do.serve("r", prompt(70), max_tokens=4, resumable=True), do.add_input("r", prompt(90, seed=1), max_tokens=4)],
    [do.run(), do.end_input("r"), do.settle()],
)


@fault("LAB001 the step reads token", at="scheduler._update_request_as_session", schedule=SESSION)
def dropped_token_of_a_turn_counts_as_computed(_: Any, update: Any, session: Any, more: Any) -> None:
    update(session, more)
    session.num_computed_tokens += 1


def _gives_way(engine: Any) -> bool:
    assert engine.requests["high"].num_preemptions == 0
    return bool(engine.requests["low"].num_preemptions)


GIVES_WAY = steps(
    [do.admit("low", prompt(120), max_tokens=60, priority=1), do.step(4), do.keep_blocks(3)],
    [do.admit("high", prompt(30, seed=1), max_tokens=60, priority=0), until(_gives_way), do.free_blocks(), do.run()],
)
BEGUN = do.admit("first", prompt(100), max_tokens=30), do.step(6)
RESET = steps(BEGUN, do.reset_prefix_cache(True), do.run(), do.settle())


def _keeps_computed(engine: Any, preempt: Any, request: Any, *more: Any, **named: Any) -> None:
    computed = request.num_computed_tokens
    preempt(request, *more, **named)
    request.num_computed_tokens = computed


for name, schedule, options in (
    ("the_request_that_gives_way_keeps_its_computed_tokens", GIVES_WAY, {"policy": "priority", "num_blocks": 32}),
    ("a_request_that_a_reset_preempts_keeps_its_computed_tokens", RESET, {}),
):
    row(name, "scheduler._preempt_request", _keeps_computed, "LAB001", "KVR011", schedule=schedule, every=options)
PAUSE = steps(BEGUN, do.pause(), do.admit("second", prompt(100, seed=1)), do.step(3), do.unpause(), do.run())
row("a_pause_never_ends", "unpause", lambda *_: None, "LAB003 is WAITING for ever", schedule=PAUSE)
#: Load new weights while a request runs. The engine then drops all KV.
NEW_WEIGHTS = steps(
    [do.admit("first", prompt(200), max_tokens=30), do.step(12), do.new_weights(), do.run()],
    [do.serve("again", prompt(200), max_tokens=3), do.settle()],
)
WEIGHTS: dict[str, Any] = {"on": MP, "schedule": NEW_WEIGHTS}
row("the_cache_keeps_kv_of_old_weights", "scheduler.reset_connector_cache", lambda *_: True, "LAB001", **WEIGHTS)
row(
    "vllm_keeps_kv_of_old_weights", "scheduler.kv_cache_manager.reset_prefix_cache", lambda *_: True,
    "LAB001 the step reads", **WEIGHTS,
)  # fmt: skip
row(
    "the_last_layer_is_not_loaded", "slots.put",
    lambda _, put, slot, content: put(slot, content) if content == GARBAGE else None, "LAB001 the step reads", on=V1,
    v1={"lmcache": {"use_layerwise": True}},
)  # fmt: skip
row(
    "chunks_that_were_fetched_are_mixed_up", "connector.cache_engines.0.chunk",
    lambda engine, _, name, key: next(reversed(engine.connector.cache_engines[0].fetched[name].values())),
    "LAB001 the step reads", on=V1, v1={"lmcache": {"enable_async_loading": True}},
)  # fmt: skip
#: Play two requests. A decode instance gets the KV of request "prefill". LMCache must not store request "skip_save".
FOR_DECODER = steps(
    do.serve(name, prompt(100, seed), max_tokens=2, sampling={"extra_args": {"kv_transfer_params": CONFIGURED[name]}})
    for seed, name in enumerate(("prefill", "skip_save"), 1)
)
row(
    "what_is_not_to_be_stored_is_stored", METADATA,
    _in_metadata(lambda _, meta: setattr(meta.save_spec, "can_save", True)), "LAB010 it asks for lmcache.skip_save",
    on=V1, schedule=FOR_DECODER,
)  # fmt: skip
#: The server pauses during a store, so the connector considers the server dead. Then the server completes the store.
SILENT_SERVER = steps(
    do.admit("r", prompt(200), max_tokens=3),
    until(lambda engine: engine.connector.server.storing["r"]),
    [do.server_stops(), do.step(2), do.server_goes_on(), do.run(), do.settle()],
    counted("server_stops", 1, 1),
)
row(
    "a_store_after_silence_takes_other_blocks", "connector.server._store",
    lambda engine, store, key, groups: store(
        key, [group[::-1] for group in groups] if engine.counts["server_stops"] else groups
    ),
    "LAB001 is stored with wrong KV", on=MP, schedule=SILENT_SERVER, mp={"delay": 3},
)  # fmt: skip
