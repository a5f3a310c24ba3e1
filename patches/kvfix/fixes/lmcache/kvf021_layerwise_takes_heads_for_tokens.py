"""Layerwise loads of an HND KV cache crash or load wrong KV: LMCache's torch operations mix up heads and tokens.

Symptom: With `use_layerwise` and HND (the head axis before the token axis) the worker raises `IndexError: index 450 is
out of bounds for dimension 0 with size 64`, or `RuntimeError: shape mismatch: value tensor of shape [64, 128] cannot be
broadcast to indexing result of shape [64, 16]`. If a block has as many tokens as there are KV heads, nothing is raised.
Then blocks that LMCache stores only in part get wrong KV.

Cause: LMCache falls back to torch operations, without a warning, if its compiled operations do not load (0.5.4 to 0.5.6
on torch 2.11). The operation that moves one layer indexes the head axis with the token's offset in the block (0.5.6
torch_ops/mem_kernels.py:323). The operation that moves all layers raises for HND.

Fix: The fix passes a view of the KV cache with the two axes swapped, and the view's layout, to the operation for one
layer. The fix does nothing if a block has as many tokens as there are KV heads. LMCache then mixes up heads and tokens
of whole blocks in the same way at the store and at the load. So the KV of whole blocks is right. If the fix swapped
the axes of these blocks, chunks that were stored without the fix would load wrong KV.
- Releases: LMCache 0.5.0 to 0.5.6.
- Remove when: `kvfix roundtrip --backend lmcache-layerwise --layout hnd --no-fixes` passes.
"""

from kvfix.fixes.api import AT_START, Any, Fix, Owner, Steps, fix_around

#: Keys are layouts with heads on the third of five axes. Values are the layouts with axes three and four swapped.
SWAPPED = {"NL_X_TWO_NB_NH_BS_HS": "NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_TWO_NH_BS_HS": "NL_X_NB_TWO_BS_NH_HS"}


@fix_around(when=lambda own, cache, slots, way, layout, *_: layout.name in SWAPPED and cache.shape[2] != cache.shape[3])
def fix(held: Any, cache: Any, slots: Any, direction: Any, layout: Any, token_major: bool = False) -> Steps:
    swapped = getattr(type(layout), SWAPPED[layout.name])
    return (yield (cache.transpose(2, 3), slots, direction, swapped, token_major))


def shows_bug(hook: Any, operations: Any) -> bool:
    """Copy the token in slot 1 of a cache with two heads and blocks of one token. The bug copies the wrong rows."""
    if getattr(hook, "__module__", operations.__name__) != operations.__name__:
        # Since 0.5.6, `torch_ops` only re-exports `mem_kernels`' function. The last target of FIX probes this function.
        return False
    import torch  # LMCache's module has already imported torch

    held, cache = torch.zeros(2, 1, 2), torch.arange(8.0).view(2, 2, 2, 1, 1)
    layout, direction = operations.EngineKVFormat.NL_X_TWO_NB_NH_BS_HS, operations.TransferDirection.D2H
    hook(held, cache, torch.tensor([1]), direction, layout)
    return bool(held.flatten().tolist() != [2, 3, 6, 7])


FIX = Fix(
    *(
        Owner("lmcache", module, copy=module).single_layer_kv_transfer(broken=broken, probe=shows_bug, fix=fix)
        for module, broken in (
            ("lmcache.python_ops_fallback", ">=0.5.0,<0.5.3"),
            ("lmcache.v1.platform.torch_ops", ">=0.5.3,<0.5.6"),
            ("lmcache.v1.platform.torch_ops.mem_kernels", ">=0.5.6"),
        )
    ),
    effect="wrong output",
    proof="tests/runtime/test_packed_layout.py, on LMCache's own kernels, because the lab moves hashes, not tensors",
    # The operation cannot report that it copied nothing. So after an error of the fix, LMCache's own operation runs.
    on_fault="original",
    attaches=AT_START,  # KV that was stored before the fix was added would load in the wrong order
)
