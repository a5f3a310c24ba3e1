"""Where older vLLM releases differ from 0.32.0, from 0.11.2 on: asked of the release itself, never of its number."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

#: 0.11 hands sampled tokens on as arrays.
_ARRAYS = "ndarray" in str(ModelRunnerOutput.__annotations__["sampled_token_ids"])


def accepted(made: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this release knows."""
    known = inspect.signature(made).parameters
    return {name: value for name, value in arguments.items() if name in known}


def sampled(tokens: list[list[int]]) -> list[Any]:
    """Sampled tokens per request, as ModelRunnerOutput has them in this release."""
    return [numpy.array(each, dtype=numpy.int64) for each in tokens] if _ARRAYS else tokens


def preempt(scheduler: Scheduler, request: Request, timestamp: float) -> None:
    """Scheduler._preempt_request, which 0.11 has inline in schedule()."""
    if hasattr(scheduler, "_preempt_request"):
        scheduler._preempt_request(request, timestamp)
        return
    scheduler.kv_cache_manager.free(request)
    scheduler.encoder_cache_manager.free(request)
    request.status = RequestStatus.PREEMPTED
    request.num_computed_tokens = 0
    request.num_preemptions += 1
    scheduler.waiting.prepend_request(request)
