"""What the fixes of vLLM's scheduler share: whom it takes back after a load that failed."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

MODULE = "vllm.v1.core.sched.scheduler"
TAKES_BACK = "Scheduler._update_requests_with_invalid_blocks"


def failed(
    scheduler: Any, names: Collection[str], invalid_block_ids: Collection[int], *more: Any
) -> Iterator[tuple[str, int, list[int]]]:
    """The requests of these whose load was one within the step: name, place of its first failed block, all its blocks.

    Only within a step do others share the blocks of a load. `more`: what the hook has been called with beside; the last
    one says it (`evict_blocks`), and 0.11 knows no other loads.
    """
    if more and not more[-1]:
        return
    for name in names:
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(name)
        yield name, next(place for place, block in enumerate(blocks) if block in invalid_block_ids), blocks


def lmcache_adapters(scheduler: Any) -> Iterator[Any]:
    """The scheduler's sides of LMCache in process that this scheduler asks, also in a MultiConnector."""
    connector = getattr(scheduler, "connector", None)
    for each in (connector, *getattr(connector, "_connectors", ())):
        adapter = getattr(each, "_lmcache_engine", None)
        if adapter is not None:
            yield adapter


def take_back(hook: Callable[..., Any], *requests: Any, adapter: Any = None) -> Any:
    """For probes: what TAKES_BACK answers where block 3 has failed, the first of two of each of these that run.

    adapter: of the connector that the scheduler asks.
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
