"""A load fails while the next step is under way, and what that step computes on top of it is kept: wrong text.

## Symptom
With asynchronous scheduling or model runner V2, vLLM's defaults on a GPU, and a connector that loads within the step
(LMCache in process). kv_load_failure_policy "recompute": wrong text after `Recovered from KV load failure: 1 request(s)
rescheduled`, a request that stays among `Running` and never ends, or a worker that dies of a token id -1. With either
policy, rarely: wrong text of a request that was preempted when its load failed.

## Cause
A step is scheduled before vLLM knows that a load of the last one has failed, and computes on top of it. vLLM drops what
the failed step has said (scheduler.py 0.32.0:2088), not what the next one says, and `num_output_placeholders` goes on
counting both. The worker takes the last token that it has sampled itself for the request's next one
(gpu_model_runner.py 0.32.0:1846); runner V2 goes on from where it was (gpu/model_runner.py 0.32.0:1244), also without
asynchronous scheduling. And a request that was preempted in between is not looked at: what the failed step has said for
it counts.

## Fix
A request that is taken back is preempted, which drops what is under way in the scheduler and in the worker; when it is
scheduled again it is computed, and not loaded from LMCache. One that vLLM has preempted in between loses what is under
way. Its blocks are the business of KVF203, what LMCache stores of it that of KVF007.

## Releases
vLLM 0.11.2 to 0.32.0 with asynchronous scheduling, without pipeline parallelism; with runner V2 also without it. Runner
V2 has not been run: it needs a GPU.

## Upstream
https://github.com/vllm-project/vllm/issues/45138, https://github.com/vllm-project/vllm/issues/49250,
https://github.com/vllm-project/vllm/pull/45146 (open), https://github.com/vllm-project/vllm/pull/49252 (open),
https://github.com/vllm-project/vllm/pull/53298 (open).

## Remove when
`_update_requests_with_invalid_blocks` resets what is under way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import after, around, instead
from kvfix.fix import Fix, Patch
from kvfix.fixes import _scheduler, _under_way

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(module: ModuleType) -> Callable[..., Any]:
    preempted = module.RequestStatus.PREEMPTED

    def _update_requests_with_invalid_blocks(
        scheduler: Any, answer: Any, requests: Any, invalid_block_ids: Any, *more: Any
    ) -> Any:
        if (more and not more[-1]) or not _is_ahead(scheduler):
            return answer
        not_theirs = [each for each in scheduler.requests.values() if each.status == preempted]
        if getattr(scheduler, "recompute_kv_load_failures", True):  # 0.11 has no other policy
            # One that has not asked since has a connector that does not look: it would load, and fail, for ever.
            taken_back = [each for each in requests if each.request_id in answer[0] and not _is_to_compute(each)]
            for request in reversed(taken_back):
                _preempt(scheduler, request, preempted)
            not_theirs += taken_back
        for request in not_theirs:
            _under_way.drop(scheduler, request)
        return answer

    return after(_update_requests_with_invalid_blocks)


def _is_ahead(scheduler: Any) -> bool:
    """Whether the scheduler, or the worker, goes on from more tokens than a request that is taken back has computed."""
    return scheduler.scheduler_config.async_scheduling or getattr(scheduler, "use_v2_model_runner", False)


def _preempt(scheduler: Any, request: Any, preempted: Any) -> None:
    request._kvfix_compute = True
    scheduler.running.remove(request)
    if hasattr(scheduler, "_preempt_request"):
        scheduler._preempt_request(request, time.monotonic())
    else:  # 0.11
        scheduler.kv_cache_manager.free(request)
        scheduler.encoder_cache_manager.free(request)
        request.status, request.num_computed_tokens = preempted, 0
        request.num_preemptions += 1
        scheduler.waiting.prepend_request(request)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)  # so that the worker is told all of its tokens


def _is_to_compute(request: Any) -> bool:
    return getattr(request, "_kvfix_compute", False)


def correct_lookup(adapter: ModuleType) -> Callable[..., Any]:
    load_spec = adapter.LoadSpec

    def get_num_new_matched_tokens(impl: Any, request: Any, num_computed_tokens: int) -> Any:
        request._kvfix_compute = False
        # a resumed request has to have one that says what it has computed (KVF002)
        impl.load_specs[request.request_id] = load_spec(num_computed_tokens, 0, can_load=False)
        return instead(0)

    return around(get_num_new_matched_tokens, when='getattr(request, "_kvfix_compute", False)')


def shows_bug(hook: Callable[..., Any], scheduler: ModuleType) -> bool:
    """One running request of which two tokens are still to come. Wrong is to go on waiting for both."""
    request = probe.request(32, num_computed_tokens=20, num_cached_tokens=16, num_output_placeholders=2)
    _scheduler.take_back(hook, request)
    return bool(request.num_output_placeholders == 2 and not _is_to_compute(request))


def lookup_is_needed(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """A request that is to be computed is promised what is hit."""
    impl = probe.scheduler_side(lookup_client=probe.lookup_client(256))
    return bool(hook(impl, probe.request(300, _kvfix_compute=True), 0))


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="vllm",
            module=_scheduler.MODULE,
            function=_scheduler.TAKES_BACK,
            broken=">=0.11.2",
            shows_bug=shows_bug,
            correct=correct,
        ),
        Patch(
            dist="vllm",
            module=_scheduler.MODULE,
            function="Scheduler.schedule",
            broken=">=0.11.2,<0.32",
            shows_bug=_under_way.is_needed,
            correct=_under_way.correct_schedule,
            helper=True,
        ),
        Patch(
            dist="vllm",
            module=_scheduler.MODULE,
            function="Scheduler.update_from_output",
            broken=">=0.11.2,<0.32",
            shows_bug=_under_way.is_needed,
            correct=_under_way.correct_output,
            helper=True,
        ),
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_v1_adapter",
            function="LMCacheConnectorV1Impl.get_num_new_matched_tokens",
            broken=">=0.3.10",
            shows_bug=lookup_is_needed,
            correct=correct_lookup,
            helper=True,
        ),
    ),
)
