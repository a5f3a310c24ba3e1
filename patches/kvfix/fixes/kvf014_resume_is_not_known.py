"""A request that comes back from preemption is taken for one that goes on: its load never starts, its stores are wrong.

## Symptom
Nothing is logged. Wrong text in requests that were preempted, and in others that begin with the same tokens.

## Cause
The connector promises a resumed request what LMCache has, vLLM counts it as computed, and no load is started: only new
requests load. And its tracker adds the tokens and blocks of the resume behind those from before the preemption, which
belong to others by now: their KV is stored under its keys (0.3.9 vllm_v1_adapter.py, `build_connector_meta`).

## Fix
A resumed request is promised nothing, and its tracker begins anew with what vLLM has computed and its new blocks.

## Releases
LMCache 0.3.9 to 0.3.9.post2.

## Upstream
None known; 0.3.10 knows of resumed requests.

## Remove when
LMCache 0.3.9.post2 is no longer in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix import probe, step
from kvfix.correction import around, before, instead
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct_lookup(adapter: ModuleType) -> Callable[..., Any]:
    @around
    def get_num_new_matched_tokens(impl: Any, request: Any, num_computed_tokens: int) -> Any:
        return instead(0) if request.request_id in impl._request_trackers else None

    return get_num_new_matched_tokens


def correct_metadata(adapter: ModuleType) -> Callable[..., Any]:
    def build_connector_meta(impl: Any, scheduler_output: Any) -> None:
        for name in step.resumed(scheduler_output):
            tracker, request = impl._request_trackers[name], impl._unfinished_requests[name]
            tracker.token_ids = list(request.all_token_ids[: request.num_computed_tokens])
            tracker.allocated_block_ids = []
            tracker.num_saved_tokens = 0

    return before(build_connector_meta)


def lookup_shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """A request that has been scheduled before asks again. Right, here, is 0: no load would be started."""
    client = probe.lookup_client(256)
    impl = probe.scheduler_side(lookup_client=client, _request_trackers={probe.NAME: object()})
    return bool(hook(impl, probe.request(300), 0) != 0)


def metadata_shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """Resumed with 256 of 512 tokens and 20 new blocks. Wrong is to have the old blocks before them."""
    tracker = adapter.RequestTracker(probe.NAME, 900, [0] * 512, list(range(32)))
    request = probe.request(900, num_computed_tokens=256)
    impl = probe.scheduler_side(_request_trackers={probe.NAME: tracker}, _unfinished_requests={probe.NAME: request})
    hook(impl, probe.step(16, computed=256, blocks=list(range(40, 60)), resumed=True))
    return bool(tracker.allocated_block_ids != list(range(40, 60)))


ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"
FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module=ADAPTER,
            function="LMCacheConnectorV1Impl.get_num_new_matched_tokens",
            broken=">=0.3.9,<0.3.10",
            shows_bug=lookup_shows_bug,
            correct=correct_lookup,
        ),
        Patch(
            dist="lmcache",
            module=ADAPTER,
            function="LMCacheConnectorV1Impl.build_connector_meta",
            broken=">=0.3.9,<0.3.10",
            shows_bug=metadata_shows_bug,
            correct=correct_metadata,
        ),
    ),
)
