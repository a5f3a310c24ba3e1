"""A load fails while the next step is under way, and what that step computes on top of it is kept: wrong text.

## Symptom
With asynchronous scheduling, vLLM's default on a GPU, and a connector that loads within the step (LMCache in process).
kv_load_failure_policy "recompute": wrong text after `Recovered from KV load failure: 1 request(s) rescheduled`, or a
request that stays among `Running` and never ends. With either policy, rarely: wrong text in other requests that begin
with the same prompt.

## Cause
A step is scheduled before vLLM knows that a load of the last one has failed, and computes on top of it. vLLM drops what
the failed step has said (scheduler.py 0.32.0:2088), not what the next one says, and `num_output_placeholders` goes on
counting both. A request that is preempted in between is not among those that are taken back, and its blocks stay in the
prefix cache. And what the next step has computed is stored: KVF007 sees to the failed step only.

## Workaround
Start vLLM with `--no-async-scheduling` where loads may fail and kv_load_failure_policy is "recompute". With "fail",
vLLM's default, the request itself ends with an error, and only others are at risk.

## Releases
vLLM 0.11.2 to 0.32.0 with asynchronous scheduling. Shown in the lab on 0.26.0 and 0.32.0.

## Upstream
https://github.com/vllm-project/vllm/issues/45138, https://github.com/vllm-project/vllm/issues/49250,
https://github.com/vllm-project/vllm/pull/45146 (open), https://github.com/vllm-project/vllm/pull/49252 (open).

## Remove when
`_update_requests_with_invalid_blocks` resets what is under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.fix import Fix, Patch
from kvfix.fixes import _scheduler

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def shows_bug(hook: Callable[..., Any], scheduler: ModuleType) -> bool:
    """One running request of which two tokens are still to come. Wrong is to go on waiting for both."""
    request = probe.request(32, num_computed_tokens=20, num_cached_tokens=16, num_output_placeholders=2)
    _scheduler.take_back(hook, request)
    return bool(request.num_output_placeholders == 2)


FIX = Fix(
    __name__,
    __doc__,
    patches=(Patch("vllm", _scheduler.MODULE, _scheduler.TAKES_BACK, ">=0.11.2", shows_bug, None),),
)
