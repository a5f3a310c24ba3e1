"""Wrong text with MooncakeConnector: KV is shifted if the prefill engine has generated more than one token.

Symptom: If the router lets prefill generate more than one token, requests return wrong text without a message.

Cause: The prefill engine sends as many blocks as the decode engine asks for. Prefill takes these blocks from the end of
its list (mooncake_connector.py 0.32.0:1823). Each block of generated tokens in the list shifts all KV by one block.

Fix: Prefill's scheduler passes only the prompt's blocks to prefill's worker. The fix does nothing with context
parallelism, or if a layer of the model does not have full attention.
- Releases: vLLM 0.20.2 to 0.33.0. 0.32.0 and 0.33.0 were tested. For the other releases, only the code was read.
- Remove when: vLLM takes the blocks from the start of the list.
"""

from kvfix.fixes import _mooncake
from kvfix.fixes.api import GO_ON, MOONCAKE_SCHEDULER, Any, Fix, fix_before, stubs


def _send_no_block(connector: Any, *_: Any, **__: Any) -> Any:
    """Send no blocks. Prefill's sender then finds too few blocks and reports decode's load as failed."""
    for name, (request, blocks) in connector._reqs_need_send.items():
        connector._reqs_need_send[name] = request, [[] for _ in blocks]
    return GO_ON


@fix_before(when=lambda impl, *_, **__: impl._reqs_need_send and not impl._is_hma_required, on_fault=_send_no_block)
def build_connector_meta(connector: Any, *_: Any) -> bool:
    cut = False
    parallel = connector.vllm_config.parallel_config
    if any(getattr(parallel, f"{side}_context_parallel_size", 1) > 1 for side in ("prefill", "decode")):
        return cut
    for name, (request, blocks) in connector._reqs_need_send.items():
        own = -(-request.num_prompt_tokens // connector.block_size)
        if len(blocks) == 1 and len(blocks[0]) > own:
            connector._reqs_need_send[name] = request, [blocks[0][:own]]
            cut = True
    return cut


def shows_bug(hook: Any, module: Any) -> bool:
    """End a request with two prompt blocks and one output block. With the bug, prefill offers all three blocks."""
    config = stubs.Stub(parallel_config=stubs.Stub(decode_context_parallel_size=1, prefill_context_parallel_size=1))
    connector = _mooncake.scheduler_side("kv_producer", _is_hma_required=False, vllm_config=config)
    request = _mooncake.finished_prefill(40, module.RequestStatus.FINISHED_LENGTH_CAPPED, num_prompt_tokens=32)
    hook(connector, request, ([7, 8, 9],))
    return bool(connector._reqs_need_send[request.request_id][1] != [[7, 8]])


FIX = Fix(
    MOONCAKE_SCHEDULER.request_finished(broken=">=0.20", probe=shows_bug, fix=None),
    MOONCAKE_SCHEDULER.build_connector_meta(broken=">=0.20", fix=build_connector_meta, order=1, helper=True),
    effect="wrong output",
    scenarios=("mooncake-prefill-generates-more",),
)
