"""Faults planted in an engine of the lab, one and more for each feature that the fuzzer draws."""

from typing import Any

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.engine.memory import GARBAGE
from kvfix_tools.lab.fuzz.parameters import CONFIGURED
from kvfix_tools.lab.steps import prompt
from tests.lab.planted import counted, fault, noted, row, steps, until
from tests.lab.planted_faults import BUILD, MP, V1, in_metadata

#: Speculative decoding, and a connector that stores generated tokens.
DRAFTS: dict[str, dict[str, Any]] = {
    "v1": {"drafter": "eagle", "drafts": 3, "acceptance": 70, "lmcache": {"save_decode_cache": True}},
    "mp": {"drafter": "eagle", "drafts": 3, "acceptance": 70, "lmcache": {"mp.save_decode_cache": True}},
}


# ---------------------------------------------------------------------- speculative decoding


@fault("LAB001 store", at=BUILD, **DRAFTS)
def drafts_are_stored_before_they_are_accepted(engine: Any, build: Any, output: Any) -> Any:
    """The connector takes the scheduled drafts for tokens of the request."""
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
    """The scheduler does not take back the computed tokens of rejected drafts."""
    computed = {name: engine.requests[name].num_computed_tokens for name in output.scheduled_spec_decode_tokens}
    outputs = update(output, answer)
    for name, tokens in computed.items():
        engine.requests[name].num_computed_tokens = tokens
    return outputs


@fault("LAB001 the step reads", on=MP, at="scheduler.kv_cache_manager.coordinator.find_longest_cache_hit", **DRAFTS)
def last_block_of_a_hit_is_dropped_and_counts(_: Any, find: Any, *args: Any) -> Any:
    """vLLM drops it for EAGLE, and counts its tokens as computed."""
    blocks, hit, more = find(*args)
    return blocks, hit + 16 if hit else 0, more


# ---------------------------------------------------------------------- the order of a step


@fault("LAB001 the step reads", on=MP, at="model.block_table.update", mp={"model_runner_v2": True})
def a_resumed_request_that_comes_as_new_keeps_its_old_blocks(engine: Any, update: Any, output: Any) -> None:
    update(output)
    rows = engine.model.block_table.rows
    for new in output.scheduled_new_reqs:
        rows[new.req_id][:] = noted(engine).setdefault(new.req_id, list(rows[new.req_id]))


STORED = steps(do.serve("r", prompt(200), max_tokens=3), do.settle(), do.expect_stored("r"))


@fault("LAB004", on=MP, at="workers.0.called.get_finished", schedule=STORED, every={"save_last": True})
def nothing_is_saved_after_the_report(engine: Any, report: Any, ended: set[str]) -> Any:
    engine.workers[0].called.wait_for_save = lambda: None
    return report(ended)


# ---------------------------------------------------------------------- sessions, priorities, pauses, resets


SESSION = steps(
    [do.serve("r", prompt(70), max_tokens=4, resumable=True), do.add_input("r", prompt(90, seed=1), max_tokens=4)],
    [do.run(), do.end_input("r"), do.settle()],
)


@fault("LAB001 the step reads token", at="scheduler._update_request_as_session", schedule=SESSION)
def dropped_token_of_a_turn_counts_as_computed(_: Any, update: Any, session: Any, more: Any) -> None:
    update(session, more)
    session.num_computed_tokens += 1


def _gives_way(engine: Any) -> bool:
    """The request that came first gives way to the second one."""
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
#: Reset all KV while a request runs.
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


# ---------------------------------------------------------------------- LMCache's other ways to load, and its roles


row(
    "the_last_layer_is_not_loaded", "slots.put",
    lambda _, put, slot, content: put(slot, content) if content == GARBAGE else None, "LAB001 the step reads", on=V1,
    v1={"lmcache": {"use_layerwise": True}},
)  # fmt: skip


@fault("LAB001 the step reads", on=V1, v1={"lmcache": {"enable_async_loading": True}})
def chunks_that_were_fetched_are_mixed_up(engine: Any) -> None:
    (worker_engine,) = engine.connector.cache_engines
    worker_engine.chunk = lambda name, key: next(reversed(worker_engine.fetched[name].values()))


#: A request whose KV is for a decoder, and a request that must not be stored.
FOR_DECODER = steps(
    do.serve(name, prompt(100, seed), max_tokens=2, sampling={"extra_args": {"kv_transfer_params": CONFIGURED[name]}})
    for seed, name in enumerate(("prefill", "skip_save"), 1)
)
in_metadata(
    "what_is_not_to_be_stored_is_stored", lambda _, meta: setattr(meta.save_spec, "can_save", True),
    "LAB010 it asks for lmcache.skip_save", schedule=FOR_DECODER,
)  # fmt: skip


# ---------------------------------------------------------------------- a server that stops


#: The server stops during a store and counts as dead. Then it continues, and ends the store.
SILENT_SERVER = steps(
    do.admit("r", prompt(200), max_tokens=3),
    until(lambda engine: engine.connector.server.storing["r"]),
    [do.server_stops(), do.step(2), do.server_goes_on(), do.run(), do.settle()],
    counted("server_stops", 1, 1),
)


@fault("LAB001 is stored under their key", on=MP, at="connector.server._store", schedule=SILENT_SERVER, mp={"delay": 3})
def a_store_after_silence_takes_other_blocks(engine: Any, store: Any, key: Any, groups: list[list[int]]) -> Any:
    return store(key, [group[::-1] for group in groups] if engine.counts["server_stops"] else groups)
