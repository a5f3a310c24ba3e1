"""How many free blocks a waiting request needs: what `allocate_slots` compares with them.

It is v1/core/kv_cache_manager.py 0.32.0:516-579, by arithmetic: nothing is called that allocates, counts or touches. It
is known for KV groups of full attention and of sliding windows.
"""

from __future__ import annotations

from typing import NamedTuple

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
    """A KV group. window: in tokens; 0: each token keeps its slot. cap: blocks that one request holds at most."""

    size: int
    window: int
    cap: int | None

    def behind(self, computed: int) -> int:
        """Tokens that have left the window."""
        return max(0, computed - self.window + 1) if self.window else 0

    def at_once(self, tokens: int) -> int:
        """Blocks that so many tokens hold at the same time."""
        found = -(-tokens // self.size)
        return min(found, self.cap) if self.cap else found


def _groups(scheduler: Any) -> list[_Group] | None:
    """None: one of them is of another kind."""
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
    """Of a request with computed tokens. vLLM checks for the whole request before it frees the blocks that have left a
    window."""
    computed, total = int(request.num_computed_tokens), min(int(request.num_tokens), int(scheduler.max_model_len))
    tokens = _after_step(scheduler, computed, total)
    whole = total if getattr(scheduler, "scheduler_reserve_full_isl", False) else 0
    next_step, all_of_it = 0, 0
    for group, own in zip(groups, held(scheduler, request), strict=True):
        next_step += max(0, -(-tokens // group.size) - len(own)) - count(own[: group.behind(computed) // group.size])
        all_of_it += max(0, group.at_once(whole) - len(own))
    return max(next_step, all_of_it)


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
    """The blocks of its longest cached prefix in each KV group, and its tokens; at least the last one is computed anew.

    vLLM's lookup only reads, and which prefix several groups agree on is its own business.
    """
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching or getattr(request, "skip_reading_prefix_cache", False):
        return [[] for _ in groups], 0
    hashes = request.block_hashes if isinstance(request.block_hashes, list) else list(request.block_hashes)
    found = manager.coordinator.find_longest_cache_hit(hashes, request.num_tokens - 1)
    return [list(each) for each in found[0]], int(found[1])
