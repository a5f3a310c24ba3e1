"""A decode engine returns wrong text: NixlPushConnector writes blocks to it after their lease has ended.

Symptom: The prefill engine logs `Releasing expired KV blocks for request ...`; the decode engine logs nothing.

Cause: The prefill worker frees a request's blocks at the end of the lease, even while a write reads the blocks. vLLM
comments: "Expired requests were already reported, even if their WRITEs finish later" (push_worker.py 0.32.0:833).

The writer thread does not check whether the lease is over. After a handshake that took longer than the lease, the
thread writes from blocks that are already free. vLLM does not remove the expired request from `_deferred_push_inbox`,
the queue of writes after a handshake (:249). After the write, a notice tells decode that all blocks have arrived.

Fix: The fix keeps a request's lease until the write is done. No write begins after the lease has ended. If no
write begins, decode waits for the blocks, as after an aborted prefill. With KVF322, decode's load then times out.
- Remove when: vLLM keeps blocks as long as a write reads them.
"""

import threading

from kvfix.fixes import _closed, _nixl
from kvfix.fixes.api import GO_ON, NIXL_BASE_WORKER, NIXL_PUSH_WORKER, Any, Fix, Steps, fix_around, note, stubs

#: The writer thread and the thread that calls `_reap_expired_send_leases` share _BEGINNING and _OVER under this lock.
_lock = threading.Lock()
#: _BEGINNING: a worker's attribute with the requests whose write is starting.
#: _OVER: a worker's attribute with the newest _MOST requests whose lease has ended.
_BEGINNING, _OVER, _MOST = "_kvfix_beginning", "_kvfix_over", 4096


@fix_around(
    when=lambda worker, *_: worker._reqs_to_send and hasattr(worker, "_sending_transfers"),
    # If the fix raises, no lease ends while a write may be in flight.
    on_fault=lambda worker, *_, **__: None if getattr(worker, "_sending_transfers", None) else GO_ON,
)
def _reap_expired_send_leases(worker: Any, done_sending: set[str]) -> Steps:
    """Keep the leases of requests whose blocks a write still reads."""
    with _lock:
        leases = worker._reqs_to_send
        written = set(worker._sending_transfers) | vars(worker).get(_BEGINNING, set())
        kept = {name: leases.pop(name) for name in written & leases.keys()}
        open_before = list(leases)
        now = _nixl.now()
        if any(until <= now for until in kept.values()):
            note(__name__, "blocks that a write still reads are kept after their lease")
        try:
            yield
        finally:
            over = vars(worker).setdefault(_OVER, {})
            over.update(dict.fromkeys(name for name in open_before if name not in leases))
            while len(over) > _MOST:
                del over[next(iter(over))]
            leases.update(kept)


@fix_around(on_fault=_closed.nothing)
def _xfer_blocks_for_req(worker: Any, req_id: str, meta: Any) -> Steps:
    """Begin no write after the end of the lease."""
    with _lock:
        if req_id in vars(worker).get(_OVER, ()):
            return None  # skip the write
        beginning = vars(worker).setdefault(_BEGINNING, set())
        beginning.add(req_id)
    try:
        return (yield)
    finally:
        beginning.discard(req_id)


def shows_bug(hook: Any, module: Any) -> bool:
    """Begin the write of a request whose lease is over. With the bug, the worker connects to the peer."""
    worker = _nixl.worker_side(_sending_transfers_lock=threading.Lock(), **{_OVER: {stubs.NAME: None}})
    return stubs.raises(KeyError, hook, worker, stubs.NAME, stubs.Stub(remote=stubs.Stub(engine_id="d")))


FIX = Fix(
    NIXL_PUSH_WORKER._xfer_blocks_for_req(broken=">=0.32", probe=shows_bug, fix=_xfer_blocks_for_req),
    NIXL_BASE_WORKER._reap_expired_send_leases(broken=">=0.32", fix=_reap_expired_send_leases, helper=True),
    effect="wrong output",
    evidence={"KVR020": "", "KVR021": ""},
    scenarios=("nixl-push-outlives-lease", "nixl-push-begins-after-lease"),
)
