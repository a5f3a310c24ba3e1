"""Wrong text after a late heartbeat: the server runs transfers that the worker dropped, in other requests' blocks.

Symptom: The worker logs `LMCache server is unhealthy — entering degraded mode`, and later `LMCache server is healthy
again`. Running requests then return wrong text with HTTP 200. Later hits also give wrong text, until eviction.

Cause: A worker counts as unhealthy if its ping gets no answer within 10 seconds (`lmcache.mp.heartbeat_interval`,
vllm_multi_process_adapter.py 0.5.6:583). `get_finished` then drops the futures of all transfers, and reports the loads
as failed and the stores as done (0.5.6:2074, 2208). vLLM frees the blocks.

But LMCache does not cancel the transfers. If the server was only slow or paused, the server runs the transfers later. A
late load overwrites the KV of the requests that have the blocks by then. A late store saves the KV of these requests
under wrong keys. After a preemption, an unhealthy worker does not wait for its stores in flight (0.5.6:2403).

Fix: While the worker is unhealthy but connected, `get_finished` reports only transfers that the server has answered.
After a preemption the worker waits for the stores in flight, at most `mq_timeout` for each store.

If the server's process ends, the connection ends too, and the fix reports the transfers in flight as failed. Until the
client is connected again, LMCache works as without the fix. If a server hangs for ever, the blocks of its transfers
stay in use until the server's process ends. With gRPC the fix changes nothing.
- Releases: LMCache 0.5.6. kvfix cannot fix the bug in releases up to 0.5.5 (KVF904).
- Remove when: A worker keeps a transfer until the server has answered or has ended.
"""

from kvfix.fixes import _closed, _mp, api
from kvfix.fixes.api import GO_ON, Any, Fix, Steps, fix_after, fix_around, fix_before, note, replaced, stubs

#: For each operation, the answer (event, success) of a server that has moved no KV.
_FAILED = {"store": (b"", False), "retrieve": (b"", False)}
#: An event that is always set. _SET replaces the worker's event, which is set only while the worker is healthy.
_SET = stubs.Stub(is_set=lambda: True)


def _silent_server_has_transfers(adapter: Any, *_: Any, **__: Any) -> bool:
    if adapter.is_healthy or not (adapter.retrieve_futures or adapter.store_futures):
        return False
    client = getattr(adapter.req_client, "_message_queue_client", None)
    return getattr(client, "_kvfix_connected", False)


def _healthy(adapter: Any, *_: Any, **__: Any) -> Any:
    """Mark the worker as healthy. Until the next missed heartbeat, the worker then waits for its transfers."""
    adapter._health_event.set()
    return GO_ON


@fix_around(when=_silent_server_has_transfers, on_fault=_healthy)
def hold(adapter: Any, *_: Any, **__: Any) -> Steps:
    note(__name__, "the worker waits for transfers of a server that does not answer")
    with replaced(adapter, _health_event=_SET):
        return (yield)


@fix_before(
    when=lambda client: not getattr(client, "_kvfix_connected", False),
    on_fault=_closed.set_to("_kvfix_connected", True),
)
def note_connection(client: Any) -> None:
    client._kvfix_connected = True


# If `fail_transfers` raises, LMCache safely drops the transfers, because a server that has ended writes nothing.
@fix_after(on_fault=_closed.set_to("_kvfix_connected", False))
def fail_transfers(client: Any, answer: Any) -> None:
    client._kvfix_connected = False
    if _mp.answer_in_flight(client, _FAILED):
        note(__name__, "transfers of a server that has ended are reported as failed")


def _unhealthy(module: Any, **more: Any) -> Any:
    """Return a connected worker that missed a heartbeat. Raise LookupError for a client without `MessagingStream`."""
    if not hasattr(module, "MessagingStream"):  # only a client that watches its connection has this class
        raise LookupError("the client does not watch its connection")
    client = stubs.Stub(_message_queue_client=stubs.Stub(_kvfix_connected=True))
    event = stubs.Stub(is_set=lambda: False)
    adapter = module.LMCacheMPWorkerAdapter.__new__(module.LMCacheMPWorkerAdapter)
    vars(adapter).update(vars(_mp.worker_side(_health_event=event, req_client=client, **more)))
    return adapter


def shows_bug(hook: Any, module: Any) -> bool:
    """Start a load that gets no answer. With the bug, the worker reports that the load has ended."""
    future = stubs.Stub(query=lambda: False)
    adapter = _unhealthy(module, lazy_offload=True, retrieve_futures={stubs.NAME: (future, [3, 4])})
    _, loads = _mp.get_finished(hook, adapter)
    return stubs.NAME in loads


def preemption_shows_bug(hook: Any, module: Any) -> bool:
    """Run a step after a preemption, with a store in flight. With the bug, the worker does not wait for the store."""
    context = stubs.Stub(flush_inflight_stores=stubs.Calls(TimeoutError()))
    adapter = _unhealthy(module, transfer_ctx=context, store_futures={stubs.NAME: object()})
    return not stubs.raises(TimeoutError, hook, adapter, True)


def unnoted(hook: Any, module: Any) -> bool:
    """Receive a message without content. Without the fix, nothing records that the client is connected."""
    client = stubs.Stub(socket=stubs.Stub(recv_multipart=list))
    hook(client)
    return not getattr(client, "_kvfix_connected", False)


def unanswered(hook: Any, module: Any) -> bool:
    """Lose the connection while a load is in flight. Without the fix, the load gets no answer."""
    return _mp.is_left_unanswered(hook, "retrieve")


FIX = Fix(
    api.MP_WORKER_ADAPTER.get_finished(broken="==0.5.6", probe=shows_bug, fix=hold),
    api.MP_WORKER_ADAPTER.get_finished_with_lazy_offload(broken="==0.5.6", probe=shows_bug, fix=hold),
    api.MP_WORKER_ADAPTER.handle_preemptions(broken="==0.5.6", probe=preemption_shows_bug, fix=hold, helper=True),
    api.MP_CLIENT.process_inbound(broken="==0.5.6", probe=unnoted, fix=note_connection, helper=True),
    api.MP_CLIENT.cancel_streams(broken="==0.5.6", probe=unanswered, fix=fail_transfers, helper=True),
    effect="wrong output",
    evidence={"KVD204": r"^a ping timed out"},
    scenarios=("mp-load-after-given-up", "mp-store-after-given-up", "mp-preempted-while-silent"),
    no_patch={"lmcache": "to recall or await a transfer, worker and server need a new protocol, not a new function"},
)
