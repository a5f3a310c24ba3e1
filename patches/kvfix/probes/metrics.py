"""Counters for Prometheus in vLLM's own /metrics, where prometheus_client is in use; else nothing.

What is counted happens in EngineCore and its workers, and /metrics is answered by another process: they are joined by
prometheus_client's multi-process mode, which vLLM reads too (PROMETHEUS_MULTIPROC_DIR, v1/metrics/prometheus.py).
"""

from __future__ import annotations

import sys
from typing import Any

from kvfix import notice, patching

_made: dict[str, Any] = {}
_given_up = False


def violated(rule: str) -> None:
    """kvfix_violations_total: one more violation of this rule."""
    if _given_up:
        return
    try:
        counter = _metric("Counter", "kvfix_violations", "Violated invariants of the KV-cache accounting.", "rule")
        if counter is not None:
            counter.labels(rule=rule).inc()
    except Exception as error:  # noqa: BLE001
        _give_up(error)


def settled() -> None:
    """kvfix_fixes: 1 for each fix and its verdict in some process."""
    from kvfix.fix import catalogue

    if _given_up:
        return
    try:
        more = {"multiprocess_mode": "max"}
        gauge = _metric("Gauge", "kvfix_fixes", "Fixes of kvfix, by their verdict.", "code", "verdict", **more)
        verdicts = patching.settled()
        for fix in catalogue() if gauge is not None else ():
            for patch in fix.patches:
                if patch in verdicts:
                    gauge.labels(code=fix.code, verdict=verdicts[patch].verdict).set(1)
    except Exception as error:  # noqa: BLE001
        _give_up(error)


def _metric(kind: str, name: str, text: str, *labels: str, **more: str) -> Any:
    """None where nobody has imported prometheus_client. A second one of the same name would be refused."""
    client: Any = sys.modules.get("prometheus_client")
    if name not in _made and client is not None:
        _made[name] = getattr(client, kind)(name, text, labels, **more)
    return _made.get(name)


def _give_up(error: Exception) -> None:
    """A client that fails once fails again: it is said once, and left alone."""
    global _given_up
    _given_up = True
    notice.fault("kvfix.probes.metrics", error)
