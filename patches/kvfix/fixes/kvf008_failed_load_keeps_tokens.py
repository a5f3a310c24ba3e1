"""After a failed load the tracker keeps tokens that vLLM has taken back: the worker dies when it saves.

## Symptom
A bare `AssertionError` at `assert len(slot_mapping) == len(token_ids)` in `wait_for_save`, and the engine dies, after
lines like `Request ... failed to load 1024 tokens across 64 blocks` and `The number of retrieved tokens is less than
the expected number of tokens! This should not happen!`.

## Cause
When a load fails, vLLM takes the request back to its last good token. The tracker of the connector goes on from where
it was and adds the tokens of the next step behind those it has: more tokens than the request has slots, and others than
it has.

## Fix
Before the step's metadata are made, a tracker that is ahead of vLLM is cut to what vLLM has computed, and nothing of it
counts as saved: what was saved in the step that failed is not known, and a chunk that is in the cache is not stored
twice.

## Releases
LMCache 0.3.9 to 0.3.15.

## Upstream
https://github.com/LMCache/LMCache/issues/2294, https://github.com/LMCache/LMCache/pull/2516; fixed in 0.4.1.

## Remove when
LMCache 0.3.15 is no longer in use.
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
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=False):
            tracker = impl._request_trackers[name]
            if computed < len(tracker.token_ids):
                tracker.token_ids = list(impl._unfinished_requests[name].all_token_ids[:computed])
                tracker.num_saved_tokens = 0

    return before(build_connector_meta)


def shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """512 tokens were to be loaded, vLLM has 256 and computes 16 more. Right is 272 tokens, wrong is 528."""
    tracker = adapter.RequestTracker(probe.NAME, 900, [0] * 512, list(range(32)))
    request = probe.request(900, num_computed_tokens=256)
    hook(
        probe.scheduler_side(_request_trackers={probe.NAME: tracker}, _unfinished_requests={probe.NAME: request}),
        probe.step(16, computed=256),
    )
    return len(tracker.token_ids) != 272


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_v1_adapter",
            function="LMCacheConnectorV1Impl.build_connector_meta",
            broken=">=0.3.9,<0.4.1",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
