"""Read kvfix's own state in this process: the applied fixes, and each request's events from the recorder."""

from __future__ import annotations

import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _session() -> Any:
    return getattr(sys.modules.get("kvfix.session"), "session", None)


def kvfix() -> dict[str, Any] | None:
    """Return mode and applied fixes; None if kvfix does nothing in this process."""
    session = _session()
    if session is None or session.config is None:
        return None
    keys = {key for wrapped in list(session.wrapped.values()) for key in list(wrapped._wrappers)}
    version = getattr(sys.modules.get("kvfix.version"), "VERSION", "")
    return {"mode": session.mode, "version": version, "fixes": sorted(key for key in keys if key.startswith("KVF"))}


def by_request() -> dict[str, dict[str, Any]]:
    """Return {request: its state by the recorded events}; {} without a recorder.

    {"asked": computed tokens at the last Asked event, "promised", "granted", "loading": [start, end],
     "loaded": end, "stored": end, "event": name of the last event, "since": seconds since the last event}

    """
    recorder = sys.modules.get("kvfix.connector_events.recorder")
    if recorder is None:
        return {}
    now, found = time.monotonic_ns(), dict[str, "dict[str, Any]"]()
    for entry in recorder.snapshot():
        event, kind = entry.event, type(entry.event).__name__
        row = found.setdefault(event.request, {})
        row["event"], row["since"] = kind, round((now - entry.mono) / 1e9, 3)
        if kind == "Asked":
            row.update(asked=event.computed, promised=event.promised, granted=None, loading=None, loaded=None)
        elif kind == "Granted" and (event.external or not row.get("granted")):
            row["granted"] = event.external
        elif kind == "LoadDue":
            row["loading"] = [event.start, event.end]
        elif kind == "Loaded":
            row.update(loaded=event.end, loading=None)
        elif kind == "Stored":
            row["stored"] = max(event.end, row.get("stored") or 0)
        elif kind in ("Preempted", "LoadFailed"):
            row.update(asked=None, promised=None, granted=None, loading=None, loaded=None)
    return found
