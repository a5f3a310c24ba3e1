"""Compute how many free blocks a waiting request needs, as `allocate_slots` does.

(v1/core/kv_cache_manager.py 0.32.0:516-579.) It calls only functions of vLLM that change nothing. It covers KV groups
of full attention and of sliding windows.
"""

from collections.abc import Sequence
from typing import Any

#: KV groups in which each token keeps its slot, and KV groups that free the slots before a window.
_KINDS = frozenset(("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"))


def held(scheduler: Any, request: Any) -> Any:
    """Return the blocks of this request, a list for each KV group."""
    return scheduler.kv_cache_manager.coordinator.get_blocks(request.request_id)


def blocks(scheduler: Any, request: Any, promised: int, between: bool, reserved: int | None) -> int | None:
    """Return the free blocks that the request needs to be admitted; None if they are not known.

    promised: tokens that the connector would load, if the request has no computed tokens yet.
    between: True for a load between steps, False within the step that computes the rest. reserved: see `reserved`.

    The watermark for running requests is left out: if any request runs, the engine does not stand still.
    """
    managers, local = _managers(scheduler), int(request.num_computed_tokens)
    if reserved is None or not managers:
        return None
    hits: Sequence[Any] = [[] for _ in managers]
    freed = kept = 0
    if local:  # vLLM frees the blocks that have left a window before it allocates others
        promised = 0
        for manager, own in zip(managers, held(scheduler, request), strict=True):
            freed += count(own[: manager.get_num_skipped_tokens(local) // manager.block_size])
    elif any(request.request_id in manager.num_cached_block for manager in managers):
        return None  # a step is just admitting the request
    else:
        hits, local = _cached(scheduler, request, hits)
    total, computed = min(int(request.num_tokens), int(scheduler.max_model_len)), local + promised
    if promised and between:
        tokens, kept = computed, reserved + int(getattr(scheduler, "_spec_decode_step_blocks", 0))
    else:
        tokens = _after_step(scheduler, computed, total)
    next_step = _to_allocate(managers, request, tokens, computed, hits, local) - freed + kept
    if not getattr(scheduler, "scheduler_reserve_full_isl", False):
        return next_step
    return max(next_step, _to_allocate(managers, request, total, computed, hits, local, apply_admission_cap=True))


def count(blocks: list[Any]) -> int:
    """Count the blocks without null blocks, which replace blocks that have left a window."""
    return sum(not getattr(block, "is_null", False) for block in blocks)


def reserved(scheduler: Any) -> int | None:
    """Return the blocks that prefills and loads in flight still need; 0 in releases that reserve none. None: not known.

    (`_inflight_prefill_reserved_blocks`, scheduler.py 0.32.0:3088)
    """
    in_flight, managers = list(getattr(scheduler, "_inflight_prefills", ())), _managers(scheduler)
    if not in_flight or not managers:
        return None if in_flight else 0
    spec, most = int(scheduler.num_spec_tokens), int(scheduler.max_model_len)
    more = 1 + spec + int(scheduler.num_lookahead_tokens) if spec else 0
    none: Sequence[Any] = [[] for _ in managers]
    needed = 0
    for each in in_flight:
        tokens, done = min(int(each.num_tokens), most) + more, int(each.num_computed_tokens)
        needed += _to_allocate(managers, each, tokens, done, none, done, apply_admission_cap=True)
    return needed


def _managers(scheduler: Any) -> Sequence[Any]:
    """Return the manager of each KV group; () if the model has another kind of KV group."""
    kinds = {type(group.kv_cache_spec).__name__ for group in scheduler.kv_cache_config.kv_cache_groups}
    return scheduler.kv_cache_manager.coordinator.single_type_managers if kinds <= _KINDS else ()


def _to_allocate(
    managers: Sequence[Any], request: Any, tokens: int, computed: int, hits: Sequence[Any], local: int, **more: bool
) -> int:
    """Return how many blocks vLLM takes from the pool for `tokens` tokens, `computed` of them computed or loaded."""
    needed = 0
    for manager, hit in zip(managers, hits, strict=True):
        function = type(manager).get_num_blocks_to_allocate
        while hasattr(function, "__wrapped__"):  # skip the wrappers of fixes, which count calls
            function = function.__wrapped__
        named = {"request_id": request.request_id, "num_tokens": tokens, "num_tokens_main_model": tokens, **more}
        if "num_local_computed_tokens" in function.__code__.co_varnames:  # since 0.26
            named["num_local_computed_tokens"] = local
        needed += function(manager, new_computed_blocks=hit, total_computed_tokens=computed, **named)
    return needed


def _after_step(scheduler: Any, computed: int, total: int) -> int:
    """Return the number of tokens that have a slot after the next step of the request."""
    step = max(1, total - computed)
    threshold = scheduler.scheduler_config.long_prefill_token_threshold
    if scheduler.scheduler_config.enable_chunked_prefill:
        step = min(step, scheduler.max_num_scheduled_tokens, threshold or step)
    return min(min(computed, total - 1) + step + int(scheduler.num_lookahead_tokens), int(scheduler.max_model_len))


def _cached(scheduler: Any, request: Any, none: Sequence[Any]) -> tuple[Sequence[Any], int]:
    """Return the blocks of the longest cached prefix in each KV group, and its number of tokens.

    The last token of the request is never part of it. vLLM's lookup only reads.
    """
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching or getattr(request, "skip_reading_prefix_cache", False):
        return none, 0
    hashes = request.block_hashes if isinstance(request.block_hashes, list) else list(request.block_hashes)
    found = manager.coordinator.find_longest_cache_hit(hashes, request.num_tokens - 1)
    return [list(each) for each in found[0]], int(found[1])
