"""Counters for Prometheus, in the registry that vLLM's own /metrics shows; nothing where there is none.

prometheus_client is used only where vLLM has imported it already. Its multi-process mode (PROMETHEUS_MULTIPROC_DIR),
which vLLM sets for several API servers, collects the counts of EngineCore and workers by itself.
"""

from __future__ import annotations

import sys
from typing import Any

from kvfix import notice

_counters: dict[str, Any] = {}


def violated(rule: str) -> None:
    """One more violation of this rule."""
    _add("kvfix_violations", "Violated invariants of the KV-cache accounting.", rule=rule)


def settled(code: str, verdict: str) -> None:
    """A fix was settled in this process."""
    _add("kvfix_fixes", "Fixes of kvfix by verdict, once for each process.", code=code, verdict=verdict)


def _add(name: str, text: str, **labels: str) -> None:
    client: Any = sys.modules.get("prometheus_client")
    if client is None:
        return
    try:
        if name not in _counters:
            _counters[name] = client.Counter(name, text, list(labels))
        _counters[name].labels(**labels).inc()
    except Exception as error:  # noqa: BLE001
        notice.fault("kvfix.probes.metrics", error)
