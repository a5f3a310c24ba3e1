"""EngineCore dies at the first prompt given as embeddings: LMCache counts token ids, and the request has none.

Symptom: EngineCore dies with `TypeError: object of type 'NoneType' has no len()` in `RequestTracker.from_new_request`.

Cause: `RequestTracker` counts and copies `prompt_token_ids`, which is None for a request with embeddings (0.5.6
vllm_v1_adapter.py:190). The lookup uses `all_token_ids`, which vLLM fills with zeros (vllm/v1/request.py 0.32.0:148).
So all embedding prompts of the same length would share their KV.

Fix: LMCache's keys cannot represent embeddings. So the fix prevents LMCache from looking up, loading or storing KV of
the request. `build_connector_meta` gets a copy of the request in which every token has the id 0.
- Upstream: https://github.com/vllm-project/vllm/issues/42119
- Remove when: LMCache skips requests with embeddings, or includes embeddings in its keys.
"""

import copy

from kvfix.fixes import _closed
from kvfix.fixes.api import LMCACHE_V1, Any, Fix, Steps, Wrapper, after, around, fix_around, instead, stubs


@fix_around(when=lambda impl, request, *_, **__: request.prompt_embeds is not None, on_fault=_closed.no_hit)
def fix_lookup(impl: Any, request: Any, num_computed_tokens: int) -> Any:
    return instead(0)


def fix_metadata(adapter: Any) -> Wrapper:
    def build_connector_meta(impl: Any, scheduler_output: Any) -> Steps:
        requests = scheduler_output.scheduled_new_reqs
        if all(new.prompt_token_ids is not None for new in requests):
            return (yield)
        with_ids = copy.copy(scheduler_output)
        with_ids.scheduled_new_reqs = [_with_zeros(new) if new.prompt_token_ids is None else new for new in requests]
        return (yield (with_ids,))

    def leave_out(impl: Any, metadata: Any, scheduler_output: Any) -> Any:
        names = {new.req_id for new in scheduler_output.scheduled_new_reqs if new.prompt_token_ids is None}
        for name in names:
            impl._request_trackers[name].skip_save = True  # LMCache then stores nothing in later steps either
        if names:
            metadata.requests = [each for each in metadata.requests if each.req_id not in names]
        return metadata

    # If `inside` raises, LMCache gets no ids and raises too. If `outside` raises, `on_fault` drops all saves.
    inside = around(build_connector_meta, when=lambda impl, output, *_, **__: output.scheduled_new_reqs)
    outside = after(leave_out, when=lambda impl, meta, out, *_: out.scheduled_new_reqs, on_fault=_closed.drop_saves)
    return lambda function: outside(inside(function))


def _with_zeros(new_request: Any) -> Any:
    with_ids = copy.copy(new_request)
    embeds = getattr(new_request, "prompt_embeds", None)
    with_ids.prompt_token_ids = [0] * (len(embeds) if embeds is not None else 0)
    return with_ids


def lookup_shows_bug(hook: Any, adapter: Any) -> bool:
    """Look up a prompt of embeddings. The lookup client finds 256 tokens. With the bug, the hook does not return 0."""
    impl = stubs.scheduler_side(lookup_client=stubs.lookup_client(256))
    return bool(hook(impl, stubs.request(300, prompt_token_ids=None, prompt_embeds=[0] * 300), 0) != 0)


def metadata_shows_bug(hook: Any, adapter: Any) -> bool:
    """Schedule a new request without token ids. The bug raises TypeError."""
    blocks = (list(range(20)),)
    new = stubs.request(300, req_id=stubs.NAME, prompt_token_ids=None, prompt_embeds=[0] * 300, block_ids=blocks)
    return stubs.raises(TypeError, hook, stubs.scheduler_side(), stubs.step(300, new=new), text="NoneType")


FIX = Fix(
    LMCACHE_V1.get_num_new_matched_tokens(broken=">=0.3.9", probe=lookup_shows_bug, fix=fix_lookup, order=3),
    LMCACHE_V1.build_connector_meta(broken=">=0.3.9", probe=metadata_shows_bug, fix=fix_metadata, order=2),
    effect="crash",
    evidence={"KVD113": "", "KVR011": "object of type 'NoneType' has no len|'NoneType' object is not"},
    scenarios=("prompt-embeds",),
)
