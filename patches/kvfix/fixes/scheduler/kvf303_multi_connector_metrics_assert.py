"""The API server dies: MultiConnector gets statistics of a connector that has no Prometheus metrics.

Symptom: After the first transfer the API server dies with `MooncakeConnector is not contained in the list of registered
connectors with Prometheus metrics support`. The engine's processes stay alive, but no request is answered any more.

Cause: `observe` raises for a connector that has no Prometheus metrics (multi_connector.py 0.32.0:126).

Fix: The fix passes `observe` only the statistics of connectors that have metrics.
- Upstream: https://github.com/vllm-project/vllm/issues/43828; fixed in 0.33.0.
"""

from kvfix.fixes.api import MULTI_CONNECTOR_METRICS, Any, Fix, Steps, fix_around, stubs


@fix_around(when=lambda metrics, statistics, *_: not statistics.keys() <= metrics._prom_metrics.keys())
def observe(metrics: Any, transfer_stats_data: dict[str, Any], *engine: Any) -> Steps:
    known = {name: data for name, data in transfer_stats_data.items() if name in metrics._prom_metrics}
    return (yield (known, *engine))


def shows_bug(hook: Any, module: Any) -> bool:
    """Observe statistics of a connector without metrics. The bug raises AssertionError."""
    return stubs.raises(AssertionError, hook, stubs.Stub(_prom_metrics={}), {"MooncakeConnector": {}}, 0)


FIX = Fix(
    MULTI_CONNECTOR_METRICS.observe(broken="<0.33", probe=shows_bug, fix=observe),
    effect="crash",
    evidence={"KVD517": ""},
    proof="tests/lab/test_promises.py, because the lab has no API server",
    no_patch={"vllm": "vLLM 0.33.0 does not have this bug"},
)
