"""The counts of a worker are in the metrics of another process: prometheus_client merges them."""

from tests.conftest import Fresh

COUNT = """
import prometheus_client
from kvfix import metrics
metrics.violated("KVR002")
metrics.violated("KVR002")
metrics.audited(3)
result = None
"""
ANSWER = """
import prometheus_client
from prometheus_client import multiprocess
registry = prometheus_client.CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
result = prometheus_client.generate_latest(registry).decode()
"""
NOT_USED = """
import sys
from kvfix import metrics
metrics.violated("KVR002")
metrics.settled()
result = "prometheus_client" in sys.modules
"""


def test_counts_of_all_processes_are_merged(fresh: Fresh, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for _ in range(2):
        fresh(COUNT, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    found = fresh(ANSWER, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert 'kvfix_violations_total{rule="KVR002"} 4.0' in found
    assert "kvfix_audited_chunks_total 6.0" in found


def test_metrics_do_not_import_prometheus_client(fresh: Fresh) -> None:
    assert fresh(NOT_USED) is False
