"""Later requests return wrong text: SimpleCPUOffloadConnector loads less of a sliding window than vLLM caches.

Symptom: Nothing is logged. The model has layers with sliding windows, and several MTP modules make drafts.

Cause: With several MTP modules vLLM keeps some tokens in front of the window (`extra_retained_tokens`,
SlidingWindowSpec). A hit in the CPU memory covers only the window (`_contiguous_blocks_for_hit`,
single_type_kv_cache_manager.py 0.32.0:943). vLLM allocates a block in front of the window, but the connector loads
nothing into the block (simple_kv_offload/manager.py 0.32.0:484). After the load, vLLM caches the block nevertheless.

Fix: The fix also loads the blocks in front of the window. If the CPU memory lacks one of these blocks, there is no hit.
- Remove when: `find_longest_cache_hit` counts `extra_retained_tokens`, or vLLM no longer caches blocks without KV.
"""

from kvfix.fixes.api import SIMPLE_SCHEDULER, Any, Fix, fix_after, note


def _not_promised(scheduler: Any, promise: Any, request: Any, *_: Any, **__: Any) -> tuple[int, bool]:
    hit = scheduler._pending_cpu_hits.pop(request.request_id, None)
    if hit is not None:
        scheduler._free_pending_cpu_hit(hit)
    return 0, False


def _windows(scheduler: Any) -> list[tuple[int, Any]]:
    """Return (number, spec) of the KV groups for which vLLM also keeps tokens in front of the window."""
    groups = enumerate(group.kv_cache_spec for group in scheduler.cpu_kv_cache_config.kv_cache_groups)
    return [(number, spec) for number, spec in groups if getattr(spec, "extra_retained_tokens", 0)]


@fix_after(when=lambda scheduler, promise, *_, **__: promise[0] and _windows(scheduler), on_fault=_not_promised)
def get_num_new_matched_tokens(scheduler: Any, promise: Any, request: Any, computed: int) -> Any:
    hit, tokens, _ = scheduler._pending_cpu_hits[request.request_id]
    pool, found = scheduler.cpu_block_pool, []
    for number, spec in _windows(scheduler):
        size = scheduler.group_block_sizes[number]
        keys = SIMPLE_SCHEDULER.imported.resolve_block_hashes(request.block_hashes, scheduler.hash_block_size, size)
        kept = (computed + tokens - spec.sliding_window + 1 - spec.extra_retained_tokens) // size
        before = computed // size
        for place in range(max(0, kept - before), len(hit[number])):
            if hit[number][place].is_null:
                blocks = pool.get_cached_block(keys[before + place], [number])
                if not blocks:
                    return _not_promised(scheduler, promise, request)
                note(__name__, f"request {request.request_id}: a block in front of its window is loaded")
                found.append((number, place, blocks[0]))
    for number, place, block in found:
        hit[number][place], _ = block, pool.touch([block])  # one statement, so that an error prevents both changes
    return promise


FIX = Fix(
    SIMPLE_SCHEDULER.get_num_new_matched_tokens(broken=">=0.32", fix=get_num_new_matched_tokens),
    effect="wrong output",
    scenarios=("simple-offload-window-not-loaded",),
    no_patch={"vllm": "vLLM must decide if a hit needs the extra tokens, or if vLLM caches loaded blocks only"},
)
