"""How many free blocks a waiting request needs: what `allocate_slots` compares with them.

It is v1/core/kv_cache_manager.py 0.32.0:516-579 for one KV group of full attention, by arithmetic: nothing is called
that allocates, counts or touches. For other models it is not known.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Kinds of layers in which each token keeps its slot.
_FULL = ("FullAttentionSpec", "MLAAttentionSpec")


def held(scheduler: Any, request: Any) -> tuple[list[Any], ...]:
    """The blocks of this request, by KV group."""
    found: tuple[list[Any], ...] = scheduler.kv_cache_manager.coordinator.get_blocks(request.request_id)
    return found


def blocks(scheduler: Any, request: Any, promised: int, between: bool, reserved: int | None) -> int | None:
    """None: not known. promised: what the connector would load into it, where it has no tokens yet; between steps, or
    within the step that computes the rest.

    The requests that run are left out of it (the watermark): where any runs, something moves.
    """
    size = _block_size(scheduler)
    if size is None or reserved is None:
        return None
    most = int(scheduler.max_model_len)
    total = min(int(request.num_tokens), most)
    own = len(held(scheduler, request)[0])
    in_use, computed = 0, int(request.num_computed_tokens)
    if not computed:
        cached = _cached(scheduler, request)
        in_use, computed = sum(block.ref_cnt > 0 for block in cached), len(cached) * size
        computed += promised
    if promised and between and not request.num_computed_tokens:
        tokens, kept = computed, reserved + int(getattr(scheduler, "_spec_decode_step_blocks", 0))
    else:
        step, kept = max(1, total - computed), 0
        threshold = scheduler.scheduler_config.long_prefill_token_threshold
        if scheduler.scheduler_config.enable_chunked_prefill:
            step = min(step, scheduler.max_num_scheduled_tokens, threshold or step)
        tokens = min(min(computed, total - 1) + step + int(scheduler.num_lookahead_tokens), most)
    whole = total if getattr(scheduler, "scheduler_reserve_full_isl", False) else 0
    return max(-(-tokens // size) + kept, -(-whole // size)) - own - in_use


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
