"""A streaming session returns wrong text with speculative decoding: vLLM never computes the first tokens of an input.

Symptom: Nothing is logged. Connectors store the wrong KV. The bug needs an engine without asynchronous scheduling.

Cause: A step returns the accepted drafts and one more token. If a draft ends the turn, vLLM drops the later tokens
(`_update_request_with_output`, scheduler.py 0.32.0:2508), but `num_computed_tokens` still counts the dropped tokens.
The session continues from this number (:2472). So vLLM never computes the first tokens of the next input.

Fix: When a turn ends, the fix lowers `num_computed_tokens` to the number of tokens before the turn's last token.
- Releases: vLLM 0.15.1 to 0.32.0. With asynchronous scheduling, vLLM already subtracts `num_output_placeholders`.
- Upstream: None known; 0.33.0 does not count dropped tokens (scheduler.py:2762).
"""

from kvfix.fixes import _scheduler
from kvfix.fixes.api import GO_ON, SCHEDULER, Any, Fix, fix_before, note


def _ahead(request: Any) -> int:
    """Return by how many tokens `num_computed_tokens` exceeds the number of tokens before the turn's last token."""
    return int(request.num_computed_tokens - request.num_output_placeholders - (request.num_tokens - 1))


def _limit(scheduler: Any, request: Any, *_: Any, **__: Any) -> Any:
    last = request.num_tokens - 1 + request.num_output_placeholders
    request.num_computed_tokens = min(request.num_computed_tokens, last)
    return GO_ON


@fix_before(when=lambda scheduler, request, *_, **__: request.resumable and _ahead(request) > 0, on_fault=_limit)
def compute_last_again(scheduler: Any, request: Any) -> None:
    note(__name__, f"request {request.request_id}: {_ahead(request)} tokens are computed again")
    request.num_computed_tokens -= _ahead(request)


def shows_bug(hook: Any, module: Any) -> bool:
    """End a turn with 22 tokens, but 24 computed tokens. With the bug, the session continues from token 24."""
    session, _ = _scheduler.end_turn(hook, computed=24)
    return bool(session.num_computed_tokens > 22)


FIX = Fix(
    SCHEDULER._handle_stopped_request(broken=">=0.15.1,<0.33", probe=shows_bug, fix=compute_last_again),
    effect="wrong output",
    no_patch={"vllm": "fixed in 0.33.0"},
)
