"""The decode engine dies: the parameters of a request name the prefill engine by a value that is not a string.

Symptom: EngineCore of the decode engine dies with `TypeError: unhashable type` in `on_new_request`.

Cause: on_new_request uses `remote_engine_id` as a dictionary key, and puts `remote_request_id` into a set
(base_scheduler.py 0.32.0:225, 234). The client can set these values to any type, for example to a list.

Fix: If one of the two values is neither a string nor None, the decode engine loads nothing and computes the prompt.
- Remove when: vLLM checks the types of the parameters.
"""

from kvfix.fixes import _nixl
from kvfix.fixes.api import NIXL_BASE_SCHEDULER, PRIVATE, Any, Fix, fix_before, note, stubs


@fix_before()
def on_new_request(connector: Any, request: Any) -> None:
    params = request.kv_transfer_params or {}
    if not all(isinstance(params.get(key), str | None) for key in ("remote_engine_id", "remote_request_id")):
        note(__name__, f"request {request.request_id} names its peer by a value that is not a string")
        params["do_remote_prefill"] = False


def shows_bug(hook: Any, module: Any) -> bool:
    """Start a request whose engine id is a list. The bug raises TypeError."""
    return stubs.raises(TypeError, hook, _nixl.scheduler_side(), _nixl.remote_prefill(8, remote_engine_id=[]))


FIX = Fix(
    NIXL_BASE_SCHEDULER.on_new_request(broken=">=0.32", probe=shows_bug, fix=on_new_request),
    effect="crash",
    evidence={"KVR011": r"TypeError: (unhashable type|cannot use 'list')"},
    scenarios=("nixl-odd-engine-id",),
    no_patch=PRIVATE,
)
