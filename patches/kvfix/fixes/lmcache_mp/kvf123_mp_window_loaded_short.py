"""Wrong text with a sliding window and several MTP modules: vLLM caches a block that LMCache did not load.

Symptom: Prompts that hit vLLM's own prefix cache silently return wrong text. The bug needs full-attention layers,
sliding-window layers, and speculative decoding with more than two modules (`num_speculative_tokens` above 2 with MTP).

Cause: With several modules, the drafter may compute the last tokens again. So vLLM keeps tokens in front of a window
(`extra_retained_tokens`, v1/core/single_type_kv_cache_manager.py 0.32.0:1154). After a hit in LMCache, vLLM has a block
for these tokens, counts the block as loaded, and caches the block. LMCache registers, stores and loads only the window
(kv_cache_groups.py 0.5.6:129). So nothing is loaded into the block, which keeps the KV of another request.

Fix: The fix registers a longer window with the server: the window plus the extra tokens, rounded up to whole blocks.

Mixed roll-out: Install the fix on all engines that share a server, or on none of them. The engines register the sliding
window with the server. If a window is shorter than a chunk, the fix changes the sizes or keys of the stored chunks.
Stop all engines, empty the server's L2, and start all engines with the fix.
- Releases: LMCache 0.4.7 to 0.5.6 with vLLM 0.32. Earlier releases were not tested with these models.
- Remove when: `_resolve_per_layer_sw_sizes` adds `extra_retained_tokens`.
"""

from kvfix.fixes.api import AT_START, MP_KV_GROUPS, Any, Fix, fix_after, stubs

_EXTRA = "extra_retained_tokens"


@fix_after(
    when=lambda groups, *_, **__: any(getattr(spec, _EXTRA, 0) > 1 for each in groups for spec in _specs(each).values())
)
def fix(groups: Any, sizes: list[int], layer_to_idx: Any, num_layers: int) -> list[int]:
    sizes = list(sizes)
    for group in groups:
        specs = _specs(group)
        for name in group.layer_names:
            spec = specs.get(name) or specs[""]
            if getattr(spec, _EXTRA, 0) > 1:  # LMCache's window already includes one of the extra tokens
                kept = spec.sliding_window - 1 + getattr(spec, _EXTRA)
                whole = -(-kept // spec.block_size) * spec.block_size
                sizes[layer_to_idx[name]] = max(sizes[layer_to_idx[name]], whole)
    return sizes


def _specs(group: Any) -> dict[str, Any]:
    """Return {layer: spec}. If all layers have the same spec, the only key is ""."""
    spec = getattr(group, "kv_cache_spec", None)
    return getattr(spec, "kv_cache_specs", None) or {"": spec}


def shows_bug(hook: Any, module: Any) -> bool:
    """Register a window of 64 tokens with three extra tokens. With the bug, only 64 tokens are registered."""
    kind = type("SlidingWindowSpec", (), {"sliding_window": 64, "block_size": 16, _EXTRA: 3})
    return bool(hook([stubs.Stub(kv_cache_spec=kind(), layer_names=["layer"])], {"layer": 0}, 1)[0] < 66)


FIX = Fix(
    MP_KV_GROUPS._resolve_per_layer_sw_sizes(broken=">=0.4.7", probe=shows_bug, fix=fix),
    effect="wrong output",
    no_patch={"lmcache": "a patch changes server objects, and LMCache must decide what to do with stored objects"},
    attaches=AT_START,  # the windows are registered when the worker starts
    opt_in=True,
    # The function runs only at the start. If the fix raises, LMCache registers its own windows, and the bug remains.
    on_fault="original",
)
