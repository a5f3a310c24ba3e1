"""Old KV is hit after a weight update: `reset_cache` answers True while chunks are still in use.

Symptom: Nothing is logged. After an update of the weights, `reset_prefix_cache(reset_running_requests=True,
reset_connector=True)` returns True. Later requests hit KV of the old weights and return wrong text.

Cause: `reset_cache` (0.5.6 lmcache_mp_connector.py:1201) asks the servers to clear the chunks that have no lock, and
returns True. A chunk of a store in flight has a lock. When the store is done, KV of the old weights has a valid key.
The lookup of a waiting request also locks the chunks that it finds. LMCache loads these chunks after the reset.

Fix: `reset_cache` returns False if vLLM still has requests that run, wait, or have ended with a store in flight. Call
`reset_prefix_cache` again when the requests have ended. LMCache never clears the L2 of a server (`--l2-adapter`,
v1/distributed/storage_manager.py:1244-1255), and `reset_cache` does not report this. Empty the L2 yourself.
- Releases: LMCache 0.5.6. Earlier releases and vLLM's copy of the connector have no `reset_cache` (see KVF029).
- Remove when: The server drops chunks that were in use during a reset, as soon as the chunks are free.
"""

from kvfix.fixes import _closed, _scheduler
from kvfix.fixes.api import LMCACHE_MP, SCHEDULER, Any, Fix, fix_after, fix_before, stubs


@fix_after(when=lambda impl, answer: answer, on_fault=_closed.refuse)
def fix(impl: Any, answer: bool) -> bool:
    return answer and not getattr(impl, "_kvfix_requests", 0)


@fix_before(on_fault=_closed.refuse)
def fix_scheduler(scheduler: Any) -> None:
    """Tell the connector how many requests vLLM has. The connector itself does not know the ended requests."""
    for each in _scheduler.connectors(scheduler):
        if hasattr(each, "request_trackers"):
            each._kvfix_requests = len(scheduler.requests)


def shows_bug(hook: Any, connector: Any) -> bool:
    """Reset the connector while a request is open. With the bug, the reset returns True."""
    adapter = stubs.Stub(reset_cache=lambda: True)
    role = connector.KVConnectorRole.SCHEDULER
    impl = stubs.Stub(role=role, scheduler_adapter=adapter, request_trackers={stubs.NAME: None}, _kvfix_requests=1)
    return bool(hook(impl))


FIX = Fix(
    LMCACHE_MP.reset_cache(broken=">=0.5.6", probe=shows_bug, fix=fix),
    SCHEDULER.reset_connector_cache(broken=">=0.15.1", fix=fix_scheduler, helper=True),
    effect="wrong output",
    no_patch={"lmcache": "needs another protocol: after a reset, the server must drop used chunks once they are free"},
)
