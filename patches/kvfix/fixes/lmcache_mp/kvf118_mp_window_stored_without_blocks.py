"""Hits return wrong text with a sliding window: LMCache stores null blocks, or blocks that vLLM has freed.

Symptom: No error is logged. Prompts that hit the cache return wrong text, until the chunks are evicted. The model has
layers of full attention and of sliding windows (Gemma, gpt-oss).

Cause: For a layer with a sliding window, vLLM keeps only the blocks of the window. After a prefix hit, the request's
block list has null block 0 in place of the blocks before the window. vLLM frees more blocks as the window moves on.
LMCache's tracker has its own list for later stores, and only adds blocks to this list (`slice_block_ids_per_group`,
v1/multiprocess/group_view.py 0.5.6:180). The tracker's list is wrong in two cases:

- vLLM has a prefix hit on tokens that LMCache does not have. (In 0.5.6, this happens only after LMCache evicts chunks.)
  The tracker's list then has null blocks for these tokens.
- A failed load has set the tracker's hit to 0 (lmcache_mp_connector.py 0.5.6:1288). LMCache then stores a chunk late,
  when other requests already have the chunk's blocks.

The server leaves out a chunk only if all blocks of all its KV groups are null (modules/lmcache_driven_transfer.py
0.5.6:85). So the server stores wrong KV under a valid key. A later hit that ends at this chunk reads the wrong KV.

Fix: The fix ends a store before the first chunk that has a null or freed window block. LMCache stores no later chunk of
the request, because no prefix hit would find a later chunk. With `--separate-object-groups`, the server could still
store full-attention layers of later chunks, but the fix leaves out these layers too.
- Releases: LMCache 0.4.7 to 0.5.6. Earlier releases were not tested with several KV groups.
- Remove when: LMCache stores no block that vLLM has removed from the request's list.
"""

from kvfix.fixes import _closed, _mp, _windows
from kvfix.fixes.api import LMCACHE_MP, Any, Fix, fix_after, note


@fix_after(when=_windows.has_transfers, on_fault=_closed.drop_stores)
def fix(connector: Any, answer: Any, scheduler_output: Any, metadata: Any) -> None:
    """Let each store end before the first chunk whose window blocks vLLM does not have."""
    computed, windows, chunk = _windows.computed(scheduler_output), _windows.of(connector), _mp.chunk_size(connector)
    for meta in list(metadata.requests):
        if meta.direction != "STORE" or meta.request_id not in computed:
            continue
        tracker, op = connector.request_trackers[meta.request_id], meta.op
        cut = getattr(tracker, "_kvfix_cut", None)
        if cut is op:  # the fix has already cut this store, in its call after `_process_new_requests`
            continue
        end = op.start if cut is not None else _whole_until(op, windows, chunk, computed[meta.request_id])
        if end == op.end:
            continue
        tracker._kvfix_cut = op
        note(__name__, f"request {meta.request_id}: tokens {end} to {op.end} are not stored")
        if end == op.start:
            metadata.requests.remove(meta)
            continue
        sizes, kept = connector._group_tokens_per_block, end - op.start
        op.block_ids = [ids[: kept // size] if size else ids for ids, size in zip(op.block_ids, sizes, strict=True)]
        op.end = end


def _whole_until(op: Any, windows: dict[int, tuple[int, int]], chunk: int, computed: int) -> int:
    """Return the first token of the first chunk whose window blocks vLLM does not have, or the end of the store."""
    for start in range(op.start, op.end, chunk):
        for group, (window, size) in windows.items():
            # the server keeps at most the last `window` tokens of a chunk (v1/kv_layer_groups.py 0.5.6:580)
            first, last = start + chunk - min(window, chunk), start + chunk
            ids = op.block_ids[group][(first - op.start) // size : (last - op.start) // size]
            if 0 in ids or first < _windows.kept_from(computed, window, size):
                return start
    return int(op.end)


def new_shows_bug(hook: Any, module: Any) -> bool:
    """Schedule a request with 512 computed tokens and null blocks before its window. The bug stores null blocks."""
    connector = _windows.scheduler_side(module, 256, list(range(1, 65)), [0] * 16 + list(range(65, 113)), computed=512)
    return any(0 in meta.op.block_ids[1] for meta in _windows.stored(hook, module, connector, 512, 512)[1:])


def cached_shows_bug(hook: Any, module: Any) -> bool:
    """Let the tracker count 0 of 768 computed tokens. With the bug, LMCache stores freed window blocks."""
    connector = _windows.scheduler_side(module, 256, list(range(1, 65)), list(range(65, 129)), computed=0)
    return len(_windows.stored(hook, module, connector, 768, 256, blocks=[])) > 1


FIX = Fix(
    LMCACHE_MP._process_new_requests(broken=">=0.4.7,<=0.5.6", probe=new_shows_bug, fix=fix),
    LMCACHE_MP._process_cached_requests(broken=">=0.4.7,<=0.5.6", probe=cached_shows_bug, fix=fix),
    effect="wrong output",
    evidence={"KVR014": r"null blocks|freed before"},
    scenarios=("mp-window-stored-null", "mp-window-stored-late"),
    no_patch={"lmcache": "LMCache must decide how the tracker learns of windows, and of blocks that vLLM has freed"},
)
