"""Without its compiled operations LMCache's layerwise connector takes an HND KV cache for NHD.

## Symptom
With `use_layerwise` and heads outside of tokens: `IndexError: index 450 is out of bounds for dimension 0 with size 64`,
or `RuntimeError: shape mismatch: value tensor of shape [64, 128] cannot be broadcast to indexing result of shape
[64, 16]`; wrong KV without a word where there are as many KV heads as tokens in a block.

## Cause
LMCache falls back to operations in torch, without a word, where its compiled ones do not load (0.5.4 to 0.5.6 on torch
2.11). The one that moves a layer indexes the axis of the heads with the token's place in its block (0.5.6
torch_ops/mem_kernels.py:323), where the one that moves all layers says that it does not know HND.

## Fix
It is handed the KV cache with the two axes in the order that it takes them to have, a view of the same memory, and the
layout that this is.

## Releases
LMCache 0.5.0 to 0.5.6.

## Upstream
None known.

## Remove when
`kvfix roundtrip --backend lmcache-layerwise --layout hnd --no-fixes` passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.correction import around
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType

#: Layouts of five axes whose third is the head, and those with the third and fourth changed round.
TURNED = {"NL_X_TWO_NB_NH_BS_HS": "NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_TWO_NH_BS_HS": "NL_X_NB_TWO_BS_NH_HS"}


def correct(operations: ModuleType) -> Callable[..., Any]:
    @around
    def single_layer_kv_transfer(
        held: Any, cache: Any, slots: Any, direction: Any, layout: Any, token_major: bool = False
    ) -> Generator[Any, Any, Any] | None:
        turned = TURNED.get(layout.name)
        return _turned(cache, slots, direction, getattr(type(layout), turned), token_major) if turned else None

    return single_layer_kv_transfer


def _turned(cache: Any, *more: Any) -> Generator[Any, Any, Any]:
    answer = yield (cache.transpose(2, 3), *more)
    return answer


def shows_bug(hook: Callable[..., Any], operations: ModuleType) -> bool:
    """The token in slot 1; two heads, blocks of two, so that nothing is out of range. Wrong is not its two rows."""
    if getattr(hook, "__module__", operations.__name__) != operations.__name__:
        return False  # handed on by a package (0.5.6): the module that it is of is another patch's
    import torch  # the module has imported it

    held, cache = torch.zeros(2, 1, 2), torch.arange(16.0).view(2, 2, 2, 2, 1)
    layout, direction = operations.EngineKVFormat.NL_X_TWO_NB_NH_BS_HS, operations.TransferDirection.D2H
    hook(held, cache, torch.tensor([1]), direction, layout)
    return bool(held.flatten().tolist() != [1, 3, 9, 11])


FIX = Fix(
    __name__,
    __doc__,
    patches=tuple(
        Patch("lmcache", module, "single_layer_kv_transfer", broken, shows_bug, correct)
        for module, broken in (
            ("lmcache.python_ops_fallback", ">=0.5.0,<0.5.3"),
            ("lmcache.v1.platform.torch_ops", ">=0.5.3,<0.5.6"),
            ("lmcache.v1.platform.torch_ops.mem_kernels", ">=0.5.6"),
        )
    ),
)
