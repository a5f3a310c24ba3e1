"""Shared by the fixes of vLLM's scheduler: the requests that it rolls back after a failed load."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any


def failed(
    scheduler: Any, names: Collection[str], invalid_block_ids: Collection[int], *more: Any
) -> Iterator[tuple[str, int, list[int]]]:
    """Of these requests, those that load within the step: name, index of the first failed block, all blocks.

    Only loads within a step share their blocks with other requests. `more`: the other arguments of the hook. The last
    one is `evict_blocks`, which is true for loads within a step. 0.11 has no other loads.
    """
    if more and not more[-1]:
        return
    for name in names:
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(name)
        yield name, next(place for place, block in enumerate(blocks) if block in invalid_block_ids), blocks


def lmcache_adapters(scheduler: Any) -> Iterator[Any]:
    """LMCache's in-process adapters of this scheduler, also those in a MultiConnector."""
    connector = getattr(scheduler, "connector", None)
    for each in (connector, *getattr(connector, "_connectors", ())):
        adapter = getattr(each, "_lmcache_engine", None)
        if adapter is not None:
            yield adapter


def roll_back(hook: Callable[..., Any], *requests: Any, adapter: Any = None) -> Any:
    """For probes: the answer of `_update_requests_with_invalid_blocks` if block 3 has failed. Each request runs and has
    blocks 3 and 4.

    adapter: LMCache's adapter in the scheduler's connector.
    """
    block = SimpleNamespace(ref_cnt=1, block_hash=None)
    manager = SimpleNamespace(
        get_block_ids=lambda name: ([3, 4],),
        evict_blocks=lambda blocks: None,
        block_pool=SimpleNamespace(blocks=[block] * 5),
    )
    running = {request.request_id: request for request in requests}
    stub = SimpleNamespace(
        block_size=16, recompute_kv_load_failures=True, kv_cache_manager=manager, requests=running,
        running=list(requests), prev_step_scheduled_req_ids=set(running), _preempt_request=lambda *_: None,
        scheduler_config=SimpleNamespace(async_scheduling=True), connector=SimpleNamespace(_lmcache_engine=adapter),
    )  # fmt: skip
    tokens = [dict.fromkeys(running, 4)] if "num_scheduled_tokens" in inspect.signature(hook).parameters else []
    return hook(stub, list(requests), {3}, *tokens)
