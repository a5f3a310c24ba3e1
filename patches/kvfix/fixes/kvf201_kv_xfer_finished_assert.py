"""A request aborted while it is loaded is freed at the first report, and vLLM dies of the second.

## Symptom
EngineCore dies with a bare `AssertionError` at `assert req_id in self.requests` in `_update_from_kv_xfer_finished`. Any
client can do it by closing the connection while its prompt is being loaded. With `kv_load_failure_policy=fail`, the
default, a load that fails does it: `Failing 1 request(s) due to KV load failure`, and dead in the next step.

## Cause
A connector that takes over the blocks of a finished request reports two things of one that was aborted while it was
loaded: that the load is done, and that nothing is left to store. At whichever comes first the scheduler frees the
blocks and forgets the request (scheduler.py 0.32.0:3231, 3235); at the second it asserts that it knows it. Where the
store is reported first, the load still writes into blocks that others have by then: their text is wrong, silently.

## Fix
The scheduler notes which requests were aborted while they were loaded. For those only the report of the load frees the
blocks; nothing of them was computed that could still be stored. Reports of requests that it does not know, or that are
neither finished nor waiting, are kept from `_update_from_kv_xfer_finished` too. The connector's own output object stays
as it is.

## Releases
vLLM 0.32.0, with every connector that stores asynchronously.

## Upstream
https://github.com/vllm-project/vllm/issues/43226, https://github.com/vllm-project/vllm/pull/56089 (open).

## Remove when
vLLM counts the reports of a finished request.
"""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix.correction import around, before
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType


def _loading(scheduler: Any) -> set[str]:
    """Requests that have ended while their load was under way."""
    found: set[str] = vars(scheduler).setdefault("_kvfix_ended_loading", set())
    return found


def correct_free(module: ModuleType) -> Callable[..., Any]:
    def _free_request(scheduler: Any, request: Any, delay_free_blocks: bool = False) -> None:
        _loading(scheduler).add(request.request_id)

    return before(_free_request, when="delay_free_blocks")


def correct(module: ModuleType) -> Callable[..., Any]:
    waiting, unfinished = module.RequestStatus.WAITING_FOR_REMOTE_KVS, module.RequestStatus.PREEMPTED

    def _update_from_kv_xfer_finished(scheduler: Any, output: Any) -> Generator[Any, Any, Any] | None:
        if getattr(scheduler, "_kvfix_ended_loading", None):
            return _with_reports(scheduler, output, waiting)
        requests = scheduler.requests
        for each in output.finished_recving or ():
            if each not in requests or requests[each].status is not waiting:
                return _with_reports(scheduler, output, waiting)
        for each in output.finished_sending or ():
            if each not in requests or requests[each].status <= unfinished:
                return _with_reports(scheduler, output, waiting)
        return None  # as it should be

    return around(_update_from_kv_xfer_finished, when="output.finished_recving or output.finished_sending")


def _with_reports(scheduler: Any, output: Any, waiting: Any) -> Generator[Any, Any, Any]:
    """The hook gets those that are due. Of a request with both, the first frees."""
    received = {each for each in output.finished_recving or () if _is_due(scheduler, each, waiting)}
    sent = {each for each in output.finished_sending or () if each not in received and _is_due(scheduler, each, None)}
    output = copy.copy(output)
    output.finished_recving, output.finished_sending = received, sent
    return (yield (output,))


def _is_due(scheduler: Any, request_id: str, waiting: Any) -> bool:
    """Whether the scheduler is to act on this report now. waiting: the status of who waits for a load, if it is one."""
    request = scheduler.requests.get(request_id)
    if request is None:
        return False
    if request.status is waiting:
        return True
    if not request.is_finished():
        return False
    ended = vars(scheduler).get("_kvfix_ended_loading")
    if ended and waiting is not None:
        ended.discard(request_id)
    return not ended or request_id not in ended


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A report of a request that is not there; asked of the function that reads it, whichever of the two this is."""
    reads = inspect.unwrap(module.Scheduler._update_from_kv_xfer_finished)
    scheduler = SimpleNamespace(connector=None, requests={}, finished_recving_kv_req_ids=set())
    try:
        reads(scheduler, SimpleNamespace(finished_recving=None, finished_sending={"kvfix-probe"}))
    except AssertionError:
        return True
    return False


_CORRECTIONS = {
    "_free_request": correct_free,
    "_update_from_kv_xfer_finished": correct,
}
FIX = Fix(
    __name__,
    __doc__,
    patches=tuple(
        Patch("vllm", "vllm.v1.core.sched.scheduler", f"Scheduler.{name}", ">=0.11.2", shows_bug, correction)
        for name, correction in _CORRECTIONS.items()
    ),
)
