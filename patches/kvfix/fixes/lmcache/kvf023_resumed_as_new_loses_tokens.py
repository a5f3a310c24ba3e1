"""Preempted requests return wrong text with model runner V2: the load of a resumed request misses its generated tokens.

Symptom: Nothing is logged. With vLLM's model runner V2, after preemptions (`Preemptions:` in vLLM's statistics), the
preempted requests return wrong text. Other requests that begin with the same tokens also return wrong text.

Cause: vLLM passes a resumed request to runner V2 as a new one, with all of its tokens in `prefill_token_ids`
(scheduler.py 0.32.0:1418). The lookup covers all these tokens, and vLLM counts the hit as computed. But LMCache's
tracker gets only `prompt_token_ids` (0.5.6 vllm_v1_adapter.py:191). So LMCache does not load the part of a hit after
the prompt. LMCache also stores wrong KV for later tokens, because LMCache reads this KV from the wrong blocks.

Fix: The fix gives the tracker all tokens of the request, as LMCache does with runner V1.
- Releases: LMCache 0.3.9 to 0.5.6 with runner V2, which vLLM 0.32 uses for most models on a GPU. A hit is longer than
  the prompt if `save_decode_cache` or a later turn stored answers. 0.3.9 looks up only prompts, so all loads are right.
- Remove when: `RequestTracker.from_new_request` takes `prefill_token_ids`.
"""

from kvfix.fixes.api import REQUEST_TRACKER, Any, Fix, fix_after, note, stubs


def _found_nowhere(config: Any, tracker: Any, new_request: Any, num_tokens_to_compute: int, *_: Any, **__: Any) -> Any:
    """Give the tracker token ids that match no key, so that the load fails. Store nothing."""
    tracker.token_ids, tracker.skip_save = [-1] * num_tokens_to_compute, True
    return tracker


@fix_after(on_fault=_found_nowhere)
def fix(config: Any, tracker: Any, new_request: Any, num_tokens_to_compute: int, *_: Any) -> None:
    tokens = getattr(new_request, "prefill_token_ids", None)  # exists only with runner V2
    if tokens is not None and len(tracker.token_ids) < num_tokens_to_compute:
        note(__name__, f"request {new_request.req_id}: {num_tokens_to_compute} tokens are passed to the tracker")
        tracker.token_ids = tokens[:num_tokens_to_compute].copy()


def shows_bug(hook: Any, adapter: Any) -> bool:
    """Schedule a prompt of 32 tokens and 16 generated tokens. With the bug, the tracker has only the prompt."""
    new = stubs.Stub(
        req_id=stubs.NAME, prompt_token_ids=[0] * 32, prefill_token_ids=[0] * 48, block_ids=([0, 1, 2],),
        sampling_params=stubs.Stub(extra_args=None), mm_features=[], mm_hashes=[], mm_positions=[],
    )  # fmt: skip
    return len(hook(stubs.Stub(), new, 48, 0, False).token_ids) != 48


FIX = Fix(
    REQUEST_TRACKER.from_new_request(broken=">=0.3.9", probe=shows_bug, fix=fix),
    effect="wrong output",
    evidence={"KVR004": ""},
    # With runner V2 and the fix, LMCache also stores generated tokens that a resumed request computes again.
    changes_healthy=("v1",),
)
