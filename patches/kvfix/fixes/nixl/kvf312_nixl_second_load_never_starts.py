"""A request of a prefill engine waits for ever: NixlConnector promises blocks of a decode engine, but starts no load.

Symptom: A request of a prefill engine stays in WAITING_FOR_REMOTE_KVS and keeps its blocks. With
`bidirectional_kv_xfer` the bug occurs after a preemption, or after a load that failed or was declined (`Declining
expired remote read`). Without this option, the bug affects requests whose parameters name blocks of the previous turn.

Cause: get_num_new_matched_tokens promises `remote_num_tokens` as long as the parameters name remote blocks
(pull_scheduler.py 0.32.0:66-104). But update_state_after_alloc starts the load of a prefill request only with
`bidirectional_kv_xfer`, and only once (`_remote_blocks_processed`, :130-133). If NIXL needs a buffer in host memory,
update_state_after_alloc never starts this load (:126). After a preemption or a failed load, vLLM looks the request up
again, and NixlConnector promises the same blocks again.

Fix: If update_state_after_alloc would start no load, the fix promises 0 tokens, and the request computes its prompt.
- Remove when: Both functions of vLLM check the parameters in the same way.
"""

from kvfix.fixes import _nixl, _prefills
from kvfix.fixes.api import NIXL_PULL_SCHEDULER, Any, Fix, stubs


@_prefills.promise_if
def fix(connector: Any, request: Any) -> bool:
    """Return True if update_state_after_alloc starts a load for this request."""
    params = request.kv_transfer_params
    if connector.use_host_buffer and params.get("do_remote_decode"):
        return False  # update_state_after_alloc saves the request's KV instead (pull_scheduler.py 0.32.0:126)
    if params.get("do_remote_prefill"):
        return True
    return connector.is_bidirectional_kv_xfer_enabled and not params.get("_remote_blocks_processed")


def shows_bug(hook: Any, module: Any) -> bool:
    """Look up the blocks of the previous turn for the second time. With the bug, the blocks are promised again."""
    connector = _nixl.scheduler_side(is_bidirectional_kv_xfer_enabled=True)
    params = {
        "do_remote_decode": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "d", "remote_request_id": "r",
        "remote_host": "d", "remote_port": 1, "remote_num_tokens": 32, "_remote_blocks_processed": True,
    }  # fmt: skip
    return bool(hook(connector, stubs.request(40, kv_transfer_params=params), 0)[0])


FIX = Fix(
    NIXL_PULL_SCHEDULER.get_num_new_matched_tokens(broken=">=0.32", order=2, probe=shows_bug, fix=fix),
    effect="hang",
    evidence={"KVR010": ""},
    scenarios=("nixl-second-load-never-starts", "nixl-turn-without-bidirectional"),
)
