"""A load fails, and requests that only share computed blocks with it are failed with it.

## Symptom
`Failing 2 request(s) due to KV load failure`, with ids of requests that loaded nothing, or were done loading long ago:
requests with a common prefix, such as a system prompt. With `kv_load_failure_policy=recompute` they compute again what
they had.

## Cause
A load begins at the start of a chunk. The blocks of it that vLLM has computed are not written
(`skip_first_n_tokens`, lmcache_mp_metadata.py 0.5.6:387), but where the load fails all blocks of the chunk are
reported (vllm_multi_process_adapter.py 0.5.6:1924), and vLLM fails whoever has one of them.

## Fix
After `submit_retrieve_request`: the blocks that the load was told to skip are not among those that it can fail.

## Releases
LMCache 0.4.2 to 0.5.6.

## Upstream
None known.

## Remove when
The worker keeps only the blocks that a load writes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix.correction import after
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(module: ModuleType) -> Callable[..., Any]:
    def submit_retrieve_request(adapter: Any, answer: Any, request_id: str, op: Any, *_: Any, **__: Any) -> Any:
        spared = _skipped(op)
        if request_id in adapter.retrieve_futures:
            future, blocks = adapter.retrieve_futures[request_id]
            adapter.retrieve_futures[request_id] = (future, [block for block in blocks if block not in spared])
        else:  # the server is silent: reported at once
            adapter.error_block_ids.difference_update(spared)
        return answer

    return after(submit_retrieve_request, when="op.skip_first_n_tokens")


def _skipped(op: Any) -> list[int]:
    """Blocks that the load does not write. With several groups of blocks LMCache reports requests, not blocks."""
    blocks = op.block_ids
    if blocks and isinstance(blocks[0], list):
        if len(blocks) > 1:
            return []
        blocks = blocks[0]
    return list(blocks[: op.skip_first_n_tokens * len(blocks) // (op.end - op.start)])


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """Blocks 3 to 6 of 16 tokens, of which vLLM has computed the first; the server is silent."""
    adapter = SimpleNamespace(
        _ensure_heartbeat_started=lambda: None,
        is_healthy=False,
        retrieve_futures={},
        error_block_ids=set(),
        _dropped_retrieves=set(),
        _failed_request_ids=set(),
    )
    op = module.LoadStoreOp(token_ids=[0] * 64, block_ids=[3, 4, 5, 6], start=0, end=64, skip_first_n_tokens=16)
    hook(adapter, "kvfix-probe", op, None)
    return 3 in adapter.error_block_ids


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_multi_process_adapter",
            function="LMCacheMPWorkerAdapter.submit_retrieve_request",
            broken=">=0.4.2,<=0.5.6",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
