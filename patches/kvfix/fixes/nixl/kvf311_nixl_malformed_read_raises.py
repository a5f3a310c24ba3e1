"""The decode worker dies: a request has malformed parameters, and NixlConnector raises before it reads remote blocks.

Symptom: The worker of the decode engine dies with `AssertionError`, `TypeError`, `ValueError` or `IndexError` in
`start_load_kv`, inside `_read_blocks_for_req`. Or the handshake with the peer fails and the request waits for ever.

Cause: NixlConnector uses the remote blocks in the request's parameters without a check (pull_worker.py 0.32.0:256). If
block ids are not numbers, `_compute_desc_ids` raises. vLLM catches only exceptions of NIXL (:561). NixlConnector logs a
failed handshake before it reports the failure (base_worker.py 0.32.0:1354). The code of this log line counts the blocks
of each group. If the blocks are one flat list, this code raises, and NixlConnector never reports the failure.

Fix: If `_read_blocks_for_req` raises, the fix logs the exception and reports the load as failed. vLLM then applies
`kv_load_failure_policy`. If the code of the log line raises, the fix catches the error, and vLLM reports the failure.
- Remove when: vLLM reports a load with malformed parameters as failed.
"""

from kvfix.fixes import _nixl
from kvfix.fixes.api import NIXL_BASE_WORKER, NIXL_PULL_WORKER, PRIVATE, Any, Fix, engine_log, fix_calls, note, stubs


@fix_calls
def _read_blocks_for_req(function: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(worker, *args, **kwargs)
    except Exception as error:
        request = args[0] if args else ""
        if not hasattr(worker, "_handle_failed_transfer") or not isinstance(request, str):
            raise
        note(__name__, f"request {request}: its load has failed")
        engine_log.warning(f"KVF311: the load of {request} has failed: {type(error).__name__}: {error}")
        return _nixl.fail_load(worker, request)


@fix_calls
def _log_failure(function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        note(__name__, "a failed transfer is reported")
        engine_log.warning(f"KVF311: a transfer has failed, and its parameters are malformed: {error}")


def shows_bug(hook: Any, module: Any) -> bool:
    """Read from a peer whose TP mapping is unknown. With the bug, the hook raises KeyError or reports no failure."""
    failed, failures = stubs.Calls(), set[str]()
    worker = _nixl.worker_side(_remote_agents={"p": {}}, _recv_failures=failures, _handle_failed_transfer=failed)
    return stubs.raises(KeyError, hook, worker, stubs.NAME, _nixl.load([7], [1])) or not (failed or failures)


FIX = Fix(
    NIXL_PULL_WORKER._read_blocks_for_req(broken=">=0.32", order=1, probe=shows_bug, fix=_read_blocks_for_req),
    NIXL_BASE_WORKER._log_failure(broken=">=0.32", fix=_log_failure, helper=True),
    effect="crash",
    evidence={"KVR011": r"^start_load_kv: (AssertionError|TypeError|ValueError|IndexError)"},
    scenarios=("nixl-malformed-read-raises", "nixl-malformed-handshake-fails"),
    no_patch=PRIVATE,
)
