"""Old KV is hit after a weight update: `reset_prefix_cache(reset_connector=True)` does not empty LMCache's cache.

Symptom: Nothing is logged. After an update of the weights, `POST /reset_prefix_cache?reset_external=true` returns HTTP
200, or `LLM.reset_prefix_cache(reset_connector=True)` returns True. Requests then hit KV of the old weights. With debug
logging, vLLM logs `Connector cache reset requested, but ... does not implement reset_cache().`

Cause: LMCache's in-process connector has no `reset_cache` in any release. LMCache's multi-process connector has a
`reset_cache` since 0.5.6, but vLLM's copy of this connector has none. vLLM's base class returns None
(kv_connector/v1/base.py 0.32.0:785-790). `reset_connector_cache` treats None as success (scheduler.py 0.32.0:2898).

Fix: With the fix, the reset returns False if an LMCache connector, alone or in a MultiConnector, has no `reset_cache`.
The fix cannot reach LMCache's cache in other processes, on disk or in a shared store. To empty the cache, do one of:

- With LMCache in process, call `DELETE /cache/clear` of each worker's API server (`internal_api_server_enabled`).
- With LMCache multi-process, call `POST /cache/clear` of the LMCache server.
- Delete LMCache's files on disk and in the shared store, and restart the processes.

Then call `reset_prefix_cache()` without `reset_connector`. This call empties vLLM's own cache.
- Releases: vLLM 0.15.1 to 0.33.0, with LMCache in process, or multi-process (LMCache up to 0.5.5, or vLLM's copy).
- Remove when: LMCache's connectors have a `reset_cache` that empties the cache.
"""

from kvfix.fixes import _closed, _scheduler
from kvfix.fixes.api import SCHEDULER, Any, Fix, engine_log, fix_after, stubs


@fix_after(when=lambda scheduler, answer: answer and keeps_its_cache(scheduler), on_fault=_closed.refuse)
def fix(scheduler: Any, answer: bool) -> bool:
    engine_log.warning(
        "KVF029: reset_prefix_cache returns False, because LMCache's connector cannot empty its cache. The cache may "
        "contain KV of old weights. To empty the cache, follow `kvfix explain KVF029`."
    )
    return False


def keeps_its_cache(scheduler: Any) -> bool:
    """Return True if an LMCache connector has only the `reset_cache` of vLLM's base class."""
    kinds = [kind for kind in map(type, _scheduler.connectors(scheduler)) if kind.__name__.startswith("LMCache")]
    owners = [next((base for base in kind.__mro__ if "reset_cache" in vars(base)), None) for kind in kinds]
    return any(owner is not None and owner.__name__ == "KVConnectorBase_V1" for owner in owners)


def shows_bug(hook: Any, scheduler: Any) -> bool:
    """Reset a connector that has no `reset_cache` of its own. With the bug, the reset does not return False."""
    return hook(stubs.Stub(connector=stubs.Stub(reset_cache=lambda: None), log_stats=False)) is not False


FIX = Fix(
    SCHEDULER.reset_connector_cache(broken=">=0.15.1", probe=shows_bug, fix=fix),
    effect="wrong output",
    scenarios=("reset-keeps-external-cache", "mp-reset-keeps-external-cache", "mp-reset-keeps-external-cache-in-tree"),
    no_patch={
        "vllm": "connectors that have no cache answer None too, and LMCache must design the message that empties the "
        "caches of its workers"
    },
)
