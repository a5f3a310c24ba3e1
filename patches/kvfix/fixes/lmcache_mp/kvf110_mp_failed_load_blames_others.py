"""A failed load also fails other requests that only share computed blocks with the loading request.

Symptom: vLLM logs `Failing 2 request(s) due to KV load failure`, with ids of requests that loaded nothing or finished
loading long ago. These requests share a prefix, such as a system prompt, with the request whose load failed. With
`kv_load_failure_policy=recompute` vLLM computes tokens of these requests again.

Cause: A load begins at the start of a chunk, but does not write the blocks that vLLM has already computed
(`skip_first_n_tokens`, lmcache_mp_metadata.py 0.5.6:388). If the load fails, the worker reports all blocks of the chunk
(vllm_multi_process_adapter.py 0.5.6:1923), and vLLM fails every request that has one of these blocks.

Fix: If a load fails, the worker reports only the blocks that the load writes.
- Remove when: The worker reports only the blocks that a failed load writes.
"""

from kvfix.fixes import _mp
from kvfix.fixes.api import MP_WORKER_ADAPTER, Any, Fix, fix_after, note, stubs


@fix_after(when=lambda adapter, answer, request_id, op, *_, **__: op.skip_first_n_tokens)
def fix(adapter: Any, answer: Any, request_id: str, op: Any, *_: Any, **__: Any) -> None:
    skipped = _skipped(op)
    if skipped:
        note(__name__, f"request {request_id}: {len(skipped)} computed blocks are not reported as failed")
    if request_id in adapter.retrieve_futures:
        future, blocks = adapter.retrieve_futures[request_id]
        adapter.retrieve_futures[request_id] = (future, [block for block in blocks if block not in skipped])
    else:  # the server is silent, so LMCache has already reported the blocks as failed
        adapter.error_block_ids.difference_update(skipped)


def _skipped(op: Any) -> list[int]:
    """Return the blocks that the load skips. For several KV groups, LMCache 0.5.6 reports request ids, so return []."""
    blocks = op.block_ids
    if blocks and isinstance(blocks[0], list):
        if len(blocks) > 1:
            return []
        blocks = blocks[0]
    return list(blocks[: op.skip_first_n_tokens * len(blocks) // (op.end - op.start)])


def shows_bug(hook: Any, module: Any) -> bool:
    """Load blocks 3 to 6 from a silent server. vLLM has computed block 3. The bug also reports block 3 as failed."""
    adapter = _mp.worker_side(is_healthy=False)
    op = module.LoadStoreOp(token_ids=[0] * 64, block_ids=[3, 4, 5, 6], start=0, end=64, skip_first_n_tokens=16)
    hook(adapter, stubs.NAME, op, None)
    return 3 in adapter.error_block_ids


FIX = Fix(
    MP_WORKER_ADAPTER.submit_retrieve_request(broken=">=0.4.2,<=0.5.6", probe=shows_bug, fix=fix, order=1),
    effect="lost hits",
    scenarios=("mp-failed-load-blames-others", "mp-failed-load-blames-others-in-tree"),
)
