"""A load failed, the request is to be loaded again: vLLM keeps blocks back for it, from itself, and it never starts.

## Symptom
With `kv_load_failure_policy=recompute` and a connector that loads between steps: after `Recovered from KV load failure:
1 request(s) rescheduled` the request waits for ever with all blocks free. `Running: 0 reqs, Waiting: 1 reqs`. Requests
behind it wait too.

## Cause
A load is admitted only if the free blocks are more than what all prefills in flight still need (scheduler.py
0.32.0:1249), so that loads cannot lock each other out. A request whose load failed with nothing to keep gives its
blocks back (0.32.0:3146) and stays among the prefills in flight: when it asks for its next load, all of its own blocks
are kept back from it. One that needs more than half of the blocks never starts.

## Fix
After `_update_waiting_for_remote_kv`: a request that has nothing computed is in flight no more. Where it is admitted
again it is counted again.

## Releases
vLLM 0.26.0 to 0.32.0.

## Upstream
None known.

## Remove when
vLLM takes a request whose load failed out of `_inflight_prefills`.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix.correction import after
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(module: ModuleType) -> Callable[..., Any]:
    def _update_waiting_for_remote_kv(scheduler: Any, answer: None, request: Any) -> None:
        scheduler._inflight_prefills.discard(request)
        return answer

    return after(_update_waiting_for_remote_kv, when="not request.num_computed_tokens")


class _Request:
    request_id = "kvfix-probe"
    num_computed_tokens = 0
    num_tokens = 100


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A load that failed and left nothing. A scheduler that keeps no list of prefills in flight cannot have the bug."""
    if "_inflight_prefills" not in inspect.unwrap(module.Scheduler.__init__).__code__.co_names:
        return False
    request = _Request()
    scheduler = SimpleNamespace(
        connector=object(),
        failed_recving_kv_req_ids={request.request_id},
        finished_recving_kv_req_ids={request.request_id},
        kv_cache_manager=SimpleNamespace(free=lambda request: None),
        _inflight_prefills={request},
        _mark_prefix_replay=lambda *_, **__: 0,
    )
    hook(scheduler, request)
    return request in scheduler._inflight_prefills


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="vllm",
            module="vllm.v1.core.sched.scheduler",
            function="Scheduler._update_waiting_for_remote_kv",
            broken=">=0.26.0",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
