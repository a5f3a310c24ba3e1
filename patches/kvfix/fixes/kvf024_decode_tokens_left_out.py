"""With asynchronous scheduling what is generated is left out of `save_decode_cache`, or stored under wrong keys.

## Symptom
Nothing is logged. Wrong text in requests that begin with what another one has generated, as the next turn of a
conversation does.

## Cause
The tracker of a running request adds the tokens from `num_computed_tokens` on (0.4.1 vllm_v1_adapter.py,
`build_connector_meta`). With asynchronous scheduling, vLLM's default on a GPU, the token there is under way and not
known yet: nothing is added, and in the next step the place is one further. Where a token is known in time, since the
request has sat out a step, it is added behind what the tracker has: to the wrong place.

## Fix
Before the step's metadata are made, the tracker gets what is known by now of the tokens that it lacks.

## Releases
LMCache 0.3.10 to 0.4.2.

## Upstream
None known; fixed in 0.4.3, which goes on from where the tracker is.

## Remove when
LMCache 0.4.2 is no longer in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import before
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(adapter: ModuleType) -> Callable[..., Any]:
    def build_connector_meta(impl: Any, scheduler_output: Any) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            has = impl._request_trackers[name].token_ids
            if len(has) < computed:
                has.extend(impl._unfinished_requests[name].all_token_ids[len(has) : computed])

    return before(build_connector_meta, when="impl.config.save_decode_cache")


def shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """The tracker has 512 tokens, 513 are computed, 513 are known. Wrong is to go on without the last."""
    tracker = adapter.RequestTracker(probe.NAME, 512, [0] * 512, list(range(33)))
    request = probe.request(513, num_computed_tokens=513)
    impl = probe.scheduler_side(_request_trackers={probe.NAME: tracker}, _unfinished_requests={probe.NAME: request})
    impl.config.save_decode_cache = True
    hook(impl, probe.step(1, computed=513))
    return len(tracker.token_ids) != 513


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_v1_adapter",
            function="LMCacheConnectorV1Impl.build_connector_meta",
            broken=">=0.3.10,<0.4.3",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
