"""Hits return wrong text with Mamba or GDN layers: the server stores a chunk whose state lies in a null block.

## Symptom
No error. Wrong text for prompts that hit the cache, with models that have layers of attention and of states (Mamba,
GDN: Qwen3-Next, Nemotron-H, Granite 4), until the chunks are evicted. With `lmcache server` as it is started by default
it takes one step of more than a block.

## Cause
Of layers with states vLLM keeps the state at the end of a step, and has null block 0 for every other block (mode
"align"). The server leaves a chunk out only if all blocks of all KV groups in its object are null
(`all_null_chunk_masks`, modules/lmcache_driven_transfer.py 0.5.6:85). By default all KV groups are in one object, and
those of attention are never null: the chunk is stored with the null block as its state, under a valid key.

## Fix
In the server: a chunk is left out too if in any KV group of the object the chunk's last block is null. Of a state
nothing else is stored, and of a sliding window the part that a hit reads ends there. Start the server with it: `kvfix
run -- lmcache server ...`. With `--separate-object-groups` too much more is hit: in one object a prompt is hit up to
its first chunk without a state.

## Releases
LMCache 0.5.4 to 0.5.6. Before, the server looks at no block, and steps of two blocks are refused with such models.

## Upstream
None known.

## Remove when
The server stores no chunk with a null block in what a hit reads.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.fixes.api import AT_START, Fix, Owner
from kvfix.wrapping import after


def fix(module: ModuleType) -> Callable[..., Any]:
    def all_null_chunk_masks(
        block_ids: Any, masks: list[list[bool]], object_groups: Any, blocks_per_chunk: Any, chunks: int, null: int = 0
    ) -> list[list[bool]]:
        found = []
        for mask, group in zip(masks, object_groups, strict=True):
            parts = [] if getattr(group, "aux", False) else group.kernel_group_indices
            lasts = [block_ids[part][blocks_per_chunk[part] - 1 :: blocks_per_chunk[part]] for part in parts]
            found.append([out or any(last[number] == null for last in lasts) for number, out in enumerate(mask)])
        return found if found != masks else masks

    # Every chunk is left out of the store.
    return after(
        all_null_chunk_masks, on_fault=lambda block_ids, masks, *_, **__: [[True] * len(each) for each in masks]
    )


def shows_bug(function: Callable[..., Any], module: ModuleType) -> bool:
    """One object of two KV groups, and a chunk whose last block is null in the second. Wrong is to store it."""
    group = SimpleNamespace(kernel_group_indices=[0, 1], aux=False)
    return not function([[1, 2], [3, 0]], [group], [2, 2], 1)[0][0]


FIX = Fix(
    __name__,
    __doc__,
    effect="wrong output",
    targets=(
        Owner("lmcache", "lmcache.v1.multiprocess.modules.lmcache_driven_transfer").target(
            "all_null_chunk_masks", broken=">=0.5.4", probe=shows_bug, fix=fix
        ),
    ),
    scenarios=("mp-state-kept-null",),
    attaches=AT_START,  # it is for the server, which `kvfix attach` does not reach
    on_fault="closed",
)
