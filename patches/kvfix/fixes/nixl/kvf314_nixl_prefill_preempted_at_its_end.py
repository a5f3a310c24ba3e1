"""Decode gets no blocks and the prefill worker leaks an id if a prefill ends while it is preempted (NixlConnector).

## Symptom
With asynchronous scheduling the memory of the prefill engine's worker grows by one id for each request that is
preempted at its end. The decode engine gets `remote_block_ids` without blocks. Without the fix for KVF301, the worker
of the decode engine then dies with `AssertionError`.

## Cause
With asynchronous scheduling, vLLM can preempt a request while the step that computes its last token is in flight. The
request ends with the answer of that step, and holds no blocks any more. request_finished then keeps nothing for the
peer, and does not tell the worker. The worker has the request in `_reqs_to_process` since it was scheduled
(pull_scheduler.py 0.32.0:250-271).

## Fix
The fix acts after request_finished in the prefill engine. If no blocks are kept for the request, the fix tells the
worker not to process the request. vLLM tells the worker the same for an aborted request.

## Releases
vLLM 0.32.0 and 0.33.0. Earlier releases were not tested.

## Upstream
None known.

## Remove when
vLLM tells the worker of every request that keeps no blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.acting import note
from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import NIXL_PULL_SCHEDULER, NIXL_PUSH_SCHEDULER
from kvfix.wrapping import after


def fix(module: ModuleType) -> Callable[..., Any]:
    def request_finished(connector: Any, answer: tuple[bool, Any], request: Any, *_: Any) -> tuple[bool, Any]:
        note(__name__, f"request {request.request_id} keeps no blocks")
        connector._reqs_not_processed.add(request.request_id)
        return answer

    return after(request_finished, when=_keeps_nothing)


def _keeps_nothing(connector: Any, answer: tuple[bool, Any], request: Any, *_: Any) -> bool:
    params = request.kv_transfer_params
    return (
        not answer[0]
        and bool(params)
        and (params.get("do_remote_decode") or connector.is_bidirectional_kv_xfer_enabled)
    )


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A request that ends without blocks. Wrong is to tell the worker nothing."""
    from vllm.v1.request import RequestStatus

    parallel = SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1)
    connector = SimpleNamespace(
        _stop_heartbeat=lambda _: None, is_bidirectional_kv_xfer_enabled=False, _reqs_not_processed=set(),
        engine_id="p", side_channel_host="p", side_channel_port=1, transfer_tp_size=1, _TRANSFER_MODE="pull",
        vllm_config=SimpleNamespace(parallel_config=parallel), _push_registration_deadlines={}, _reqs_need_save={},
        _registration_generation=0,
    )  # fmt: skip
    request = stubs.request(8, kv_transfer_params={"do_remote_decode": True})
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    hook(connector, request, ([],))
    return not connector._reqs_not_processed


FIX = Fix(
    __name__,
    __doc__,
    effect="hang",
    targets=tuple(
        owner.request_finished(broken=">=0.32", probe=shows_bug, fix=fix)
        for owner in (NIXL_PULL_SCHEDULER, NIXL_PUSH_SCHEDULER)
    ),
    evidence={"KVR009": r"^_reqs_to_process "},
    scenarios=("nixl-prefill-preempted-at-its-end",),
)
