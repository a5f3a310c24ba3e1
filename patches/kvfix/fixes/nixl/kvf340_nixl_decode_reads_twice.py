"""Wrong text on decode: NixlConnector lets two decode requests read one prefill's blocks, and the first one frees them.

## Symptom
The decode engine logs nothing. The client gets HTTP 200 and text that does not fit the prompt. Prefill logs
`Potentially invalid KV blocks for unrecognized request ... were retrieved by a decode worker`. There are two triggers:

- A router or a client has sent a decode request again with the same kv_transfer_params.
- A request asks for several answers (`n`). Each answer is a request of its own.

## Cause
get_num_new_matched_tokens promises the prompt to every request that names remote blocks (pull_scheduler.py 0.32.0:60).
Prefill frees the blocks when the first read is reported (pull_worker.py 0.32.0:690). Other requests then use the
blocks, and the second decode request reads their KV. Decode's own prefix cache holds whole blocks only, so a hit there
does not help for the last block.

## Fix
In each decode engine, only the first request for a prefill reads the blocks of this prefill. A later request with the
same remote_engine_id and remote_request_id computes its prompt itself, on top of vLLM's prefix cache. It sends prefill
no notice, even when it is aborted. The fix does not know which blocks another decode engine has read. So a router that
retries a request must send it to the prefill engine first.

## Releases
vLLM 0.20 to 0.33.0.

## Upstream
None known.

## Remove when
Prefill refuses the second read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.fixes import _closed, _prefills, stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import NIXL_BASE_SCHEDULER, NIXL_PULL_SCHEDULER, NIXL_SCHEDULER
from kvfix.wrapping import before


def _fix(module: ModuleType) -> Callable[..., Any]:
    return _prefills.promise_if(_reads)


def _arrives(module: ModuleType) -> Callable[..., Any]:
    return before(
        lambda connector, request: not _reads(connector, request),
        when=lambda connector, request: connector._TRANSFER_MODE == "pull" and _prefills.is_to_load(request),
        on_fault=_closed.compute_new,
    )


def _reads(connector: Any, request: Any) -> bool:
    """True if this request may read its prefill's blocks. Otherwise it computes its prompt."""
    params = request.kv_transfer_params
    prefill = params.get("remote_engine_id"), params.get("remote_request_id")
    return None in prefill or _prefills.loads(connector, prefill, request)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """Two requests for one prefill. Wrong is to promise its tokens to both."""
    connector = SimpleNamespace(_get_remote_prefill_token_count=lambda tokens: tokens, kv_recompute_threshold=0)
    params = {
        "do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "p", "remote_request_id": "r",
        "remote_host": "h", "remote_port": 1,
    }  # fmt: skip
    requests = [stubs.request(32, kv_transfer_params=dict(params), request_id=name) for name in ("a", "b")]
    return all(hook(connector, request, 0)[0] for request in requests)


FIX = Fix(
    __name__,
    __doc__,
    effect="wrong output",
    targets=(
        NIXL_SCHEDULER.get_num_new_matched_tokens(broken=">=0.20,<0.26", probe=shows_bug, fix=_fix, place=1),
        NIXL_PULL_SCHEDULER.get_num_new_matched_tokens(broken=">=0.26", probe=shows_bug, fix=_fix, place=1),
        NIXL_BASE_SCHEDULER.on_new_request(
            broken=">=0.32", probe=stubs.cannot_tell, fix=_arrives, place=-1, helper=True
        ),
    ),
    evidence={"KVR018": ""},
    scenarios=("nixl-lease-read-twice", "nixl-second-reader-aborted"),
    no_patch={"vllm": "prefill has to refuse the second read, which takes a change of NIXL's messages"},
    on_fault="closed",
)
