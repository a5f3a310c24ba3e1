"""EngineCore dies when a client disconnects during its load: vLLM frees the request before the second report.

Symptom: EngineCore dies with a bare `AssertionError` at `assert req_id in self.requests` in
`_update_from_kv_xfer_finished`. With `kv_load_failure_policy=fail`, the default, a failed load causes the crash too.
The log then has `Failing 1 request(s) due to KV load failure`, and EngineCore dies in the next step.

Cause: Some connectors keep the blocks of a finished request until the stores are done. If a request is aborted during
its load, the connector reports the end of the load, and the end of the stores. At the first report the scheduler frees
the blocks and deletes the request (scheduler.py 0.32.0:3231, 3235). At the second report, the assertion fails.

If the stores' report comes first, vLLM frees the blocks too early. The load then overwrites KV of other requests.

Fix: For a request that was aborted during its load, vLLM gets only the report of the load. The fix also drops reports
about unknown requests. If a request has not ended, vLLM gets only reports of a load that this request waits for.
- Releases: vLLM 0.11.2 to 0.33.0, with connectors that store asynchronously. Not tested before 0.26.0.
- Upstream: https://github.com/vllm-project/vllm/issues/43226, https://github.com/vllm-project/vllm/pull/56089 (open).
- Remove when: vLLM counts the reports of a finished request.
"""

import copy
import inspect

from kvfix.fixes.api import SCHEDULER, Any, Fix, Steps, fix_around, fix_before, stubs

#: Attribute of a scheduler: requests that have ended while their load was in flight.
_ENDED_LOADING = "_kvfix_ended_loading"


@fix_before(when=lambda scheduler, request, delay_free_blocks=False, *_, **__: delay_free_blocks)
def _free_request(scheduler: Any, request: Any, delay_free_blocks: bool = False) -> None:
    vars(scheduler).setdefault(_ENDED_LOADING, set()).add(request.request_id)


@fix_around(when=lambda scheduler, output, *_, **__: output.finished_recving or output.finished_sending)
def _update_from_kv_xfer_finished(scheduler: Any, output: Any) -> Steps:
    """Pass on only the reports that are due. If a request has two reports, pass on only the report of its load."""
    loaded, stored = output.finished_recving or (), output.finished_sending or ()
    loads = {each for each in loaded if _is_due(scheduler, each, of_load=True)}
    stores = {each for each in stored if each not in loads and _is_due(scheduler, each, of_load=False)}
    if len(loads) == len(loaded) and len(stores) == len(stored):
        return (yield)
    output = copy.copy(output)
    output.finished_recving, output.finished_sending = loads, stores
    return (yield (output,))


def _is_due(scheduler: Any, request_id: str, of_load: bool) -> bool:
    request = scheduler.requests.get(request_id)
    if request is None:
        return False
    if not request.is_finished():
        return of_load and request.status.name == "WAITING_FOR_REMOTE_KVS"
    ended: set[str] = getattr(scheduler, _ENDED_LOADING, set())
    if of_load:
        ended.discard(request_id)
    return request_id not in ended


def shows_bug(hook: Any, module: Any) -> bool:
    """Pass a report about an unknown request to `_update_from_kv_xfer_finished`. The bug raises AssertionError."""
    reads = inspect.unwrap(module.Scheduler._update_from_kv_xfer_finished)
    scheduler = stubs.Stub(connector=None, requests={}, finished_recving_kv_req_ids=set())
    output = stubs.Stub(finished_recving=None, finished_sending={stubs.NAME})
    return stubs.raises(AssertionError, reads, scheduler, output)


FIX = Fix(
    SCHEDULER._free_request(broken=">=0.11.2", probe=shows_bug, fix=_free_request),
    SCHEDULER._update_from_kv_xfer_finished(broken=">=0.11.2", probe=shows_bug, fix=_update_from_kv_xfer_finished),
    effect="crash",
    # If vLLM misses a report, a request waits for ever. So after an error in the fix, vLLM gets all reports.
    on_fault="original",
    evidence={"KVD109": "", "KVD303": "", "KVR011": "^update_from_output: AssertionError"},
    scenarios=("kv-xfer-finished-assert", "kv-xfer-finished-assert-in-tree"),
)
