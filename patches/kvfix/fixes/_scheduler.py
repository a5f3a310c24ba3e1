"""Code that the fixes for vLLM's scheduler share."""

import inspect
from collections.abc import Callable, Collection, Iterator

from kvfix.fixes.api import Any, stubs


def is_within_step(*more: Any) -> bool:
    """Return True if this call of `_update_requests_with_invalid_blocks` is for synchronous loads (within the step).

    more: the arguments after the block ids. The last argument is `evict_blocks`, which is False for loads between
    steps. vLLM 0.11 does not have `evict_blocks`, so the answer is True for both kinds of loads. For a load between
    steps, True is harmless. No other request uses the load's blocks, because they are not in the prefix cache yet.
    """
    return not more or bool(more[-1])


def failed(
    scheduler: Any, names: Collection[str], invalid_block_ids: Collection[int], *more: Any
) -> Iterator[tuple[str, int, list[int]]]:
    """Yield (name, index of its first failed block, all its blocks) for each request that loads within the step.

    Yield nothing for loads between steps, because these loads share no blocks with other requests.
    more: as in `is_within_step`.
    """
    for name in names if is_within_step(*more) else ():
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(name)
        yield name, next(place for place, block in enumerate(blocks) if block in invalid_block_ids), blocks


def connectors(scheduler: Any) -> tuple[Any, ...]:
    """Return the scheduler's connector and, if the connector is a MultiConnector, the connectors in it."""
    connector = getattr(scheduler, "connector", None)
    return connector, *getattr(connector, "_connectors", ())


def lmcache_adapters(scheduler: Any) -> list[Any]:
    found = [getattr(each, "_lmcache_engine", None) for each in connectors(scheduler)]
    return [adapter for adapter in found if adapter is not None]


def running(*requests: Any, adapter: Any = None) -> Any:
    """Return a scheduler for probes, with this LMCache adapter. Each request runs, and has blocks 3 and 4."""
    pool = stubs.Stub(blocks=[stubs.Stub(ref_cnt=1, block_hash=None)] * 5)
    manager = stubs.Stub(get_block_ids=lambda name: ([3, 4],), evict_blocks=stubs.Calls(), block_pool=pool)
    by_name = {request.request_id: request for request in requests}
    return stubs.Stub(
        block_size=16, recompute_kv_load_failures=True, kv_cache_manager=manager, requests=by_name,
        running=list(requests), waiting=(), skipped_waiting=(), kv_holding_waiting=(), failed_recving_kv_req_ids=set(),
        prev_step_scheduled_req_ids=set(by_name), _preempt_request=lambda *_: None,
        kv_cache_config=stubs.Stub(kv_cache_groups=[None]), connector=stubs.Stub(_lmcache_engine=adapter),
        scheduler_config=stubs.Stub(async_scheduling=True),
    )  # fmt: skip


def scheduled_tokens(function: Callable[..., Any], scheduler: Any) -> list[dict[str, int]]:
    """Return the argument num_scheduled_tokens in a list, for a probe's call of the function.

    Return [] if the function does not take this argument (before vLLM 0.20).
    """
    has_it = "num_scheduled_tokens" in inspect.signature(function).parameters
    return [dict.fromkeys(scheduler.requests, 4)] if has_it else []


def roll_back(hook: Callable[..., Any], *requests: Any, adapter: Any = None) -> Any:
    """Return, for probes, the result of `_update_requests_with_invalid_blocks` after block 3 has failed."""
    scheduler = running(*requests, adapter=adapter)
    return hook(scheduler, list(requests), {3}, *scheduled_tokens(hook, scheduler))


def end_turn(hook: Callable[..., Any], computed: int) -> tuple[Any, list[Any]]:
    """Let the hook end a streaming session's turn of 22 tokens in a probe. Return (session, queued sessions)."""
    session = stubs.request(
        22, num_computed_tokens=computed, num_output_placeholders=0, num_in_flight_tokens=0, resumable=True,
        streaming_queue=(),
    )  # fmt: skip
    queued: list[Any] = []
    waiting = stubs.Stub(add_request=queued.append)
    scheduler = stubs.Stub(num_waiting_for_streaming_input=0, waiting=waiting, _enqueue_waiting_request=queued.append)
    hook(scheduler, session)
    return session, queued


def roll_back_one(hook: Any, adapter: Any) -> None:
    """Let the first block of a request fail in a probe. The scheduler has this LMCache adapter."""
    rolled_back, *_ = roll_back(hook, stubs.request(32, num_computed_tokens=20, num_cached_tokens=16), adapter=adapter)
    if rolled_back != {stubs.NAME}:
        raise LookupError("the first value that the hook returns is not the rolled back requests")
