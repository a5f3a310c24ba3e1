"""The `on_fault` functions that fixes share. kvfix calls a fix's `on_fault` if the fix's own code raises.

The functions avoid wrong KV. For example, a function promises 0 tokens, or reports a load as failed. This module does
not use code of the fixes, because that code has just raised.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from kvfix.wrapping import GO_ON


def no_hit(*_: Any, **__: Any) -> int:
    """Return 0 tokens from LMCache's `get_num_new_matched_tokens` or `lookup`."""
    return 0


def compute(connector: Any, promise: Any, request: Any, *_: Any, **__: Any) -> Any:
    """Promise 0 tokens to a request with a remote prefill. The decode instance then computes the prompt."""
    return (0, False) if _is_local(request) else GO_ON


def compute_new(connector: Any, request: Any, *_: Any, **__: Any) -> Any:
    """Remove the request's remote prefill, so that decode sends the prefill instance no message about the request."""
    _is_local(request)
    return GO_ON


def _is_local(request: Any) -> bool:
    """Remove the remote prefill from the request. Return False if the request has no remote prefill."""
    asks = bool(request.kv_transfer_params and request.kv_transfer_params.get("do_remote_prefill"))
    if asks:
        request.kv_transfer_params = {**request.kv_transfer_params, "do_remote_prefill": False}
    return asks


def nothing(*_: Any, **__: Any) -> None:
    """Return None, and do not call the wrapped function."""


def set_to(name: str, value: Any) -> Callable[..., Any]:
    """Return an `on_fault` that sets this attribute. Other wrappers of the fix read the attribute."""

    def set_to(instance: Any, *_: Any, **__: Any) -> Any:
        setattr(instance, name, value)
        return GO_ON

    return set_to


def refuse(*_: Any, **__: Any) -> bool:
    return False  # the result of a reset that has not emptied the cache


def save_nothing_more(impl: Any, scheduler_output: Any, *_: Any, **__: Any) -> Any:
    """Store nothing more for the step's tracked requests. Runs before in-process LMCache builds the metadata."""
    for name in scheduler_output.num_scheduled_tokens:
        if name in impl._request_trackers:
            impl._request_trackers[name].skip_save = True
    return GO_ON


def drop_saves(impl: Any, metadata: Any, *_: Any, **__: Any) -> Any:
    """Store nothing for the metadata's requests, now or later. Runs after in-process LMCache has built the metadata."""
    for meta in metadata.requests:
        if meta.req_id in impl._request_trackers:
            impl._request_trackers[meta.req_id].skip_save = True
        if meta.save_spec is not None:
            meta.save_spec.can_save = False
            meta.save_spec.skip_leading_tokens = len(meta.token_ids)  # for a kv_producer, which ignores `can_save`
            if getattr(meta, "disagg_spec", None) is not None:
                meta.disagg_spec.num_transferred_tokens = len(meta.token_ids)
    return metadata


def worker_saves_nothing(impl: Any, *_: Any, **__: Any) -> Any:
    """Let in-process LMCache store nothing in this step. Loads and pins do not change."""
    for meta in impl._parent._get_connector_metadata().requests:
        if meta.save_spec is not None:
            store_nothing(impl, meta)
    return GO_ON


def store_nothing(impl: Any, request: Any) -> None:
    """Store nothing for this request in this step. request: the metadata of the request.

    A kv_producer ignores `can_save` and, in layerwise stores, also `skip_leading_tokens` (0.5.6
    vllm_v1_adapter.py:1044, 1059, 1152). Therefore this function removes the request's tokens.
    """
    request.save_spec.can_save = False
    if impl.kv_role == "kv_producer":
        request.save_spec.skip_leading_tokens = 0
        request.token_ids, request.slot_mapping = [], request.slot_mapping[:0]


def worker_loads_fail(impl: Any, *_: Any, **__: Any) -> Any:
    """Report all loads of in-process LMCache in this step as failed, even the loads that succeed."""
    for meta in impl._parent._get_connector_metadata().requests:
        load_fails(impl, meta)
    return GO_ON


def load_fails(impl: Any, meta: Any) -> None:
    spec = meta.load_spec
    if spec is not None and spec.can_load:
        slots = meta.slot_mapping[spec.vllm_cached_tokens : spec.lmcache_cached_tokens]
        impl._invalid_block_ids.update(int(slot) // impl._block_size for slot in slots)


def store_nothing_more(connector: Any, scheduler_output: Any, *_: Any, **__: Any) -> Any:
    """Store nothing more for the step's requests. Runs before a multi-process connector builds the metadata."""
    _stored(connector, scheduler_output.num_scheduled_tokens)
    return GO_ON


def drop_stores(connector: Any, answer: Any, scheduler_output: Any, metadata: Any, *_: Any, **__: Any) -> Any:
    """Remove the stores from a multi-process connector's metadata. Store nothing more for the stores' requests."""
    _stored(connector, [meta.request_id for meta in metadata.requests if meta.direction == "STORE"])
    metadata.requests[:] = [meta for meta in metadata.requests if meta.direction != "STORE"]
    return answer


def _stored(connector: Any, names: Iterable[str]) -> None:
    for name in names:
        if name in connector.request_trackers:
            all_is_stored(connector.request_trackers[name])


def all_is_stored(tracker: Any) -> None:
    """Store nothing more for the request of this tracker."""
    counts = "num_stored_tokens" if hasattr(tracker, "num_stored_tokens") else "num_stored_blocks"
    setattr(tracker, counts, 1 << 40)  # more tokens than any request has


def forget_cached(scheduler: Any, answer: Any, *_: Any, **__: Any) -> Any:
    """Empty vLLM's prefix cache after a failed load."""
    pool = scheduler.kv_cache_manager.block_pool
    for block in pool.blocks:
        pool._maybe_evict_cached_block(block)
    return answer


def recompute_all(scheduler: Any, answer: Any, *_: Any, **__: Any) -> Any:
    """Preempt all running requests after a failed load, and drop the output of the steps in flight."""
    forget_cached(scheduler, answer)
    for request in scheduler.requests.values():
        if request.status.name == "PREEMPTED" and hasattr(request, "drop_stale_output"):
            request.drop_stale_output = request.num_stale_output_tokens > 0
    while scheduler.running:
        request = scheduler.running.pop()
        request._kvfix_compute = True  # KVF205 reads this attribute, so that LMCache promises 0 tokens
        try:
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        except TypeError:  # vLLM up to 0.31 has no parameter `drop_stale_output`
            scheduler._preempt_request(request, time.monotonic())
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    return answer
