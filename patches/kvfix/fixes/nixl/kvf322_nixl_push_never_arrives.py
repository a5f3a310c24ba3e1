"""Requests of a decode engine wait for ever: NixlPushConnector waits for blocks that no engine will push.

Symptom: With NixlPushConnector, requests of the decode engine stay in WAITING_FOR_REMOTE_KVS and keep their blocks. The
decode engine logs `registration for request ... timed out after 480.0s without a push completion`, but logs nothing
for an aborted request. `GPU KV cache usage` rises, until no request runs.

Cause: The decode engine registers its blocks with the prefill engine, and waits for a write. A prefill engine that
cannot write to the blocks reports nothing to the decode engine. For example, the prefill was aborted, the lease is
over, or the KV went to another request with the same id. The prefill engine may also have ended, or fail to connect. If
the router sends a request to both engines at once, each engine may wait for the other engine's blocks.

After `push_registration_timeout`, build_connector_meta drops the registration and logs the timeout (push_scheduler.py
0.32.0:297-330), but the decode worker continues to wait. vLLM keeps the blocks of an aborted request until the worker
reports the request's load (v1/core/sched/scheduler.py 0.32.0:2703).

Fix: The fix adds an end time to the registration. After this time the prefill engine's worker begins no write. If the
load is still open five seconds later, decode's worker reports a failed load. vLLM applies `kv_load_failure_policy`.

Mixed roll-out: The prefill engine and the decode engine must both have the fix. In the prefill engine alone the fix
changes nothing. If only the decode engine has the fix, prefill may write into blocks that decode has already freed.
So add the fix to prefill first, and remove the fix from prefill last.
- Remove when: vLLM fails a load whose registration has timed out.
"""

from kvfix.fixes import _closed, _nixl, api
from kvfix.fixes.api import NEW_REQUESTS, Any, Fix, Steps, fix_after, fix_around, fix_before, note

#: Key of a registration's end time, in seconds of the decode engine's scheduler clock.
_UNTIL = "kvfix_until"


@fix_after(when=lambda connector, answer, request, *_: request.request_id in connector._push_pending_registrations)
def update_state_after_alloc(connector: Any, answer: None, request: Any, *_: Any) -> None:
    until = connector._push_registration_deadlines.get(request.request_id)
    if until is not None:
        connector._push_pending_registrations[request.request_id].setdefault(_UNTIL, until)


@fix_before(when=lambda worker, metadata: metadata.push_registrations)
def start_load_kv(worker: Any, metadata: Any) -> None:
    """Record the end time of each registration in the decode worker."""
    now = _nixl.now()
    ends = vars(worker).setdefault("_kvfix_ends", {})
    for name, registration in metadata.push_registrations.items():
        if _UNTIL in registration:
            ends[name] = now + registration[_UNTIL] - (metadata.scheduler_clock or now)


@fix_before(when=lambda worker: getattr(worker, "_kvfix_ends", None))
def get_transfer_results(worker: Any) -> None:
    """Fail each load whose registration ended more than five seconds ago."""
    now = _nixl.now()
    for name, until in list(worker._kvfix_ends.items()):
        if name not in worker._recving_metadata:
            del worker._kvfix_ends[name]
        elif now > until + 5.0:  # a write that began before the end time may take five seconds more
            del worker._kvfix_ends[name]
            note(__name__, f"request {name}: its load has timed out")
            worker._failed_recv_reqs.put(name)


# If the fix raises, prefill writes nothing, and the decode engine's load times out.
@fix_around(when=lambda worker, request, blocks, registration: _UNTIL in registration, on_fault=_closed.nothing)
def _do_start_push_kv(worker: Any, request_id: str, local_block_ids: Any, registration_data: Any) -> Steps:
    """Begin no write in the prefill worker after the end time of the registration."""
    offset = worker._engine_clock_offset.get(registration_data["decode_engine_id"])
    if offset is None or _nixl.now() < registration_data[_UNTIL] - offset:
        return (yield)  # if the clock offset is unknown, vLLM connects and calls this function again
    if request_id in worker._reqs_to_process:  # otherwise the lease of the request is over
        worker._push_finished_blocks.setdefault(request_id, local_block_ids)  # a later registration needs the blocks
    return None


def shows_bug(hook: Any, module: Any) -> bool:
    """Register a load. With the bug, the registration has no end time."""
    connector = _nixl.scheduler_side()
    hook(connector, _nixl.remote_prefill(8), _nixl.allocated(1), 8)
    known = {
        "request_id", "decode_engine_id", "decode_host", "decode_port", "decode_tp_size", "local_block_ids",
        "remote_engine_id", "remote_host", "remote_port", "remote_tp_size", "remote_pp_size",
    }  # fmt: skip
    return not set(next(iter(connector._push_pending_registrations.values()))) - known


FIX = Fix(
    api.NIXL_PUSH_SCHEDULER.update_state_after_alloc(broken=">=0.32", probe=shows_bug, fix=update_state_after_alloc),
    api.NIXL_PUSH_WORKER.start_load_kv(broken=">=0.32", fix=start_load_kv, helper=True),
    api.NIXL_PUSH_WORKER.get_transfer_results(broken=">=0.32", fix=get_transfer_results, helper=True),
    api.NIXL_PUSH_WORKER._do_start_push_kv(broken=">=0.32", fix=_do_start_push_kv, helper=True),
    effect="hang",
    evidence={
        "KVD688": "", "KVR009": r"^_recving_metadata ", "LAB003": "WAITING_FOR_REMOTE_KVS",
        "LAB020": "of the decode engine",
    },
    scenarios=("nixl-push-never-arrives", "nixl-push-abort-keeps-blocks", "nixl-push-engines-wait-for-each-other"),
    attaches=NEW_REQUESTS,
    no_patch={"vllm": "both engines must agree how long a write may take, so NIXL's messages must change"},
    opt_in=True,
)  # fmt: skip
