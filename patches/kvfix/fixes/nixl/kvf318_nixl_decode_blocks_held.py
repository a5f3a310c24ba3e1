"""The decode engine runs out of blocks: with `bidirectional_kv_xfer` NixlConnector never frees some blocks.

Symptom: `GPU KV cache usage` of the decode engine rises to 100% and stays there. No request runs.

Cause: With `bidirectional_kv_xfer` request_finished keeps the blocks of every request with `kv_transfer_params`, for
the next turn's prefill (pull_scheduler.py 0.32.0:247-278). The worker starts a lease for these blocks only if
update_state_after_alloc reports the request. This function reports only requests with `do_remote_prefill` or
`do_remote_decode` (:122-125). If decode computes a prompt itself, the router sends neither parameter. So no lease
begins, and vLLM never frees these blocks.

Fix: After update_state_after_alloc, the fix tells the worker about each request whose blocks will be kept.
- Remove when: vLLM keeps only the blocks of requests that the worker knows.
"""

from kvfix.fixes import _nixl
from kvfix.fixes.api import NIXL_PULL_SCHEDULER, Any, Fix, fix_after, note, stubs


@fix_after()
def begin_lease(connector: Any, answer: None, request: Any, *_: Any) -> None:
    keeps = request.kv_transfer_params and connector.is_bidirectional_kv_xfer_enabled
    if keeps and request.request_id not in connector._reqs_in_batch:
        note(__name__, f"request {request.request_id}: the lease of its blocks begins")
        connector._reqs_in_batch.add(request.request_id)


def shows_bug(hook: Any, module: Any) -> bool:
    """Admit a request that loads nothing. With the bug, the worker is not told about the request."""
    connector = _nixl.scheduler_side(is_bidirectional_kv_xfer_enabled=True)
    hook(connector, stubs.request(8, kv_transfer_params={"do_remote_prefill": False}), None, 0)
    return not connector._reqs_in_batch


FIX = Fix(
    NIXL_PULL_SCHEDULER.update_state_after_alloc(broken=">=0.32", probe=shows_bug, fix=begin_lease),
    effect="hang",
    evidence={"LAB020": "of the decode engine"},
)
