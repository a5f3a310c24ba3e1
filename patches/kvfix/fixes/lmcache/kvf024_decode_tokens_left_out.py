"""Wrong text with `save_decode_cache` and asynchronous scheduling: LMCache skips generated tokens or stores wrong KV.

Symptom: Nothing is logged. Requests whose prompts contain earlier answers, as in a conversation, get wrong text.

Cause: In each step, LMCache's tracker of a running request appends the tokens from `num_computed_tokens` on (0.4.1
vllm_v1_adapter.py, `build_connector_meta`). With asynchronous scheduling, vLLM's default on a GPU, the first of these
tokens is not known yet. So the tracker appends nothing, and the next step starts one position later. If vLLM leaves
the request out of a step, the request's next step starts at a known token. The tracker appends this token at a wrong
position.

Fix: Before `build_connector_meta`, the fix appends the known tokens that the tracker lacks.
- Upstream: None known; fixed in 0.4.3, which appends all tokens after the tracker's last token.
"""

from kvfix.fixes import _closed
from kvfix.fixes.api import LMCACHE_V1, NEW_REQUESTS, Any, Fix, fix_before, note, stubs
from kvfix.session import session


@fix_before(when=lambda impl, *_, **__: impl.config.save_decode_cache, on_fault=_closed.save_nothing_more)
def fix(impl: Any, scheduler_output: Any) -> None:
    cached = scheduler_output.scheduled_cached_reqs
    for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        has = impl._request_trackers[name].token_ids
        if len(has) < computed and name not in session.before:
            note(__name__, f"request {name}: added {computed - len(has)} tokens that LMCache left out")
            has.extend(impl._unfinished_requests[name].all_token_ids[len(has) : computed])


def shows_bug(hook: Any, adapter: Any) -> bool:
    """Run a step with 513 computed tokens and 512 tokens in the tracker. With the bug, the last token is not added."""
    impl, tracker = stubs.scheduled(adapter, 513, tracked=512, computed=513)
    impl.config.save_decode_cache = True
    hook(impl, stubs.step(1, computed=513))
    return len(tracker.token_ids) != 513


FIX = Fix(
    LMCACHE_V1.build_connector_meta(broken=">=0.3.10,<0.4.3", probe=shows_bug, fix=fix, order=7),
    effect="wrong output",
    attaches=NEW_REQUESTS,  # the fix cannot add missing tokens in the middle of a tracker
)
