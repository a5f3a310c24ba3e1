"""Hits return wrong text with Mamba or GDN layers: LMCache stores a null block or another request's block as a state.

Symptom: No error is logged. Prompts that hit the cache return wrong text, until the chunks are evicted. The model has
layers with attention and layers with recurrent states (Qwen3-Next, Nemotron-H, Granite 4).

Cause: With `mamba_cache_mode="align"` vLLM keeps a state only at the end of each step. The request's block list has
null block 0 in place of all other blocks (`MambaManager.allocate_new_blocks`, v1/core/single_type_kv_cache_manager.py
0.32.0:1780). vLLM frees each earlier state (:1624), but LMCache's tracker keeps the freed block in its list.

For each chunk, the server stores the state that the chunk's last block holds. The server leaves out the state only if
all blocks of the chunk are null (modules/lmcache_driven_transfer.py 0.5.6:85). In a chunk of several blocks, an earlier
block may hold a state. The server then stores the last block, although this block is null. After a failed load, LMCache
stores a chunk late, when another request already has the chunk's block.

Fix: vLLM has a state only where a step begins and where the step ends. If a stored chunk ends elsewhere, the fix sets
the chunk's blocks in the state group to null. The server then leaves out the state, and no hit ends at this chunk. The
fix needs `lmcache server --separate-object-groups`. Without this option, see KVF125.
- Releases: LMCache 0.5.4 to 0.5.6. According to their source code, 0.4.7 to 0.5.3 have the bug too. The server of 0.4.7
  to 0.5.3 also stores chunks whose blocks are all null.
- Remove when: The server leaves out a state whose own block is null, and the tracker removes freed blocks.
"""

from kvfix.fixes import _closed, _mp, _windows
from kvfix.fixes.api import LMCACHE_MP, Any, Fix, fix_after, note


@fix_after(when=_windows.has_transfers, on_fault=_closed.drop_stores)
def fix(connector: Any, answer: Any, scheduler_output: Any, metadata: Any) -> None:
    """If vLLM does not have the state of a chunk, store null blocks in place of the chunk's state blocks."""
    states, chunk = _windows.states(connector), _mp.chunk_size(connector)
    if not states:
        return
    computed, scheduled = _windows.computed(scheduler_output), scheduler_output.num_scheduled_tokens
    for meta in metadata.requests:
        if meta.direction != "STORE" or meta.request_id not in computed:
            continue
        begins = computed[meta.request_id]
        for group, size in states.items():
            ids = list(meta.op.block_ids[group])
            for end in range(meta.op.start + chunk, meta.op.end + 1, chunk):
                last = (end - meta.op.start) // size
                if end not in (begins, begins + scheduled[meta.request_id]) or not ids[last - 1]:
                    if any(ids[last - chunk // size : last]):
                        note(__name__, f"request {meta.request_id}: the state at token {end} is not stored")
                    ids[last - chunk // size : last] = [0] * (chunk // size)
            meta.op.block_ids[group] = ids


def new_shows_bug(hook: Any, module: Any, computed: int = 0, **blocks: Any) -> bool:
    """Store 32 state blocks. Only the first and the last block are not null. The bug stores the first block too."""
    connector = _windows.scheduler_side(module, 0, list(range(1, 65)), [65, *[0] * 30, 96], computed=computed)
    stores = _windows.stored(hook, module, connector, computed, 512 - computed, **blocks)[1:]
    return any(meta.op.block_ids[1][0] for meta in stores if meta.op.start == 0)


def cached_shows_bug(hook: Any, module: Any) -> bool:
    """Do the same as `new_shows_bug`, for a running request with 256 computed tokens and no earlier store."""
    return new_shows_bug(hook, module, computed=256, blocks=[])


FIX = Fix(
    LMCACHE_MP._process_new_requests(broken=">=0.4.7,<=0.5.6", probe=new_shows_bug, fix=fix, order=1),
    LMCACHE_MP._process_cached_requests(broken=">=0.4.7,<=0.5.6", probe=cached_shows_bug, fix=fix, order=1),
    effect="wrong output",
    evidence={"KVR014": r"null blocks|freed before"},
    scenarios=("mp-state-stored-null",),
)
