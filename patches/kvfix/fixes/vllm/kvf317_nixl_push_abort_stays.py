"""The decode worker's memory grows: NixlPushConnector keeps each request that is aborted before it is scheduled.

## Symptom
With NixlPushConnector the memory of the decode engine's worker grows by the parameters of each such request, and
`kvfix look` shows its id in `_recving_metadata`, for good. Where the parameters lack a key EngineCore dies (KVF313).

## Cause
For a request that ends before it was scheduled request_finished puts it among those that are to receive, without
blocks, so that the worker tells the prefill engine (push_scheduler.py 0.32.0:231-241). The worker of push mode tells
nobody: start_load_kv notes it as one that waits (push_worker.py 0.32.0:206), and nothing ever arrives for it. In pull
mode such a request is not noted (pull_worker.py 0.32.0:73). So it is with a request of which another connector of a
MultiConnector, or vLLM's own prefix cache, has all tokens: its parameters are still unread at its end (:160).

## Fix
After start_load_kv: such a request is not noted. The prefill engine keeps its blocks to the end of their lease, as it
does as released.

## Releases
vLLM 0.32.0, the first one played, and 0.33.0.

## Upstream
None known.

## Remove when
The worker does not note a request without blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.acting import note
from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import NIXL_PUSH_WORKER
from kvfix.wrapping import after


def fix(module: ModuleType) -> Callable[..., Any]:
    def start_load_kv(worker: Any, answer: None, metadata: Any) -> None:
        for name, meta in metadata.reqs_to_recv.items():
            if not any(meta.local_block_ids):
                note(__name__, f"request {name} waits for nothing")
                worker._recving_metadata.pop(name, None)
        return answer

    return after(start_load_kv, when=lambda worker, answer, metadata: metadata.reqs_to_recv)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """One without blocks. Wrong is to wait for them."""
    worker = SimpleNamespace(
        pcp_rank=0, _logical_to_kernel_block_ids=lambda blocks, ratio: blocks, _remote_agents={}, _recving_metadata={},
        _physical_blocks_per_logical_kv_block=1, _send_heartbeats=lambda _: None,
    )  # fmt: skip
    meta = SimpleNamespace(local_block_ids=[], remote=SimpleNamespace(engine_id="p", block_ids=()))
    metadata = SimpleNamespace(
        reqs_to_recv={stubs.NAME: meta}, push_registrations={}, push_finished_blocks={}, reqs_in_batch=(),
        reqs_not_processed=(), reqs_to_send={}, scheduler_clock=0.0,
    )  # fmt: skip
    hook(worker, metadata)
    return bool(worker._recving_metadata)


FIX = Fix(
    __name__,
    __doc__,
    effect="leak",
    targets=(NIXL_PUSH_WORKER.start_load_kv(broken=">=0.32", probe=shows_bug, fix=fix),),
    evidence={"KVR009": r"^_recving_metadata "},
    scenarios=("nixl-push-abort-stays",),
)
