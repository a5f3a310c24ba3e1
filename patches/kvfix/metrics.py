"""Prometheus metrics in vLLM's own /metrics, if prometheus_client is in use.

EngineCore and its workers count events, and another process serves /metrics. prometheus_client's multi-process mode
connects them; vLLM uses it too (PROMETHEUS_MULTIPROC_DIR, v1/metrics/prometheus.py).
"""

import sys
from typing import Any

from kvfix import engine_log
from kvfix.session import session


def violated(rule: str) -> None:
    """Count one violation of this rule in kvfix_violations_total."""
    _count("kvfix_violations", "Violated invariants of the KV-cache accounting.", rule=rule)


def audited(chunks: int) -> None:
    """Count chunks that the audit has compared, in kvfix_audited_chunks_total."""
    _count("kvfix_audited_chunks", "Cached chunks compared with computed KV.", chunks)


def count_of_fix(name: str, text: str, key: str) -> None:
    """Count in this metric, with the code as its label, if the key of the wrapper is the code of a fix (KVF)."""
    if key.startswith("KVF"):
        _count(name, text, code=key)


def _count(name: str, text: str, by: int = 1, **label: str) -> None:
    try:
        counter = _metric("Counter", name, text, *label)
        if counter is not None:
            (counter.labels(**label) if label else counter).inc(by)
    except Exception as error:  # noqa: BLE001
        _give_up(error)


def settled() -> None:
    """Set kvfix_fixes to 1 for each fix and its state in this process, which is the label `verdict`."""
    try:
        from kvfix import catalogue

        more = {"multiprocess_mode": "max"}
        gauge = _metric("Gauge", "kvfix_fixes", "Fixes of kvfix, by their state.", "code", "verdict", **more)
        for fix in catalogue.fixes() if gauge is not None else ():
            for target in fix.targets:
                if target in session.outcomes:
                    gauge.labels(code=fix.code, verdict=session.outcomes[target].state).set(1)
    except Exception as error:  # noqa: BLE001
        _give_up(error)


def _metric(kind: str, name: str, text: str, *labels: str, **more: str) -> Any:
    """Return the metric of this name, created once; None if prometheus_client is not imported or has failed."""
    client: Any = sys.modules.get("prometheus_client")
    if session.metrics is None:
        return None
    if name not in session.metrics and client is not None:
        session.metrics[name] = getattr(client, kind)(name, text, labels, **more)
    return session.metrics.get(name)


def _give_up(error: Exception) -> None:
    """Report the error and stop using the client: a client that fails once fails again."""
    session.metrics = None
    engine_log.fault("kvfix.metrics", error)
