"""Plant faults in an engine of the lab with several ranks, or with several KV groups."""

from collections.abc import Callable
from typing import Any

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.steps import prompt
from tests.lab.planted import fault, noted, row, rows, steps, wrap
from tests.lab.planted_faults import MP, V1

#: Play two ranks. With mp, transfers of the second rank take longer.
RANKS: dict[str, dict[str, Any]] = {"v1": {"ranks": 2}, "mp": {"ranks": 2, "rank_delay": 3}}

#: Play decode context parallelism: each of two ranks has every second token.
SHARES: dict[str, dict[str, Any]] = {"mp": {"ranks": 2, "context": True}}


def _count_twice(engine: Any, schedule: Any) -> Any:
    """While a step is in flight, count one more block (16 tokens) as computed, once for each running request."""
    done = noted(engine)
    for request in engine.scheduler.running if engine._answers else ():
        if request.request_id not in done and request.num_computed_tokens + 16 < request.num_prompt_tokens:
            done[request.request_id] = True
            request.num_computed_tokens += 16
    return schedule()


for name, ahead in (
    ("tokens_of_a_step_in_flight_count_twice", {"ranks": 3, "pipeline": True}),
    ("tokens_of_the_step_before_count_twice", {"async_scheduling": True}),
):
    row(name, "scheduler.schedule", _count_twice, "LAB001 the step reads", every=ahead)
row(
    "report_of_one_rank_counts_for_all", "", lambda engine: vars(engine.executor).update(_aggregator=None),
    "LAB001 of rank 1", on=MP, **RANKS,
)  # fmt: skip


@fault("LAB001 of rank 1", on=MP, at="connector.server.submit_retrieve", **RANKS)
def a_rank_reports_a_load_before_it_is_done(
    engine: Any, submit: Any, name: str, key: Any, *more: Any, **named: Any
) -> Any:
    future = submit(name, key, *more, **named)
    return engine.connector.server._answer(True) if key.worker_id else future


row(
    "a_block_is_taken_for_that_of_one_rank", "",
    lambda engine: vars(engine.scheduler.connector).update(_group_tokens_per_block=[engine.options.block_of_rank]),
    "LAB001 is stored with wrong KV", on=MP, **SHARES,
)  # fmt: skip
row(
    "a_rank_loads_the_tokens_of_another", "connector.server.chunks.load",
    lambda _, load, groups, keys, skip, rank: load(groups, keys, skip, 0), "LAB001 of rank 1", on=MP, **SHARES,
)  # fmt: skip


@fault("LAB001 is stored with wrong KV", on=MP, **RANKS)
def a_rank_stores_after_it_has_said_so(engine: Any) -> None:
    """Report a store of the second rank before the store ends. Other requests then write to blocks of the store."""
    server, done = engine.connector.server, []

    def others_come(iterate: Any) -> None:
        iterate()
        if not done and "a" not in engine.scheduler.requests:
            done.append(True)
            engine.take_blocks(engine.free())
            iterate()
            engine.free_blocks()

    def reported(submit: Any, request_id: str, key: Any, *more: Any, **named: Any) -> Any:
        server._rank_delay += 20
        future = submit(request_id, key, *more, **named)
        server._rank_delay -= 20
        return server._answer(True) if key.worker_id else future

    wrap(engine, "iterate", others_come)
    wrap(server, "submit_store", reported)


row(
    "a_rank_loads_what_another_has_stored", "caches.1.get", lambda engine, _, key: engine.caches[0].get(key),
    "LAB001 of rank 1", on=V1, **RANKS,
)  # fmt: skip
#: Request "again" loads tokens that "first" has stored. The load fails in the second rank.
FAILING_RANK = steps(
    do.store("first", prompt(300)), do.admit("again", prompt(300), max_tokens=5), do.fail_load("again", 1, 1), do.run()
)
row(
    "a_rank_keeps_its_failure_to_itself", "workers.1.called.get_block_ids_with_load_errors", lambda *_: set(), "LAB001",
    "LAB008", on=V1, schedule=FAILING_RANK, **RANKS,
)  # fmt: skip
WINDOWS = ("mp-windows",)
STATES = ("mp-states",)
#: The server keeps all KV groups of a chunk in one object.
ONE_OBJECT: dict[str, Any] = {"separate_object_groups": False, "windows": (32,)}
#: Play a sliding window whose blocks have twice as many tokens as the blocks of full attention.
LARGER_BLOCKS: dict[str, Any] = {"windows": (64,), "window_blocks": 2}
STATES_AND_DRAFTS: dict[str, Any] = {"drafter": "mtp", "drafts": 3, "acceptance": 50}
COMPUTED, STORED = "computed ones, its slot holds other KV", "is stored with wrong KV"


def _others(groups: list[Any]) -> list[Any]:
    return [groups[0], groups[2], groups[1]]


def _before(groups: list[Any]) -> list[Any]:
    return [groups[0], [*groups[1][1:], 0]]


def _changed(changed: Callable[[Any], Any], place: int) -> Callable[..., Any]:
    """Return a fault that changes the blocks of a transfer. place: index of the argument with the blocks."""
    return lambda _, original, *given: original(*given[:place], changed(given[place]), *given[place + 1 :])


LOAD, READ = "connector.server.chunks.load", "connector.server.chunks.read"
rows({
    "load_of_a_window_goes_to_blocks_of_another": (LOAD, _changed(_others, 0), f"LAB001 {COMPUTED} in KV group 1"),
    "store_of_a_window_reads_other_blocks": (READ, _changed(_others, 1), f"LAB001 {STORED}"),
}, on=WINDOWS)  # fmt: skip
rows({
    "load_of_a_state_goes_to_the_block_before": (LOAD, _changed(_before, 0), f"LAB001 {COMPUTED} in KV group 1"),
    "store_takes_the_state_for_that_of_the_chunk_before": (READ, _changed(_before, 1), f"LAB001 {STORED}"),
}, on=STATES)  # fmt: skip
row(
    "part_of_a_group_is_read_from_blocks_of_another", LOAD, _changed(_before, 0), "LAB001 in KV group 1", on=WINDOWS,
    mp_windows=ONE_OBJECT,
)  # fmt: skip
FAILED_LOAD = steps(do.stored_elsewhere(prompt(128)), do.admit("r", prompt(160), 5), do.fail_load("r"), do.run())
row(
    "a_failed_load_of_groups_is_not_reported", "workers.0.also_reported", lambda *_: {}, "LAB003", "LAB008", "KVR010",
    on=WINDOWS, schedule=FAILED_LOAD,
)  # fmt: skip
row(
    "larger_blocks_are_taken_for_small_ones", "",
    lambda engine: vars(engine.scheduler.connector).update(_group_tokens_per_block=[16, 16]), f"LAB001 {STORED}",
    on=WINDOWS, mp_windows=LARGER_BLOCKS,
)  # fmt: skip
row(
    "state_of_a_rejected_draft_is_read", "model.groups.1.write",
    lambda _, write, name, done, contents, drafts, accepted: write(
        name, done, contents, drafts, min(drafts, accepted + 1)
    ), "LAB001 in KV group 1", on=STATES, mp_states=STATES_AND_DRAFTS,
)  # fmt: skip


def _in_metadata_of_stores(block: int | None) -> Any:
    """Replace the last block of KV group 1 in each store by `block`. If `block` is None, no step waits for stores."""

    def processed(_: Any, process: Any, output: Any, metadata: Any) -> Any:
        answer = process(output, metadata)
        if block is None:
            metadata.need_flush_before_forward = metadata._kvfix_preempted = False
        for meta in metadata.requests:
            if block is not None and meta.direction == "STORE":
                meta.op.block_ids[1][-1] = block
        return answer

    return processed


# these faults change the connector's metadata after the fixes have corrected the metadata
for name, block, text in (
    ("store_of_a_window_names_null_blocks", 0, "null blocks"),
    ("store_of_a_window_names_free_blocks", 59, "blocks freed before the step"),
    ("no_step_waits_for_the_store_of_a_window", None, "blocks freed after the step and used again"),
):
    row(
        name, "connector.in_scheduler._process_cached_requests", _in_metadata_of_stores(block),
        f"KVR014 of KV group 1 are stored from {text}", on=("mp-window-freed",),
    )  # fmt: skip
