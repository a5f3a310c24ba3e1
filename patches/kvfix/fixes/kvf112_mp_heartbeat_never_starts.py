"""After one lookup that timed out the scheduler never asks the server again: its heartbeat never starts.

## Symptom
WARNING `LOOKUP to ... timed out after 300.0s. Marking server as unhealthy.` once, and from then on no external hit,
until vLLM is started again. The line `LMCache server is healthy again` never comes.

## Cause
The list of heartbeats is made as an empty dict (vllm_multi_process_adapter.py 0.5.5:731), and the function that starts
them returns where it is not None (0.5.5:756), which is always.

## Fix
After `_ensure_heartbeat_started`: where the list is empty, the heartbeats are started, as the hook's own unreachable
lines would do it.

## Releases
LMCache 0.5.0 to 0.5.5.

## Upstream
https://github.com/LMCache/LMCache/pull/5233, in 0.5.6.

## Remove when
LMCache 0.5.5 is no longer in use.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix.correction import after
from kvfix.fix import Fix, Patch
from kvfix.fixes import _mp

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(module: ModuleType) -> Callable[..., Any]:
    def _ensure_heartbeat_started(adapter: Any, answer: None) -> None:
        if adapter._heartbeats:
            return answer
        with adapter._heartbeat_lock:
            name = "req_client" if hasattr(adapter, "req_clients") else "mq_client"  # 0.5.5 renamed it
            for url, client in getattr(adapter, f"{name}s").items():
                if url not in adapter._heartbeats:
                    event, interval = adapter._health_events[url], adapter._heartbeat_interval
                    beats = module.HeartbeatThread(**{name: client}, health_event=event, interval=interval)
                    beats.start()
                    adapter._heartbeats[url] = beats
        return answer

    return after(_ensure_heartbeat_started)


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """No server, so no thread. A right one starts from None and leaves the list of what it has started."""
    adapter = SimpleNamespace(_heartbeats=None, _heartbeat_lock=_mp.Lock(), mq_clients={}, req_clients={})
    hook(adapter)
    return adapter._heartbeats is None


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_multi_process_adapter",
            function="LMCacheMPSchedulerAdapter._ensure_heartbeat_started",
            broken=">=0.5.0,<=0.5.5",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
