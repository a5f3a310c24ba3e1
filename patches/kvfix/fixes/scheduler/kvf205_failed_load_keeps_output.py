"""Wrong text or a dead worker: a load fails while the next step is in flight, and vLLM keeps the output of that step.

Symptom: The bug needs a connector that loads within the step (LMCache in process), and pipeline parallelism,
asynchronous scheduling or model runner V2. Asynchronous scheduling and runner V2 are vLLM's defaults on a GPU.

- With kv_load_failure_policy "recompute", vLLM logs `Recovered from KV load failure: 1 request(s) rescheduled`. Then
  the text is wrong, a request stays among `Running` and never ends, or a worker dies because of a token id -1.
- With either policy, a request may return wrong text if vLLM preempts it before its load fails. This case is rare.

Cause: vLLM schedules a step before it knows that a load of the previous step has failed. The new step reads the blocks
of this load. vLLM drops the output of the failed step (scheduler.py 0.32.0:2088), but not the output of the next steps.
`num_output_placeholders` continues to count the dropped output. With pipeline parallelism several chunks of a prompt
are in flight, and vLLM keeps the output of the last chunk as the request's first token.

The worker uses the last token that it sampled as the next token of the request (gpu_model_runner.py 0.32.0:1848).
Runner V2 keeps its own count of tokens (gpu/model_runner.py 0.32.0:1464), even without asynchronous scheduling. If
vLLM preempts a request before the failure is reported, vLLM also keeps the request's output of the failed step.

Fix: If vLLM resets a request after a failed load, the fix preempts the request. The fix drops the request's outputs in
flight in the scheduler and in the worker. vLLM then computes the request without a load from LMCache. If vLLM has
already preempted the request, the fix only drops the outputs. KVF203 evicts the request's failed blocks, and KVF007
keeps LMCache from storing wrong KV.
- Releases: vLLM 0.11.2 to 0.33.0 with asynchronous scheduling or with runner V2. vLLM 0.32.0 and 0.33.0 with pipeline
  parallelism, which was not tested in earlier releases. The fix was not tested with runner V2, which needs a GPU.
- Upstream: https://github.com/vllm-project/vllm/issues/45138, https://github.com/vllm-project/vllm/issues/49250,
  https://github.com/vllm-project/vllm/pull/45146 (open), https://github.com/vllm-project/vllm/pull/49252 (open),
  https://github.com/vllm-project/vllm/pull/53298 (open).
- Remove when: `_update_requests_with_invalid_blocks` resets the outputs in flight.
"""

import inspect
import time
from collections.abc import Callable
from types import ModuleType

from kvfix.fixes import _closed, _scheduler, api
from kvfix.fixes.api import Any, Fix, after, fix_after, fix_around, fix_before, instead, note, stubs


def fix(module: ModuleType) -> Callable[..., Any]:
    preempted = module.RequestStatus.PREEMPTED
    drops_by_request = not lacks_stale_output(fix, module)

    def drop_outputs(scheduler: Any, answer: Any, requests: Any, invalid_block_ids: Any, *more: Any) -> Any:
        if not _scheduler.is_within_step(*more) or not _is_ahead(scheduler, drops_by_request):
            return answer
        with_stale_output = [each for each in scheduler.requests.values() if each.status == preempted]
        if getattr(scheduler, "recompute_kv_load_failures", True):  # vLLM 0.11 always computes the tokens again
            # Preempt a request only once before its next lookup. Otherwise the fix could preempt the request for ever.
            rolled_back = [each for each in requests if each.request_id in answer[0] and not _is_to_compute(each)]
            for request in reversed(rolled_back):
                _preempt(scheduler, request, preempted)
            with_stale_output += rolled_back
        for request in with_stale_output:
            note(__name__, f"request {request.request_id}: output in flight is dropped")
            _drop(scheduler, request)
        return answer

    return after(drop_outputs, on_fault=_closed.recompute_all)


def _is_ahead(scheduler: Any, of_stages: bool) -> bool:
    """Return True if steps after the failed step may be in flight. of_stages: also check for pipeline parallelism."""
    if scheduler.scheduler_config.async_scheduling or getattr(scheduler, "use_v2_model_runner", False):
        return True
    return of_stages and scheduler.vllm_config.parallel_config.pipeline_parallel_size > 1


def _preempt(scheduler: Any, request: Any, preempted: Any) -> None:
    request._kvfix_compute = True
    if hasattr(scheduler, "_preempt_request"):
        # Keep both calls on one line. Between the calls no queue has the request. Tests make each line of a fix raise.
        _ = scheduler.running.remove(request), scheduler._preempt_request(request, time.monotonic())
    else:  # 0.11
        scheduler.running.remove(request)
        scheduler.kv_cache_manager.free(request)
        scheduler.encoder_cache_manager.free(request)
        request.status, request.num_computed_tokens = preempted, 0
        request.num_preemptions += 1
        scheduler.waiting.prepend_request(request)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)  # so that the worker gets all tokens again


def _is_to_compute(request: Any) -> bool:
    return getattr(request, "_kvfix_compute", False)


def _no_hit(impl: Any, request: Any, *_: Any, **__: Any) -> int:
    impl.load_specs.pop(request.request_id, None)
    return 0


@fix_around(when=lambda impl, request, *_, **__: _is_to_compute(request), on_fault=_no_hit)
def compute(impl: Any, request: Any, num_computed_tokens: int) -> Any:
    request._kvfix_compute = False
    # a resumed request needs a LoadSpec with its computed tokens (KVF002)
    impl.load_specs[request.request_id] = api.LMCACHE_V1.imported.LoadSpec(num_computed_tokens, 0, can_load=False)
    return instead(0)


# Up to 0.26, vLLM can drop outputs in flight only for all running requests together (`reset_prefix_cache`).

#: Name of a scheduler's attribute. It maps a request id to the first step with valid output (None: not known yet).
_VALID_FROM = "_kvfix_valid_from"
#: Name of a scheduler's attribute, the step whose output vLLM handles. Only `fix_output` sets the attribute.
_CURRENT = "_kvfix_current_step"


def _drop(scheduler: Any, request: Any) -> None:
    """Drop all outputs in flight of this request. vLLM computes the tokens again."""
    if hasattr(request, "drop_stale_output"):  # newer vLLM: a preemption marks the steps in flight as stale
        request.drop_stale_output = request.num_stale_output_tokens > 0
    elif request.num_output_placeholders:
        request.num_output_placeholders = 0
        vars(scheduler).setdefault(_VALID_FROM, {})[request.request_id] = None
        current = getattr(scheduler, _CURRENT, None)
        if current is not None:
            _skip_output(request, current)


def _skip_output(request: Any, scheduler_output: Any) -> None:
    """Remove the request from this step. If the release counts tokens in flight, subtract the request's tokens."""
    tokens = scheduler_output.num_scheduled_tokens.pop(request.request_id, 0)
    if hasattr(request, "num_in_flight_tokens"):
        request.num_in_flight_tokens -= tokens


@fix_after(when=lambda scheduler, *_: getattr(scheduler, _VALID_FROM, None))
def fix_schedule(scheduler: Any, scheduler_output: Any, *_: Any) -> None:
    valid_from = getattr(scheduler, _VALID_FROM)
    for name in valid_from.keys() & scheduler_output.num_scheduled_tokens:
        if valid_from[name] is None:
            valid_from[name] = scheduler_output


def _is_ahead_or_failed(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
    failed = getattr(model_runner_output.kv_connector_output, "invalid_block_ids", None)
    return getattr(scheduler, _VALID_FROM, None) or failed


@fix_before(when=_is_ahead_or_failed)
def fix_output(scheduler: Any, scheduler_output: Any, *_: Any) -> None:
    setattr(scheduler, _CURRENT, scheduler_output)
    valid_from = getattr(scheduler, _VALID_FROM, {})
    for name, step in list(valid_from.items()):
        if step is scheduler_output or name not in scheduler.requests:
            del valid_from[name]
        else:
            _skip_output(scheduler.requests[name], scheduler_output)


def lacks_stale_output(hook: Any, module: Any) -> bool:
    """Return True if this release cannot drop the stale output of a step in flight."""
    return "drop_stale_output" not in inspect.unwrap(module.Request.__init__).__code__.co_names


def shows_bug(hook: Any, scheduler: Any) -> bool:
    """Roll back a request that has two tokens in flight. With the bug, the request still waits for both tokens."""
    request = stubs.request(32, num_computed_tokens=20, num_cached_tokens=16, num_output_placeholders=2)
    _scheduler.roll_back(hook, request)
    return bool(request.num_output_placeholders == 2 and not _is_to_compute(request))


def promises(hook: Any, adapter: Any) -> bool:
    """Look up a request that vLLM must compute. Without the fix, the hook promises the hit."""
    impl = stubs.scheduler_side(lookup_client=stubs.lookup_client(256))
    return bool(hook(impl, stubs.request(300, _kvfix_compute=True), 0))


FIX = Fix(
    api.SCHEDULER._update_requests_with_invalid_blocks(broken=">=0.11.2", probe=shows_bug, fix=fix, order=4),
    api.SCHEDULER.schedule(broken=">=0.11.2,<0.32", probe=lacks_stale_output, fix=fix_schedule, order=1, helper=True),
    api.SCHEDULER.update_from_output(broken=">=0.11.2,<0.32", probe=lacks_stale_output, fix=fix_output, helper=True),
    api.LMCACHE_V1.get_num_new_matched_tokens(broken=">=0.3.10", probe=promises, fix=compute, order=6, helper=True),
    effect="wrong output",
    scenarios=("failed-load-keeps-output", "failed-load-keeps-output-of-stages", "failed-load-preempted-under-way"),
    no_patch={
        "vllm": "https://github.com/vllm-project/vllm/pull/49252 and https://github.com/vllm-project/vllm/pull/45146"
        " are open. Both fix the bug in the model runner, which cannot be tested without a GPU"
    },
)
