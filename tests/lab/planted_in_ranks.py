"""Faults planted in an engine of the lab with several ranks."""

from __future__ import annotations

from typing import Any

from kvfix_tools.lab.steps import prompt
from tests.lab.planted import fault, wrap
from tests.lab.planted_faults import MP, V1

#: Two ranks, of which the second takes longer.
RANKS: dict[str, dict[str, Any]] = {"v1": {"ranks": 2}, "mp": {"ranks": 2, "rank_delay": 3}}

#: Two ranks that have every other token each.
SHARES: dict[str, dict[str, Any]] = {"mp": {"ranks": 2, "context": True}}

#: Three stages: up to three steps are in flight.
STAGES: dict[str, Any] = {"every": {"ranks": 3, "pipeline": True}}


@fault("LAB001", text="the step reads", **STAGES)
def tokens_of_a_step_in_flight_count_twice(engine: Any) -> None:
    """The scheduler adds a block to the computed tokens of a request, for a step in flight."""
    done = set()

    def scheduled(schedule: Any) -> Any:
        for request in engine.scheduler.running if engine._answers else ():
            if request.request_id not in done and request.num_computed_tokens + 16 < request.num_prompt_tokens:
                done.add(request.request_id)
                request.num_computed_tokens += 16
        return schedule()

    wrap(engine.scheduler, "schedule", scheduled)


@fault("LAB001", text="of rank 1", on=MP, **RANKS)
def report_of_one_rank_counts_for_all(engine: Any) -> None:
    engine.executor._aggregator = None


@fault("LAB001", text="of rank 1", on=MP, **RANKS)
def a_rank_reports_a_load_before_it_is_done(engine: Any) -> None:
    server = engine.connector.server

    def reported(submit: Any, request_id: str, key: Any, *more: Any, **named: Any) -> Any:
        future = submit(request_id, key, *more, **named)
        return server._answer(True) if key.worker_id else future

    wrap(server, "submit_retrieve", reported)


@fault("LAB001", text="is stored under their key", on=MP, **SHARES)
def a_block_is_taken_for_that_of_one_rank(engine: Any) -> None:
    engine.scheduler.connector._group_tokens_per_block = [engine.options.block_of_rank]


@fault("LAB001", text="of rank 1", on=MP, **SHARES)
def a_rank_loads_the_tokens_of_another(engine: Any) -> None:
    wrap(engine.connector.server.chunks, "load", lambda load, groups, keys, skip, rank: load(groups, keys, skip, 0))


@fault("LAB001", text="is stored under their key", on=MP, **RANKS)
def a_rank_stores_after_it_has_said_so(engine: Any) -> None:
    """Others write to the blocks meanwhile."""
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


@fault("LAB001", text="of rank 1", on=V1, **RANKS)
def a_rank_loads_what_another_has_stored(engine: Any) -> None:
    engine.caches[1].get = engine.caches[0].get


def schedule_failing_rank(engine: Any) -> None:
    """Load computed tokens again, and let the load fail in the second rank."""
    engine.store("first", prompt(300))
    engine.admit("again", prompt(300), max_tokens=5)
    engine.fail_load("again", 1, 1)
    engine.run()


@fault("LAB001", "LAB008", on=V1, schedule=schedule_failing_rank, **RANKS)
def a_rank_keeps_its_failure_to_itself(engine: Any) -> None:
    engine.workers[1].called.get_block_ids_with_load_errors = set
