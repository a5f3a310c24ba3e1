"""Drop the stale output of steps in flight, for releases of vLLM that cannot do it.

With asynchronous scheduling vLLM schedules a step before it has the output of the last one. A request that is rolled
back or preempted in between must not get the output of the steps in flight. Up to 0.26 vLLM drops such an output only
if it preempts all requests at once (`reset_prefix_cache`). It then assumes that each request has one step in flight.
"""

import inspect
from typing import Any

from kvfix.fixes.api import fix_after, fix_before

#: Attribute of a scheduler: {request: its first step whose output is valid again; None until it is scheduled}.
_VALID_FROM = "_kvfix_valid_from"
#: Attribute of a scheduler: the step whose output it handles now, if a load failed in that step.
_CURRENT = "_kvfix_current_step"


def drop(scheduler: Any, request: Any) -> None:
    """Drop all outputs in flight of this request: it is computed again."""
    if hasattr(request, "drop_stale_output"):  # newer vLLM: a preemption marks the steps in flight as stale
        request.drop_stale_output = request.num_stale_output_tokens > 0
    elif request.num_output_placeholders:
        request.num_output_placeholders = 0
        vars(scheduler).setdefault(_VALID_FROM, {})[request.request_id] = None
        current = getattr(scheduler, _CURRENT, None)
        if current is not None:
            _skip_output(request, current)


def _skip_output(request: Any, scheduler_output: Any) -> None:
    """Remove the request from this step. If the release counts tokens in flight, subtract its tokens."""
    tokens = scheduler_output.num_scheduled_tokens.pop(request.request_id, 0)
    if hasattr(request, "num_in_flight_tokens"):
        request.num_in_flight_tokens -= tokens


@fix_after(when=lambda scheduler, *_: getattr(scheduler, _VALID_FROM, None))
def fix_schedule(scheduler: Any, scheduler_output: Any, *_: Any) -> Any:
    valid_from = getattr(scheduler, _VALID_FROM)
    for name in valid_from.keys() & scheduler_output.num_scheduled_tokens:
        if valid_from[name] is None:
            valid_from[name] = scheduler_output
    return scheduler_output


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


def is_needed(hook: Any, module: Any) -> bool:
    """Return True if this release cannot drop the stale output of a step in flight."""
    return "drop_stale_output" not in inspect.unwrap(module.Request.__init__).__code__.co_names
