"""Hits return wrong text with Mamba or GDN layers: the server stores a chunk whose state lies in a null block.

Symptom: No error is logged. Prompts that hit the cache return wrong text, until the chunks are evicted. The model has
attention layers and Mamba or GDN layers with states, as Qwen3-Next, Nemotron-H and Granite 4 have. With the default
options of `lmcache server`, a step that computes more tokens than a block holds triggers the bug.

Cause: With `mamba_cache_mode="align"`, vLLM keeps only the state block at the end of a step. All other blocks of the
state are null block 0. The server stores a chunk as one or several objects. The server leaves out an object only
if all blocks of all its KV groups are null (`all_null_chunk_masks`, modules/lmcache_driven_transfer.py 0.5.6:85). By
default one object has all KV groups. Blocks of full attention are never null, so the server stores the object.

Fix: With the fix, the server also leaves out an object if the chunk's last block is null in any KV group of the object.
For a state, the server stores only the last block. A sliding window in the chunk also needs the last block.

Start the server with the fix: `kvfix run -- lmcache server ...`. The engines do not need the fix. Delete the files of
the server's L2 adapters first, because chunks that were stored wrong stay wrong. With `--separate-object-groups` hits
are longer. Without this option all KV groups are in one object, so a hit ends before the first chunk without a state.
- Releases: LMCache 0.5.4 to 0.5.6. 0.4.7 to 0.5.3 do not start with these models if a step can fill two blocks.
- Remove when: The server stores no chunk from which a hit would load a null block.
"""

from kvfix.fixes.api import AT_START, MP_SERVER_TRANSFER, Any, Fix, fix_after, stubs


# After an error, the fix leaves every chunk out of the store.
@fix_after(on_fault=lambda block_ids, masks, *_, **__: [[True] * len(each) for each in masks])
def fix(
    block_ids: Any, masks: list[list[bool]], object_groups: Any, blocks_per_chunk: Any, chunks: int, null: int = 0
) -> list[list[bool]]:
    found = []
    for mask, group in zip(masks, object_groups, strict=True):
        parts = [] if getattr(group, "aux", False) else group.kernel_group_indices
        lasts = [block_ids[part][blocks_per_chunk[part] - 1 :: blocks_per_chunk[part]] for part in parts]
        found.append([out or any(last[number] == null for last in lasts) for number, out in enumerate(mask)])
    return found if found != masks else masks


def shows_bug(function: Any, module: Any) -> bool:
    """Check a chunk whose last block is null in the second of two KV groups. With the bug, the chunk is stored."""
    return not function([[1, 2], [3, 0]], [stubs.Stub(kernel_group_indices=[0, 1], aux=False)], [2, 2], 1)[0][0]


FIX = Fix(
    MP_SERVER_TRANSFER.all_null_chunk_masks(broken=">=0.5.4", probe=shows_bug, fix=fix),
    effect="wrong output",
    scenarios=("mp-state-kept-null",),
    attaches=AT_START,  # the fix acts in the server, which `kvfix attach` does not reach
)
