"""Steps that are under way and no more a request's own, for releases of vLLM that cannot drop what such a step says.

With asynchronous scheduling a step is scheduled before the output of the last one is there. To 0.26 vLLM drops such an
output only of requests that it preempts all at once (`reset_prefix_cache`), and counts one step for each.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from kvfix.correction import after, before

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

#: Of a scheduler: {request: the first step that is its own again; None until it is scheduled}.
_OWN_FROM = "_kvfix_own_from"
#: Of a scheduler: the step whose output it is handed, if a load failed in it.
_HANDED = "_kvfix_handed"


def drop(scheduler: Any, request: Any) -> None:
    """Nothing of what is under way for this request counts: it is computed again."""
    if hasattr(request, "drop_stale_output"):  # whoever is preempted has its steps marked as stale
        request.drop_stale_output = request.num_stale_output_tokens > 0
    elif request.num_output_placeholders:
        request.num_output_placeholders = 0
        vars(scheduler).setdefault(_OWN_FROM, {})[request.request_id] = None
        handed = getattr(scheduler, _HANDED, None)
        if handed is not None:
            _leave_out(request, handed)


def _leave_out(request: Any, scheduler_output: Any) -> None:
    """vLLM is not told what this step says for the request. Releases that count what is under way count it off."""
    tokens = scheduler_output.num_scheduled_tokens.pop(request.request_id, 0)
    if hasattr(request, "num_in_flight_tokens"):
        request.num_in_flight_tokens -= tokens


def correct_schedule(module: ModuleType) -> Callable[..., Any]:
    def schedule(scheduler: Any, scheduler_output: Any, *_: Any) -> Any:
        own_from = getattr(scheduler, _OWN_FROM)
        for name in own_from.keys() & scheduler_output.num_scheduled_tokens:
            if own_from[name] is None:
                own_from[name] = scheduler_output
        return scheduler_output

    return after(schedule, when=f'getattr(scheduler, "{_OWN_FROM}", None)')


def correct_output(module: ModuleType) -> Callable[..., Any]:
    def update_from_output(scheduler: Any, scheduler_output: Any, *_: Any) -> None:
        setattr(scheduler, _HANDED, scheduler_output)
        own_from = getattr(scheduler, _OWN_FROM, {})
        for name, step in list(own_from.items()):
            if step is scheduler_output or name not in scheduler.requests:
                del own_from[name]
            else:
                _leave_out(scheduler.requests[name], scheduler_output)

    failed = 'getattr(model_runner_output.kv_connector_output, "invalid_block_ids", None)'
    return before(update_from_output, when=f'getattr(scheduler, "{_OWN_FROM}", None) or {failed}')


def is_needed(hook: Callable[..., Any], module: ModuleType) -> bool:
    """Whether this release cannot drop what is under way."""
    return "drop_stale_output" not in inspect.unwrap(module.Request.__init__).__code__.co_names
