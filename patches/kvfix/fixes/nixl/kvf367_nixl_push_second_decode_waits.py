"""A decode request waits for ever: two decode requests wait for one prefill, and NixlPushConnector serves only one.

Symptom: A router sends a decode request again with the same id and kv_transfer_params. One of the two requests stays in
WAITING_FOR_REMOTE_KVS and keeps its blocks. The decode engine logs `registration for request ... timed out after 480.0s
without a push completion`. The prefill engine logs nothing.

Cause: NixlPushConnector promises a load of the prompt for each request with a remote prefill, and each request
registers its blocks (push_scheduler.py 0.32.0:124, :183). The prefill engine writes into the blocks of the first
registration that it finds, and then forgets the prefill (push_worker.py 0.32.0:404). The other registration gets no
answer.

Fix: In each decode engine, only the first request for a prefill registers. A later request for the same prefill
computes its prompt itself. Requests are for the same prefill if three values are equal: remote_engine_id,
remote_request_id, and the request id without its random suffix. (The prefill engine also ignores this suffix.) If two
decode engines ask for one prefill, one of the two loads still waits. With KVF322, the waiting load times out.
- Remove when: vLLM promises each prefill to only one decode request.
"""

from kvfix.fixes import _nixl, _prefills
from kvfix.fixes.api import NIXL_PUSH_SCHEDULER, Any, Fix, fix_after


@fix_after(when=lambda connector, answer, request, *_: request.request_id in connector._push_pending_registrations)
def note_first(connector: Any, answer: None, request: Any, *_: Any) -> None:
    """Record that this request has registered for its prefill."""
    _prefills.first(connector, _prefill(request), request)


@_prefills.promise_if
def promise_once(connector: Any, request: Any) -> bool:
    """Promise a prefill to the first request that asks. Let a later request compute its prompt."""
    if not _prefills.has_another(connector, _prefill(request)):
        return True
    _prefills.compute(request)
    return False


def _prefill(request: Any) -> tuple[str, str, str]:
    """Return two parameters, and the request id without its random suffix. The three values identify a prefill."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id

    params = request.kv_transfer_params
    prefill = str(params.get("remote_engine_id")), str(params.get("remote_request_id"))
    return *prefill, get_base_request_id(request.request_id)


def shows_bug(hook: Any, module: Any) -> bool:
    """Look up the second of two requests for one prefill. With the bug, the prefill is promised again."""
    connector = _nixl.scheduler_side()
    first, again = (_nixl.remote_prefill(32, f"r-0000000{end}") for end in (1, 2))
    module.NixlPushConnectorScheduler.update_state_after_alloc(connector, first, _nixl.allocated(1, 2), 32)
    return bool(hook(connector, again, 0)[0])


FIX = Fix(
    NIXL_PUSH_SCHEDULER.get_num_new_matched_tokens(broken=">=0.32", order=1, probe=shows_bug, fix=promise_once),
    NIXL_PUSH_SCHEDULER.update_state_after_alloc(broken=">=0.32", order=1, fix=note_first, helper=True),
    effect="hang",
    evidence={"KVD688": "", "LAB003": "WAITING_FOR_REMOTE_KVS"},
)
