"""Requests wait for ever: one bad registration makes NixlPushConnector lose the notices that came with it.

Symptom: With NixlPushConnector the log has `nixl-push-writer error; continuing`. Then leases of unrelated requests end
early, and unrelated requests stay in WAITING_FOR_REMOTE_KVS.

Cause: The push writer thread fetches all waiting notices at once. If one notice makes the thread raise, the later
notices are lost (push_worker.py 0.32.0:279-286). A registration of more blocks than prefill has makes the thread raise.

Fix: The fix logs an exception of `_handle_push_reg_notif`, and the thread continues with the next notice. A request
whose KV could not be written waits until its lease and its registration have ended.
- Releases: vLLM 0.32.0 and 0.33.0. In 0.26.0 the code was read, not tested.
- Remove when: vLLM catches exceptions of a single registration.
"""

from kvfix.fixes import _nixl
from kvfix.fixes.api import NIXL_PUSH_WORKER, Any, Fix, engine_log, fix_calls, note, stubs


@fix_calls
def fix(function: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(worker, *args, **kwargs)
    except Exception as error:
        if not hasattr(worker, "_pending_d_registrations"):
            raise
        note(__name__, "a malformed registration was ignored")
        engine_log.warning(f"KVF325: ignored a malformed registration: {type(error).__name__}: {error}")


def shows_bug(hook: Any, module: Any) -> bool:
    """Handle a registration that cannot be served. The bug raises KeyError."""
    worker = _nixl.worker_side(_do_start_push_kv=lambda *_: set[str]().pop())
    return stubs.raises(KeyError, hook, worker, _nixl.registration(module))


FIX = Fix(NIXL_PUSH_WORKER._handle_push_reg_notif(broken=">=0.26", probe=shows_bug, fix=fix), effect="hang")
