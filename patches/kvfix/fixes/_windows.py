"""Shared code of the fixes for models with sliding windows or recurrent (Mamba) states.

When a step begins, vLLM frees the blocks before the window and replaces them by null block 0
(v1/core/single_type_kv_cache_manager.py 0.32.0:672, 1135). The freed blocks stay in LMCache's own list of blocks.
"""

from kvfix.fixes import _mp
from kvfix.fixes.api import Any, stubs


def of(connector: Any) -> dict[int, tuple[int, int]]:
    """Return {KV group: (tokens in the window, tokens in a block)}. The window includes vLLM's extra tokens for MTP."""
    return {
        number: (spec.sliding_window + getattr(spec, "extra_retained_tokens", 0), spec.block_size)
        for number, spec in _specs(connector, "SlidingWindowSpec")
    }


def states(connector: Any) -> dict[int, int]:
    """Return {Mamba group of mode "align": tokens in a block}. A block holds the state after its last token."""
    found = _specs(connector, "MambaSpec")
    return {number: spec.block_size for number, spec in found if spec.mamba_cache_mode == "align"}


#: vLLM frees Mamba states as if they were a sliding window of two tokens, because a step needs the state of the last
#: computed token (MambaManager.get_num_skipped_tokens, v1/core/single_type_kv_cache_manager.py 0.32.0:1954).
STATE = 2


def _specs(connector: Any, name: str) -> list[tuple[int, Any]]:
    found = []
    for number, group in enumerate(connector._kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        spec = next(iter((getattr(spec, "kv_cache_specs", None) or {0: spec}).values()))
        if any(kind.__name__ == name for kind in type(spec).__mro__):
            found.append((number, spec))
    return found


def kept_from(computed: int, window: int, block_size: int) -> int:
    """Return the first token whose block vLLM keeps when a step begins after `computed` computed tokens."""
    return max(0, computed - window + 1) // block_size * block_size


def computed(scheduler_output: Any) -> dict[str, int]:
    """Return for each request the number of tokens computed before the step."""
    cached = scheduler_output.scheduled_cached_reqs
    found = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=False))
    found.update((new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs)
    return found


def has_several_groups(connector: Any) -> bool:
    """Return True if the model has several KV groups, but False if LMCache checks the blocks itself (lazy_offload)."""
    return len(connector._group_tokens_per_block) > 1 and not getattr(connector, "lazy_offload", False)


def has_transfers(connector: Any, answer: Any, scheduler_output: Any, metadata: Any) -> bool:
    """Return True if the metadata have transfers that a fix must check. Fixes use this function in `when`."""
    return bool(metadata.requests) and has_several_groups(connector)


def stored(hook: Any, module: Any, connector: Any, computed: int, tokens: int, **blocks: Any) -> list[Any]:
    """Return, for probes, the metadata of a step and of its requests. The step computes `tokens` tokens of one request.

    blocks: pass `blocks=[]` for a request that is not new. The step adds no blocks, because the tracker has all blocks.
    """
    metadata = module.LMCacheMPConnectorMetadata()
    new = None if blocks else stubs.Stub(req_id=stubs.NAME, num_computed_tokens=computed)
    hook(connector, stubs.step(tokens, new=new, computed=computed, **blocks), metadata)
    return [metadata, *metadata.requests]


def scheduler_side(module: Any, window: int, *groups: list[int], computed: int) -> Any:
    """Return a connector for probes, with two KV groups and a request of 1024 tokens.

    window: tokens in the second group's sliding window (0: Mamba states). The first group has full attention.
    groups: blocks of the request in each KV group. computed: number of tokens in vLLM's cache. LMCache has no tokens.
    """
    connector, tracker = _mp.tracked(module, stubs.request(1024), num_vllm_hit=computed)
    attributes = {"sliding_window": window, "mamba_cache_mode": "align", "block_size": 16}
    spec = type("SlidingWindowSpec" if window else "MambaSpec", (), attributes)()
    kinds = [stubs.Stub(kv_cache_spec=each) for each in (stubs.Stub(), spec)]
    connector._kv_cache_config = stubs.Stub(kv_cache_groups=kinds)
    connector._group_tokens_per_block = [16, 16]
    tracker.state = module.LMCacheMPRequestState.READY
    if not isinstance(tracker.allocated_block_ids, dict):
        raise TypeError("this release knows one KV group")
    tracker.append_block_ids(groups)
    return connector
