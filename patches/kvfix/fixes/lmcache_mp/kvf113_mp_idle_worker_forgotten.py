"""A worker's first load after an idle hour fails: the server drops a worker that has sent no ping.

Symptom: The server logs `Reaped GPU instance ...: silent for 3600.0s (pinged=False)`. At the worker's next request,
the server logs `Rejecting RETRIEVE for unregistered GPU instance ID ...`. Up to 0.5.4 the server logs `No GPU context
registered for instance ID ...` instead, and the request hangs.

Cause: A server drops a worker that sends no ping within `worker_registration_grace_seconds` (multiprocess/config.py
0.5.6:134). A worker starts to ping at its first store or load (vllm_multi_process_adapter.py 0.5.6:1811, 1892).

Fix: The fix starts the worker's heartbeat after `register_kv_caches`.
- Releases: LMCache 0.4.5 to 0.5.6. The server drops workers only since 0.5.0.
- Upstream: https://github.com/LMCache/LMCache/issues/4715 (open).
- Remove when: A worker starts to ping when the worker registers.
"""

import inspect

from kvfix.fixes.api import AT_START, MP_WORKER_ADAPTER, Any, Fix, fix_after, note, stubs


@fix_after()
def fix(adapter: Any, answer: None, *_: Any, **__: Any) -> None:
    note(__name__, "heartbeats are started")
    adapter._ensure_heartbeat_started()


def shows_bug(hook: Any, module: Any) -> bool:
    """Register the worker. With the bug, the heartbeat does not start."""
    start, send = stubs.Calls(), stubs.Calls()
    adapter = stubs.Stub(_send_register_kv_caches_request=send, _ensure_heartbeat_started=start)
    adapter.lmcache_tokens_per_chunk = 256
    # Without layout_hints (an argument since 0.5.5), LMCache reads vLLM's configuration, which a probe lacks.
    hook(adapter, {}, **({"layout_hints": {}} if "layout_hints" in inspect.signature(hook).parameters else {}))
    return not start


FIX = Fix(
    MP_WORKER_ADAPTER.register_kv_caches(broken=">=0.4.5,<=0.5.6", probe=shows_bug, fix=fix),
    effect="lost hits",
    evidence={"KVD210": ""},
    attaches=AT_START,  # the fix acts when the worker registers
)
