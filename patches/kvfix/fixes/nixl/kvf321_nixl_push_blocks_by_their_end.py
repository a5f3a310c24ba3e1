"""Wrong text with NixlPushConnector: blocks are paired from their end, and KV is shifted if prefill has more blocks.

## Symptom
Wrong text without any message, if the prefill engine has generated more than one token.

## Cause
A decode engine that has a prefix hit names the blocks for the rest of the prompt. `_apply_prefix_caching` takes that
many blocks from the end of the prefill engine's list (push_worker.py 0.32.0:660, base_worker.py:3461). This is right
only if both lists end at the same token. A router may let the prefill engine generate more than one token (no
`max_tokens` of 1). If the generated tokens need a new block, the prefill engine has one block more. KVF310 is the same
bug in pull mode.

## Fix
After request_finished of the prefill engine, the worker gets only the prompt's blocks of a KV group with full
attention.

## Releases
vLLM 0.32.0 and 0.33.0. Earlier releases were not tested.

## Upstream
None known in public: the bug is a security problem (SECURITY.md).

## Remove when
vLLM pairs the blocks by their position in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.acting import note
from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import NIXL_PUSH_SCHEDULER
from kvfix.wrapping import after


def fix(module: ModuleType) -> Callable[..., Any]:
    def request_finished(connector: Any, answer: tuple[bool, Any], request: Any, *_: Any) -> tuple[bool, Any]:
        blocks = connector._newly_finished_push_blocks[request.request_id]
        specs = [group.kv_cache_spec for group in connector.kv_cache_config.transfer_groups]
        cut = tuple(
            group[: -(-request.num_prompt_tokens // spec.block_size)] if _is_full(spec) else group
            for spec, group in zip(specs, blocks, strict=True)
        )
        if any(len(one) != len(other) for one, other in zip(cut, blocks, strict=True)):
            note(__name__, f"request {request.request_id}: blocks after its prompt are not sent")
        connector._newly_finished_push_blocks[request.request_id] = cut
        return answer

    return after(
        request_finished,
        when=lambda connector, answer, request, *_: (
            answer[0] and request.request_id in connector._newly_finished_push_blocks
        ),
        on_fault=_not_pushed,
    )


def _not_pushed(connector: Any, answer: tuple[bool, Any], request: Any, *_: Any, **__: Any) -> tuple[bool, Any]:
    """Push no block. The load of the decode engine then fails at its timeout (KVF322)."""
    connector._newly_finished_push_blocks.pop(request.request_id, None)
    return answer


def _is_full(spec: Any) -> bool:
    """True for KV groups of full attention. The other groups have only their last blocks."""
    return "FullAttentionSpec" in {each.__name__ for each in type(spec).__mro__}


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """Three blocks, two of them the prompt's. Wrong is to have all written."""
    from vllm.v1.request import RequestStatus

    class FullAttentionSpec:
        block_size = 16

    parallel = SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1)
    connector = SimpleNamespace(
        _stop_heartbeat=lambda _: None, _push_registration_deadlines={}, _reqs_need_send={}, _kv_lease_duration=30,
        get_exchange_clipped_blocks=lambda blocks: blocks, _finished_request_blocks={}, _newly_finished_push_blocks={},
        engine_id="p", side_channel_host="p", side_channel_port=1, transfer_tp_size=1, _TRANSFER_MODE="push",
        vllm_config=SimpleNamespace(parallel_config=parallel), _registration_generation=0,
        kv_cache_config=SimpleNamespace(transfer_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec())]),
    )  # fmt: skip
    request = stubs.request(36, kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=36)
    request.num_prompt_tokens, request.status = 32, RequestStatus.FINISHED_LENGTH_CAPPED
    hook(connector, request, ([1, 2, 3],))
    return len(connector._newly_finished_push_blocks[request.request_id][0]) != 2


FIX = Fix(
    __name__,
    __doc__,
    effect="wrong output",
    targets=(NIXL_PUSH_SCHEDULER.request_finished(broken=">=0.32", place=2, probe=shows_bug, fix=fix),),
    evidence={},
    scenarios=("nixl-push-prefill-generates-more",),
    no_patch={"vllm": "it can be abused: vLLM's security channel comes before a public patch (SECURITY.md)"},
    on_fault="closed",
)
