"""A decode request waits for ever and holds its blocks: prefill's MooncakeConnector omits the request in its answer.

Symptom: A decode request stays in WAITING_FOR_REMOTE_KVS for ever. The prefill engine logs `Request ... expired before
sending on P side.` The decode engine logs nothing.

Cause: If a transfer expires before the prefill engine sends the blocks, the prefill engine drops the transfer. The
prefill engine's answer then lists the decode request neither as done nor as failed (mooncake_connector.py 0.32.0:1628).
The decode engine handles only the requests that the answer lists (process_pulling_result, :2417). The decode engine
closes the connection after the last answer.

Fix: If no answer has listed a request, the fix reports the request as failed after the last answer. Then
kv_load_failure_policy decides whether the decode engine fails the request or computes the prompt.
- Upstream: None known. vLLM 0.33.0 counts a request as failed if the last answer omits the request.
"""

from kvfix.fixes import _mooncake
from kvfix.fixes.api import MOONCAKE_WORKER, Any, Fix, fix_after, note, stubs


@fix_after()
def process_pulling_result(worker: Any, answer: None, response: Any, pull_metas: dict[str, Any]) -> None:
    known = _mooncake.settled(worker)
    known.update(response.ok_reqs or (), response.err_reqs or ())
    if response.status.name == "FINISH":
        missing = [name for name in pull_metas if name not in known]
        if missing:
            note(__name__, f"{len(missing)} loads count as failed: no answer of the prefill engine lists the requests")
            worker._handle_failed_recv(pull_metas, missing, "no answer of the prefill engine lists the request")


def shows_bug(hook: Any, module: Any) -> bool:
    """Receive a last answer that names no request. With the bug, no load counts as failed."""
    failed: list[str] = []
    worker = stubs.Stub(_handle_failed_recv=lambda _, names, reason: failed.extend(names), finished_recving_reqs=set())
    response = stubs.Stub(status=module.MooncakeXferResponseStatus.FINISH, ok_reqs=None, err_reqs=None, err_msg=None)
    hook(worker, response, {"r": stubs.Stub(failed=False, pull_tasks_count=1, local_block_ids=[[1]])})
    return not failed


FIX = Fix(
    MOONCAKE_WORKER.process_pulling_result(broken=">=0.32,<0.33", probe=shows_bug, fix=process_pulling_result),
    effect="hang",
    no_patch={"vllm": "vLLM 0.33.0 does not have this bug"},
)
