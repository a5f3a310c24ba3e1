"""Compute how many free blocks a waiting request needs, as `allocate_slots` does.

This is the arithmetic of v1/core/kv_cache_manager.py 0.32.0:516-579, without calls that change the scheduler. It covers
KV groups of full attention and of sliding windows.
"""

from __future__ import annotations

from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: KV groups in which each token keeps its slot, and KV groups that free the slots behind a window.
_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOWS = ("SlidingWindowSpec",)


def held(scheduler: Any, request: Any) -> tuple[list[Any], ...]:
    """Return the blocks of this request, by KV group."""
    found: tuple[list[Any], ...] = scheduler.kv_cache_manager.coordinator.get_blocks(request.request_id)
    return found


def blocks(scheduler: Any, request: Any, promised: int, between: bool, reserved: int | None) -> int | None:
    """Return the free blocks that the request needs to be admitted; None if they are not known.

    promised: tokens that the connector would load, if the request has no computed tokens yet.
    between: True if they are loaded between steps, False if within the step that computes the rest.
    reserved: the result of `reserved`.

    The watermark for running requests is left out: if any request runs, the engine does not stand still.
    """
    groups = _groups(scheduler)
    if groups is None:
        return None
    if request.num_computed_tokens:
        return _of_rest(scheduler, request, groups)
    if reserved is None:
        return None
    total = min(int(request.num_tokens), int(scheduler.max_model_len))
    hits, hit_tokens = _cached(scheduler, request, groups)
    computed, kept = hit_tokens + promised, 0
    if promised and between:
        tokens, kept = computed, reserved + int(getattr(scheduler, "_spec_decode_step_blocks", 0))
    else:
        tokens = _after_step(scheduler, computed, total)
    whole = total if getattr(scheduler, "scheduler_reserve_full_isl", False) else 0
    next_step, all_of_it = 0, 0
    for group, own, hit in zip(groups, held(scheduler, request), hits, strict=True):
        behind = group.behind(computed) // group.size
        there = max(behind, len(own) + len(hit))
        free = sum(block.ref_cnt == 0 for block in hit[behind:] if not getattr(block, "is_null", False))
        next_step += max(0, -(-tokens // group.size) - there) + free
        all_of_it += max(0, group.at_once(whole) - there) + free
    return max(next_step + kept, all_of_it)


class _Group(NamedTuple):
    """A KV group. window: tokens; 0: each token keeps its slot. cap: maximum blocks of one request."""

    size: int
    window: int
    cap: int | None

    def behind(self, computed: int) -> int:
        """Return the number of tokens that have left the window."""
        return max(0, computed - self.window + 1) if self.window else 0

    def at_once(self, tokens: int) -> int:
        """Return the number of blocks that so many tokens need at the same time."""
        found = -(-tokens // self.size)
        return min(found, self.cap) if self.cap else found


def _groups(scheduler: Any) -> list[_Group] | None:
    """Return the KV groups; None if the model has another kind of KV group."""
    found = []
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    for group, manager in zip(scheduler.kv_cache_config.kv_cache_groups, managers, strict=True):
        kind = type(group.kv_cache_spec).__name__
        if kind not in (*_FULL, *_WINDOWS):
            return None
        window = cap = 0
        if kind in _WINDOWS:
            window = int(manager.sliding_window) + int(getattr(manager, "extra_retained_tokens", 0))
            cap = getattr(manager, "max_admission_blocks_per_request", None) or 0
        found.append(_Group(int(manager.block_size), window, cap))
    return found


def _of_rest(scheduler: Any, request: Any, groups: list[_Group]) -> int:
    """Return the free blocks that a request with computed tokens needs.

    vLLM checks for the whole request before it frees the blocks that have left a window.
    """
    computed, total = int(request.num_computed_tokens), min(int(request.num_tokens), int(scheduler.max_model_len))
    tokens = _after_step(scheduler, computed, total)
    whole = total if getattr(scheduler, "scheduler_reserve_full_isl", False) else 0
    next_step, all_of_it = 0, 0
    for group, own in zip(groups, held(scheduler, request), strict=True):
        next_step += max(0, -(-tokens // group.size) - len(own)) - count(own[: group.behind(computed) // group.size])
        all_of_it += max(0, group.at_once(whole) - len(own))
    return max(next_step, all_of_it)


def _after_step(scheduler: Any, computed: int, total: int) -> int:
    """Return the number of tokens that have a slot after the next step of the request."""
    step = max(1, total - computed)
    threshold = scheduler.scheduler_config.long_prefill_token_threshold
    if scheduler.scheduler_config.enable_chunked_prefill:
        step = min(step, scheduler.max_num_scheduled_tokens, threshold or step)
    return min(min(computed, total - 1) + step + int(scheduler.num_lookahead_tokens), int(scheduler.max_model_len))


def count(blocks: list[Any]) -> int:
    """Count the blocks without null blocks, which replace blocks that have left a window."""
    return sum(not getattr(block, "is_null", False) for block in blocks)


def reserved(scheduler: Any) -> int | None:
    """Return the blocks that prefills and loads in flight still need; 0 in releases that reserve none. None: not known.

    (`_inflight_prefill_reserved_blocks`, scheduler.py 0.32.0:3088)
    """
    in_flight = list(getattr(scheduler, "_inflight_prefills", ()))
    groups = _groups(scheduler)
    if not in_flight:
        return 0
    if groups is None:
        return None
    spec = int(scheduler.num_spec_tokens)
    more = 1 + spec + int(scheduler.num_lookahead_tokens) if spec else 0
    most = int(scheduler.max_model_len)
    return sum(
        max(0, group.at_once(min(int(each.num_tokens), most) + more) - len(own))
        for each in in_flight
        for group, own in zip(groups, held(scheduler, each), strict=True)
    )


def _cached(scheduler: Any, request: Any, groups: list[_Group]) -> tuple[list[list[Any]], int]:
    """Return the blocks of the longest cached prefix in each KV group, and its number of tokens.

    The last token of the request is never part of it. vLLM's lookup only reads.
    """
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching or getattr(request, "skip_reading_prefix_cache", False):
        return [[] for _ in groups], 0
    hashes = request.block_hashes if isinstance(request.block_hashes, list) else list(request.block_hashes)
    found = manager.coordinator.find_longest_cache_hit(hashes, request.num_tokens - 1)
    return [list(each) for each in found[0]], int(found[1])
