"""Wrong text with NixlPushConnector: KV is shifted if prefill has more blocks, as vLLM pairs lists from their end.

Symptom: Requests return wrong text without a message, if the prefill engine has generated more than one token.

Cause: As in pull mode (KVF310), `_apply_prefix_caching` takes the blocks for the decode engine from the end of the
prefill engine's list (push_worker.py 0.32.0:670). This list is too long if the generated tokens need new blocks.

Fix: In KV groups with full attention, the fix does not push the blocks after the prompt.
- Remove when: vLLM pairs the blocks by their position in the prompt.
"""

from kvfix.fixes import _nixl
from kvfix.fixes.api import NIXL_PUSH_SCHEDULER, PRIVATE, Any, Fix, fix_after, note, stubs


def _not_pushed(connector: Any, answer: tuple[bool, Any], request: Any, *_: Any, **__: Any) -> tuple[bool, Any]:
    """Push no block. With KVF322, the load in the decode engine then fails after a timeout."""
    connector._newly_finished_push_blocks.pop(request.request_id, None)
    return answer


@fix_after(when=lambda connector, answer, *_: answer[0], on_fault=_not_pushed)
def request_finished(connector: Any, answer: tuple[bool, Any], request: Any, *_: Any) -> None:
    pushed = connector._newly_finished_push_blocks
    if request.request_id not in pushed:
        return
    specs = [group.kv_cache_spec for group in connector.kv_cache_config.transfer_groups]
    cut = []
    for spec, blocks in zip(specs, pushed[request.request_id], strict=True):
        own = -(-request.num_prompt_tokens // spec.block_size) if _nixl.has_full_attention(type(spec)) else None
        cut.append(blocks[:own])
        if len(cut[-1]) != len(blocks):
            note(__name__, f"request {request.request_id}: blocks after its prompt are not sent")
    pushed[request.request_id] = tuple(cut)


def shows_bug(hook: Any, module: Any) -> bool:
    """End a prefill that has three blocks, two of them for its prompt. With the bug, the connector pushes all three."""
    groups = [stubs.Stub(kv_cache_spec=type("FullAttentionSpec", (), {"block_size": 16})())]
    connector = _nixl.scheduler_side(_TRANSFER_MODE="push", kv_cache_config=stubs.Stub(transfer_groups=groups))
    request = _nixl.finished_prefill(36, num_prompt_tokens=32)
    hook(connector, request, ([1, 2, 3],))
    return len(connector._newly_finished_push_blocks[request.request_id][0]) != 2


FIX = Fix(
    NIXL_PUSH_SCHEDULER.request_finished(broken=">=0.32", order=2, probe=shows_bug, fix=request_finished),
    effect="wrong output",
    scenarios=("nixl-push-prefill-generates-more",),
    no_patch=PRIVATE,
)
