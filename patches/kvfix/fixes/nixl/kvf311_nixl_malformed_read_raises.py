"""The decode worker dies: NixlConnector raises while it prepares a read from malformed parameters of a request.

## Symptom
The worker of the decode engine dies with `AssertionError`, `TypeError` or `ValueError` in `start_load_kv`, in
`_read_blocks_for_req` or below. Or the request waits for its load for ever, if the handshake with its peer fails.

## Cause
The parameters come with the request. NixlConnector uses their remote blocks without a check (pull_worker.py
0.32.0:174). Blocks that are not numbers raise in `_compute_desc_ids`, and other values raise elsewhere. NixlConnector
catches only exceptions of NIXL itself (:560).

NixlConnector logs a failed handshake before it reports the failure (base_worker.py 0.32.0:1354). The log line counts
the blocks of each group. If the blocks are one flat list instead of a list for each group, the log line raises in a
callback. The failure is then never reported.

## Fix
If `_read_blocks_for_req` raises, the fix logs the exception and reports the load as failed. vLLM then applies
`kv_load_failure_policy`. If the log line of a failure raises, the fix logs this exception too, and the failure is still
reported.

## Releases
vLLM 0.32.0 and 0.33.0. Earlier releases were not tested.

## Upstream
None known in public: the bug is a security problem (SECURITY.md).

## Remove when
vLLM reports a load with malformed parameters as failed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix import engine_log
from kvfix.acting import note
from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import NIXL_BASE_WORKER, NIXL_PULL_WORKER


def fix(module: ModuleType) -> Callable[..., Any]:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def _read_blocks_for_req(worker: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return function(worker, *args, **kwargs)
            except Exception as error:
                fails, request = getattr(worker, "_handle_failed_transfer", None), args[0] if args else ""
                if fails is None or not isinstance(request, str):
                    raise
                note(__name__, f"request {request}: its load has failed")
                engine_log.warning(f"KVF311: the load of {request} has failed: {type(error).__name__}: {error}")
                return fails(request, None, worker._recv_failures, record_failed_transfer=False)

        return _read_blocks_for_req

    return wrap


def logs_what_it_can(module: ModuleType) -> Callable[..., Any]:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def _log_failure(worker: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return function(worker, *args, **kwargs)
            except TypeError as error:
                note(__name__, "a failed transfer is reported")
                engine_log.warning(f"KVF311: a transfer has failed, and its parameters are malformed: {error}")

        return _log_failure

    return wrap


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A read from a peer that the worker does not know. Wrong is to raise."""
    failed: set[str] = set()
    worker = SimpleNamespace(
        transfer_topo=object(), _invalid_remote_engines=set(), _remote_agents={"p": {}}, _engine_last_active={},
        _bidirectional_kv_xfer_enabled=False, _recving_transfers={}, tp_mappings={}, _recv_failures=failed,
        _handle_failed_transfer=lambda name, *_, **__: failed.add(name), _remote_registration_generations={},
    )  # fmt: skip
    remote = SimpleNamespace(block_ids=[[7]], engine_id="p", request_id=stubs.NAME, registration_generation=0)
    meta = SimpleNamespace(local_block_ids=([1],), remote=remote, local_num_computed_blocks=(0,))
    try:
        hook(worker, stubs.NAME, meta)
    except KeyError:
        return True
    return not failed


FIX = Fix(
    __name__,
    __doc__,
    effect="crash",
    targets=(
        NIXL_PULL_WORKER._read_blocks_for_req(broken=">=0.32", place=1, probe=shows_bug, fix=fix),
        NIXL_BASE_WORKER._log_failure(broken=">=0.32", probe=stubs.cannot_tell, fix=logs_what_it_can, helper=True),
    ),
    evidence={"KVR011": r"^start_load_kv: (AssertionError|TypeError|ValueError|IndexError)"},
    scenarios=("nixl-malformed-read-raises", "nixl-malformed-handshake-fails"),
    no_patch={"vllm": "it can be abused: vLLM's security channel comes before a public patch (SECURITY.md)"},
)
