"""Each poll of a waiting request counts its hit again as stored: a hole is left, and what follows is unreachable.

## Symptom
No error. The external hit of a prompt never grows past the same token although the prompt is used again and again: the
chunks behind it are stored, the ones before them are not. It happens under pressure, when requests wait for blocks.
Likewise after a miss: what vLLM's own prefix cache held of a prompt is missing from what is stored at its end.

## Cause
`get_num_new_matched_tokens` is asked in every step in which the request waits. Each time it adds the hit to
`num_stored_tokens` (lmcache_mp_connector.py 0.5.5:1148; `num_stored_blocks` in vLLM's copy): after three polls with a
hit of 512 the first store begins at 1536. And where nothing was hit it returns before it notes what vLLM has computed
itself (0.5.5:1143), so the store ends that much too early.

## Fix
After each answer for a request that is not admitted yet: stored is what was hit, and what vLLM has computed is noted.

## Releases
LMCache 0.4.5 to 0.5.5, and 0.4.4 to 0.5.5 with lmcache_mp_connector_0180 and _0201. vLLM 0.26.0 to 0.32.0, its own copy
of the connector.

## Upstream
https://github.com/LMCache/LMCache/issues/4508, fixed in 0.5.6. Open in vLLM's copy.

## Remove when
LMCache 0.5.5 is no longer in use, and vLLM's copy assigns where it adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.correction import after
from kvfix.fix import Fix
from kvfix.fixes import _mp

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(module: ModuleType) -> Callable[..., Any]:
    prefetching = module.LMCacheMPRequestState.PREFETCHING

    def get_num_new_matched_tokens(
        connector: Any, answer: tuple[int | None, bool], request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracker = connector.request_trackers.get(request.request_id)
        if answer[0] is None or tracker is None or tracker.state is not prefetching:
            return answer
        size = _mp.block_size(connector)
        aligned = getattr(connector, "_hit_alignment_tokens", size)
        _mp.set_tokens(tracker, "num_stored", _mp.tokens(tracker, "num_lmcache_hit", size), size)
        _mp.set_tokens(tracker, "num_vllm_hit", num_computed_tokens // aligned * aligned, size)
        return answer

    return after(get_num_new_matched_tokens)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """The report's numbers: a hit of 512, asked twice. Then a miss where vLLM has computed 1024."""
    request = _mp.request()
    connector = _mp.scheduler_side(module, found=512)
    for _ in range(2):
        hook(connector, request, 0)
    stored = _mp.tokens(connector.request_trackers[request.request_id], "num_stored")
    missed = _mp.scheduler_side(module, found=0)
    hook(missed, request, 1024)
    return stored != 512 or _mp.tokens(missed.request_trackers[request.request_id], "num_vllm_hit") != 1024


FIX = Fix(
    __name__,
    __doc__,
    patches=_mp.patches("get_num_new_matched_tokens", shows_bug, correct, lmcache=">=0.4.5,<=0.5.5", vllm=">=0.26.0"),
)
