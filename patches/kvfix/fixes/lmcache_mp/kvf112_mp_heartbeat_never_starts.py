"""After one lookup timeout the scheduler never asks the server again: its heartbeat never starts.

Symptom: The log has WARNING `LOOKUP to ... timed out after 300.0s. Marking server as unhealthy.` once. After this line
there is no external hit until vLLM restarts. The line `LMCache server is healthy again` never comes.

Cause: LMCache creates the collection of heartbeats as an empty dict (vllm_multi_process_adapter.py 0.5.5:731). The
function that starts the heartbeats does nothing if the collection is not None (0.5.5:756). An empty dict is not None.

Fix: If `_ensure_heartbeat_started` has started no heartbeat, the fix starts the heartbeats.
- Upstream: https://github.com/LMCache/LMCache/pull/5233, in 0.5.6.
"""

from contextlib import nullcontext

from kvfix.fixes.api import MP_SCHEDULER_ADAPTER, Any, Fix, fix_after, note, stubs


@fix_after(when=lambda adapter, answer: not adapter._heartbeats)
def fix(adapter: Any, answer: None) -> None:
    note(__name__, "heartbeats are started")
    with adapter._heartbeat_lock:
        name = "req_client" if hasattr(adapter, "req_clients") else "mq_client"  # 0.5.5 renamed the attribute
        for url, client in getattr(adapter, f"{name}s").items():
            if url not in adapter._heartbeats:
                event, interval = adapter._health_events[url], adapter._heartbeat_interval
                thread = MP_SCHEDULER_ADAPTER.imported.HeartbeatThread
                beats = thread(**{name: client}, health_event=event, interval=interval)
                beats.start()
                adapter._heartbeats[url] = beats


def shows_bug(hook: Any, module: Any) -> bool:
    """Start heartbeats for 0 servers. With the bug, `_heartbeats` stays None. Without the bug, `_heartbeats` is {}."""
    adapter = stubs.Stub(_heartbeats=None, _heartbeat_lock=nullcontext(), mq_clients={}, req_clients={})
    hook(adapter)
    return adapter._heartbeats is None


FIX = Fix(
    MP_SCHEDULER_ADAPTER._ensure_heartbeat_started(broken=">=0.5.0,<=0.5.5", probe=shows_bug, fix=fix),
    effect="lost hits",
    evidence={"KVD205": ""},
)
