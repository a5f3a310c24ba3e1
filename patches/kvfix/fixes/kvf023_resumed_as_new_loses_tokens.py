"""A preempted request comes back as a new one, and what it has generated is left out of its load: wrong text, no error.

## Symptom
Nothing is logged. With vLLM's model runner V2, after preemptions (`Preemptions:` in vLLM's statistics), wrong text in
the requests that were preempted, and in others that begin with the same tokens.

## Cause
To runner V2 vLLM hands a resumed request as a new one, with all of its tokens in `prefill_token_ids` (scheduler.py
0.32.0:1418). The lookup asks for all of them too, and vLLM counts the hit as computed. The tracker begins with
`prompt_token_ids` (0.5.6 vllm_v1_adapter.py:191): what is hit beyond the prompt is not loaded, and what follows is
stored with the blocks of other tokens.

## Fix
The tracker begins with all tokens of the request, as with runner V1.

## Releases
LMCache 0.3.9 to 0.5.6 with vLLM's model runner V2, which vLLM 0.32 takes for most models on a GPU. There is a hit
beyond the prompt where generated tokens are stored: `save_decode_cache`, or the next turn of the same conversation.
0.3.9 looks up the prompt only.

## Upstream
None known.

## Remove when
`RequestTracker.from_new_request` takes `prefill_token_ids`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import after
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(adapter: ModuleType) -> Callable[..., Any]:
    def from_new_request(config: Any, tracker: Any, new_request: Any, num_tokens_to_compute: int, *_: Any) -> Any:
        tokens = getattr(new_request, "prefill_token_ids", None)  # only for runner V2
        if tokens is not None and len(tracker.token_ids) < num_tokens_to_compute:
            tracker.token_ids = tokens[:num_tokens_to_compute].copy()
        return tracker

    return after(from_new_request)


def shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """A prompt of 32 tokens, 16 generated ones, all of them to be computed. Wrong is to have those of the prompt."""
    new = SimpleNamespace(
        req_id=probe.NAME, prompt_token_ids=[0] * 32, prefill_token_ids=[0] * 48, block_ids=([0, 1, 2],),
        sampling_params=SimpleNamespace(extra_args=None), mm_features=[], mm_hashes=[], mm_positions=[],
    )  # fmt: skip
    return len(hook(SimpleNamespace(), new, 48, 0, False).token_ids) != 48


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_v1_adapter",
            function="RequestTracker.from_new_request",
            broken=">=0.3.9",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
