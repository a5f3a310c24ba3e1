"""EngineCore dies 300 seconds after a restart of the LMCache server: the new server does not know the worker.

Symptom:
- The restarted server logs `non-GPU context not registered (or reaped) for instance ID ...`.
- The engine logs nothing for 300 s, then `TimeoutError: RPC call to execute_model timed out.` and EngineDeadError.
- With LMCache-driven transfer, there are no hits until the engine restarts. The server logs `Rejecting STORE for
  unregistered GPU instance ID`.

Cause: A worker registers again only after an unanswered ping (vllm_multi_process_adapter.py 0.5.6:583-603). No worker
notices a restart between two pings (`lmcache.mp.heartbeat_interval`, 10 s), because a new server answers any ping.

At the worker's next store the new server raises an error, and sends no answer (multiprocess/transport/zmq_impl/mq.py
0.5.6:725). With engine-driven transfer the step waits 300 seconds for an answer (`lmcache.mp.mq_timeout`). vLLM's
timeout for the step is also 300 seconds. Calls that were in flight when the server ended also get no answer.

Fix: When LMCache's client notices a lost connection, the fix ends the calls in flight. Lookups get no hit, and loads
and stores fail. At the next heartbeat the fix marks the worker as unhealthy, so LMCache registers the worker again.
Until then the worker's loads and stores fail, and the engine continues. With gRPC the fix changes nothing.

If only the network was interrupted, the server still knows the worker. The worker's loads still fail until the next
heartbeat. The read locks of these loads stay on the server until the locks time out.
- Releases: LMCache 0.5.6. Earlier releases have no fix, because their client does not notice a lost connection
  (multiprocess/mq.py 0.5.5:281). With these releases, restart the engine together with the server.
- Remove when: A worker registers again after a lost connection, and calls in flight then fail.
"""

from kvfix.fixes import _mp, api
from kvfix.fixes.api import Any, Fix, Steps, View, engine_log, fix_after, fix_around, fix_before, replaced, stubs

#: For each transfer, the answer that makes the transfer fail. Lookups are absent, because a new server answers lookups.
_TRANSFERS = {
    "prepare_store": stubs.Stub(context={}),
    "commit_store": False,
    "prepare_retrieve": stubs.Stub(success=False, data=b"", context={}),
    "commit_retrieve": False,
    "store": (b"", False),
    "retrieve": (b"", False),
}
_WHERE = f"{__name__}.process_outbound_task"
_REGISTRATIONS = ("register_kv_cache", "register_kv_cache_engine_driven_context")


@fix_after()
def fail_in_flight(client: Any, answer: Any) -> None:
    client._kvfix_unregistered = True
    _mp.answer_in_flight(client, {**_TRANSFERS, "lookup": None, "query_prefetch_status": 0})


def _is_unregistered(client: Any) -> bool:
    return getattr(client, "_kvfix_unregistered", False)


@fix_around(when=_is_unregistered)
def hold_transfers(client: Any) -> Steps:
    """Let the transfers in the queue fail. The wrapped function then sends only requests that are no transfers."""
    queue = client.input_queue

    def get_nowait() -> Any:
        while True:
            request = queue.get_nowait()
            if not engine_log.guarded(_WHERE, _is_answered, client, request):
                return request

    with replaced(client, input_queue=View(queue, get_nowait=get_nowait)):
        return (yield)


def _is_answered(client: Any, request: Any) -> bool:
    """Answer the request if it is a transfer of an unregistered worker. Return False if the request must be sent."""
    spec = getattr(request, "rpc_spec", None)  # a control frame of a stream has no rpc_spec
    if spec is not None and spec.operation in _REGISTRATIONS:
        client._kvfix_unregistered = False
    if spec is None or spec.operation not in _TRANSFERS or not client._kvfix_unregistered:
        return False
    request.future.set_result(_TRANSFERS[spec.operation])
    return True


def _is_needed(heartbeat: Any) -> bool:
    """Return True if a worker must register again. The scheduler has no instance ID and registers nothing."""
    client = getattr(heartbeat._req_client, "_message_queue_client", None)
    return heartbeat._instance_id is not None and _is_unregistered(client)


@fix_before(when=_is_needed)
def register_again(heartbeat: Any) -> None:
    heartbeat._health_event.clear()
    engine_log.warning(
        "KVF126: the connection to the LMCache server was lost; the worker registers again. Until the worker "
        "is registered, loads and stores fail, and vLLM computes the tokens of failed loads."
    )


def shows_bug(hook: Any, module: Any) -> bool:
    """Lose the connection while a store is in flight. With the bug, the store gets no answer."""
    return _mp.is_left_unanswered(hook, "prepare_store")


FIX = Fix(
    api.MP_CLIENT.cancel_streams(broken="==0.5.6", probe=shows_bug, fix=fail_in_flight),
    api.MP_CLIENT.process_outbound_task(broken="==0.5.6", fix=hold_transfers, helper=True),
    api.MP_HEARTBEAT._execute(broken="==0.5.6", fix=register_again, helper=True),
    effect="hang",
    proof="tests/runtime/test_server_restart.py, with a real server, because the lab's server answers within the step",
)
