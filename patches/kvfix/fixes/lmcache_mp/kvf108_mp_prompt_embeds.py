"""A prompt given as embeddings gets the KV of another prompt of the same length: LMCache's keys are made of zeros.

Symptom: With `--enable-prompt-embeds`, a request with embeddings returns the text of another request whose embeddings
have the same length. A request whose token ids are all zeros can also return the text of a request with embeddings.

Cause: For a request with embeddings, vLLM sets `all_token_ids` to zeros (v1/request.py 0.32.0:148), and the connector
builds its cache keys from these zeros (lmcache_mp_connector.py 0.5.6:1297).

Fix: For a request with `prompt_embeds`, the fix sends no lookup and returns no hit. The tracker counts all tokens of
the request as stored, so LMCache stores none. vLLM's own prefix cache, which hashes the embeddings, works as before.
- Upstream: https://github.com/vllm-project/vllm/issues/42119 (closed as stale).
- Remove when: The connector distinguishes embeddings from tokens.
"""

from kvfix.fixes import _closed, _mp
from kvfix.fixes.api import GO_ON, LMCACHE_MP, Any, Fix, Steps, Wrapper, around, multi_process, note


def _has_embeddings(connector: Any, request: Any, *_: Any, **__: Any) -> bool:
    return getattr(request, "prompt_embeds", None) is not None  # requests of LMCache's own tests lack the attribute


def fix(module: Any) -> Wrapper:
    def asks(connector: Any, request: Any, num_computed_tokens: int = 0) -> Steps:
        _mp.nothing_cached(connector.scheduler_adapter, request.request_id)
        note(__name__, f"request {request.request_id} has embeddings")
        yield
        tracker = connector.request_trackers.get(request.request_id)
        if tracker is not None:
            _closed.all_is_stored(tracker)

    def without_lookup(connector: Any, request: Any, *_: Any, **__: Any) -> Any:
        if not _has_embeddings(connector, request):
            return GO_ON
        tracker = connector.request_trackers.setdefault(request.request_id, module.LMCacheMPRequestTracker(request))
        _closed.all_is_stored(tracker)
        return 0, False

    return around(asks, when=_has_embeddings, on_fault=without_lookup)


shows_bug, new_request_shows_bug = _mp.looks_up(prompt_embeds=object())

FIX = Fix(
    *multi_process("get_num_new_matched_tokens", shows_bug, fix, order=3),
    LMCACHE_MP.on_new_request(broken=">=0.5.4,<=0.5.6", probe=new_request_shows_bug, fix=fix, order=1),
    effect="wrong output",
    scenarios=("mp-prompt-embeds", "mp-prompt-embeds-in-tree"),
    on_fault="closed",
)
