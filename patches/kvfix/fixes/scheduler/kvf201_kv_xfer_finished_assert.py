"""EngineCore dies when a client disconnects during its load: vLLM frees the request at the first of two reports.

## Symptom
EngineCore dies with a bare `AssertionError` at `assert req_id in self.requests` in `_update_from_kv_xfer_finished`. Any
client can cause the crash by disconnecting while its prompt is loading. With `kv_load_failure_policy=fail`, the
default, a failed load causes the crash too. The log then has `Failing 1 request(s) due to KV load failure`, and
EngineCore dies in the next step.

## Cause
A connector that keeps the blocks of a finished request makes two reports about a request that was aborted during its
load. One report says that the load is done, the other that nothing remains to store. At the first report the scheduler
frees the blocks and deletes the request (scheduler.py 0.32.0:3231, 3235). At the second report it asserts that the
request exists.

If the report about the store comes first, the load still writes into blocks that other requests have by then. Those
requests return wrong text, without an error.

## Fix
The scheduler records which requests were aborted during their load. For these requests, only the report of the load
frees the blocks. The aborted requests have computed nothing that could still be stored. The fix also ignores reports
about unknown requests, and about requests that are neither finished nor waiting for a load. The fix does not change the
connector's output object.

## Releases
vLLM 0.11.2 to 0.33.0, with every connector that stores asynchronously. Tested: 0.26.0, 0.32.0 and 0.33.0. For the other
releases the code was read.

## Upstream
https://github.com/vllm-project/vllm/issues/43226, https://github.com/vllm-project/vllm/pull/56089 (open).

## Remove when
vLLM counts the reports of a finished request.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import SCHEDULER
from kvfix.wrapping import around, before

#: Attribute of a scheduler: requests that have ended while their load was in flight.
_ENDED_LOADING = "_kvfix_ended_loading"


def fix_free(module: ModuleType) -> Callable[..., Any]:
    def _free_request(scheduler: Any, request: Any, delay_free_blocks: bool = False) -> None:
        vars(scheduler).setdefault(_ENDED_LOADING, set()).add(request.request_id)

    return before(_free_request, when=lambda scheduler, request, delay_free_blocks=False, *_, **__: delay_free_blocks)


def fix(module: ModuleType) -> Callable[..., Any]:
    waiting, unfinished = module.RequestStatus.WAITING_FOR_REMOTE_KVS, module.RequestStatus.PREEMPTED

    def _update_from_kv_xfer_finished(scheduler: Any, output: Any) -> Generator[Any, Any, Any] | None:
        if getattr(scheduler, _ENDED_LOADING, None):
            return _with_reports(scheduler, output, waiting)
        requests = scheduler.requests
        for each in output.finished_recving or ():
            if each not in requests or requests[each].status is not waiting:
                return _with_reports(scheduler, output, waiting)
        for each in output.finished_sending or ():
            if each not in requests or requests[each].status <= unfinished:
                return _with_reports(scheduler, output, waiting)
        return None  # all reports are right

    return around(
        _update_from_kv_xfer_finished,
        when=lambda scheduler, output, *_, **__: output.finished_recving or output.finished_sending,
    )


def _with_reports(scheduler: Any, output: Any, waiting: Any) -> Generator[Any, Any, Any]:
    """Pass only the reports that are due. If a request has both, the report of the load frees it."""
    received = {each for each in output.finished_recving or () if _is_due(scheduler, each, waiting)}
    sent = {each for each in output.finished_sending or () if each not in received and _is_due(scheduler, each, None)}
    output = copy.copy(output)
    output.finished_recving, output.finished_sending = received, sent
    return (yield (output,))


def _is_due(scheduler: Any, request_id: str, waiting: Any) -> bool:
    """True if the scheduler must handle this report now. waiting: for reports of loads, WAITING_FOR_REMOTE_KVS."""
    request = scheduler.requests.get(request_id)
    if request is None:
        return False
    if request.status is waiting:
        return True
    if not request.is_finished():
        return False
    ended = getattr(scheduler, _ENDED_LOADING, None)
    if ended and waiting is not None:
        ended.discard(request_id)
    return not ended or request_id not in ended


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A report of a request that does not exist. The probe calls the function that reads it, for both targets."""
    reads = inspect.unwrap(module.Scheduler._update_from_kv_xfer_finished)
    scheduler = SimpleNamespace(connector=None, requests={}, finished_recving_kv_req_ids=set())
    return stubs.raises(
        AssertionError, reads, scheduler, SimpleNamespace(finished_recving=None, finished_sending={stubs.NAME})
    )


FIX = Fix(
    __name__,
    __doc__,
    effect="crash",
    targets=(
        SCHEDULER._free_request(broken=">=0.11.2", probe=shows_bug, fix=fix_free),
        SCHEDULER._update_from_kv_xfer_finished(broken=">=0.11.2", probe=shows_bug, fix=fix),
    ),
    # A report that is kept back is a request that waits for ever. After an error the reports are handled as released.
    on_fault="original",
    evidence={"KVD109": "", "KVD303": "", "KVR011": "^update_from_output: AssertionError"},
    scenarios=(
        "kv-xfer-finished-assert",
        "kv-xfer-finished-assert-in-tree",
    ),
)
