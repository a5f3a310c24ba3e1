"""Decode gets no blocks and the prefill worker leaks an id if a prefill ends while it is preempted (NixlConnector).

Symptom: With asynchronous scheduling, the prefill worker's memory grows by one id for each request that ends while
preempted. Decode gets `remote_block_ids` without blocks. Without KVF301, decode's worker dies with `AssertionError`.

Cause: With asynchronous scheduling, vLLM can preempt a request while the step that computes its last token is in
flight. The request then ends without blocks. request_finished keeps no blocks for decode, and does not tell the worker
about the end. So the request stays in the worker's `_reqs_to_process` (pull_scheduler.py 0.32.0:248-269).

Fix: If request_finished keeps no blocks, the fix lets the worker drop the request, as vLLM does after an abort.
- Remove when: vLLM tells the worker of every request that keeps no blocks.
"""

from kvfix.fixes import _nixl
from kvfix.fixes.api import NIXL_PULL_SCHEDULER, NIXL_PUSH_SCHEDULER, Any, Fix, fix_after, note


@fix_after()
def request_finished(connector: Any, answer: tuple[bool, Any], request: Any, *_: Any) -> None:
    params = request.kv_transfer_params
    asked = params and (params.get("do_remote_decode") or connector.is_bidirectional_kv_xfer_enabled)
    if asked and not answer[0]:
        note(__name__, f"request {request.request_id} keeps no blocks")
        connector._reqs_not_processed.add(request.request_id)


def shows_bug(hook: Any, module: Any) -> bool:
    """End a prefill that has no blocks. With the bug, the scheduler does not tell the worker about the end."""
    connector = _nixl.scheduler_side()
    hook(connector, _nixl.finished_prefill(8), ([],))
    return not connector._reqs_not_processed


FIX = Fix(
    NIXL_PULL_SCHEDULER.request_finished(broken=">=0.32", probe=shows_bug, fix=request_finished),
    NIXL_PUSH_SCHEDULER.request_finished(broken=">=0.32", probe=shows_bug, fix=request_finished),
    effect="hang",
    evidence={"KVR009": r"^_reqs_to_process "},
)
