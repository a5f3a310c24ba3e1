"""How many free blocks a waiting request needs: what `allocate_slots` compares with them.

It is v1/core/kv_cache_manager.py 0.32.0:516-579, by arithmetic: nothing is called that allocates, counts or touches. It
is known for KV groups of full attention and of sliding windows; of several, for a request that has blocks.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Kinds of layers in which each token keeps its slot, and in which it loses it behind the window.
_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOWS = ("SlidingWindowSpec",)


def held(scheduler: Any, request: Any) -> tuple[list[Any], ...]:
    """The blocks of this request, by KV group."""
    found: tuple[list[Any], ...] = scheduler.kv_cache_manager.coordinator.get_blocks(request.request_id)
    return found


def blocks(scheduler: Any, request: Any, promised: int, between: bool, reserved: int | None) -> int | None:
    """None: not known. promised: what the connector would load into it, where it has no tokens yet; between steps, or
    within the step that computes the rest.

    The requests that run are left out of it (the watermark): where any runs, something moves.
    """
    if request.num_computed_tokens:
        return _of_rest(scheduler, request)
    size = _block_size(scheduler)
    if size is None or reserved is None:
        return None
    total = min(int(request.num_tokens), int(scheduler.max_model_len))
    own = len(held(scheduler, request)[0])
    cached = _cached(scheduler, request)
    in_use, computed = sum(block.ref_cnt > 0 for block in cached), len(cached) * size + promised
    if promised and between:
        tokens, kept = computed, reserved + int(getattr(scheduler, "_spec_decode_step_blocks", 0))
    else:
        tokens, kept = _after_step(scheduler, computed, total), 0
    whole = total if getattr(scheduler, "scheduler_reserve_full_isl", False) else 0
    return int(max(-(-tokens // size) + kept, -(-whole // size)) - own - in_use)


def _of_rest(scheduler: Any, request: Any) -> int | None:
    """Of a request with computed tokens, in all KV groups. vLLM checks for the whole request before it frees the blocks
    that have left a window."""
    computed, total = int(request.num_computed_tokens), min(int(request.num_tokens), int(scheduler.max_model_len))
    tokens = _after_step(scheduler, computed, total)
    whole = total if getattr(scheduler, "scheduler_reserve_full_isl", False) else 0
    managers, next_step, all_of_it, freed = scheduler.kv_cache_manager.coordinator.single_type_managers, 0, 0, 0
    for group, manager, own in zip(
        scheduler.kv_cache_config.kv_cache_groups, managers, held(scheduler, request), strict=True
    ):
        size, kind = int(manager.block_size), type(group.kv_cache_spec).__name__
        if kind not in (*_FULL, *_WINDOWS):
            return None
        at_once = -(-whole // size)
        if kind in _WINDOWS:
            outside = computed - int(manager.sliding_window) + 1 - int(getattr(manager, "extra_retained_tokens", 0))
            freed += count(own[: max(0, outside) // size])
            at_once = min(at_once, getattr(manager, "max_admission_blocks_per_request", None) or at_once)
        next_step += max(0, -(-tokens // size) - len(own))
        all_of_it += max(0, at_once - len(own))
    return max(next_step - freed, all_of_it)


def _after_step(scheduler: Any, computed: int, total: int) -> int:
    """Tokens that have a slot after its next step."""
    step = max(1, total - computed)
    threshold = scheduler.scheduler_config.long_prefill_token_threshold
    if scheduler.scheduler_config.enable_chunked_prefill:
        step = min(step, scheduler.max_num_scheduled_tokens, threshold or step)
    return min(min(computed, total - 1) + step + int(scheduler.num_lookahead_tokens), int(scheduler.max_model_len))


def count(blocks: list[Any]) -> int:
    """Without the null blocks, which stand for those that have left a window."""
    return sum(not getattr(block, "is_null", False) for block in blocks)


def reserved(scheduler: Any) -> int | None:
    """Blocks that prefills and loads in flight still need (`_inflight_prefill_reserved_blocks`, scheduler.py
    0.32.0:3088); 0 in releases that keep none. None: not known."""
    in_flight = list(getattr(scheduler, "_inflight_prefills", ()))
    size = _block_size(scheduler)
    if not in_flight:
        return 0
    if size is None:
        return None
    spec = int(scheduler.num_spec_tokens)
    more = 1 + spec + int(scheduler.num_lookahead_tokens) if spec else 0
    most = int(scheduler.max_model_len)
    wholes = [-(-(min(int(each.num_tokens), most) + more) // size) for each in in_flight]
    return sum(max(0, whole - len(held(scheduler, each)[0])) for whole, each in zip(wholes, in_flight, strict=True))


def _block_size(scheduler: Any) -> int | None:
    """Of the one KV group; None: there are several, or it is of another kind."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec).__name__ not in _FULL:
        return None
    return int(scheduler.kv_cache_manager.coordinator.single_type_managers[0].block_size)


def _cached(scheduler: Any, request: Any) -> list[Any]:
    """The blocks of its longest cached prefix; at least its last token is computed anew."""
    pool, manager = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_manager
    found: list[Any] = []
    if not manager.enable_caching or getattr(request, "skip_reading_prefix_cache", False):
        return found
    most = (request.num_tokens - 1) // _block_size(scheduler)
    for each in list(request.block_hashes)[:most]:
        hit = pool.get_cached_block(each, [0])
        if not hit:
            break
        found += hit
    return found
