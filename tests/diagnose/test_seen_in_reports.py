"""Cases from real reports: two lines of one failure, a failure without a reason, a release known only by a line."""

from __future__ import annotations

import pytest

from kvfix_tools.diagnose import advice
from tests.diagnose.lines import codes, diagnose, version
from tests.diagnose.sign_logs import LMCACHE


def manager(error: str) -> str:
    text = f"Failed to initialize LMCacheManager components: {error}. System will operate in degraded mode (recompute)."
    return LMCACHE.format(level="ERROR", text=text)


def test_a_start_that_failed_without_a_reason_names_the_settings() -> None:
    """str() of an assertion without a text (manager.py 0.4.2:110); with a reason the line says it itself."""
    log = diagnose(manager(""))
    assert codes(log) == ["KVD833"]
    assert "lmcache_worker_ports" in advice.remedy(log, log.findings[0]).now
    assert codes(diagnose(manager("lmcache_worker_ports: one is missing"))) == ["KVD207"]


def test_a_backend_that_does_not_load_is_one_finding_over_two_lines() -> None:
    """The reason is in a separate line. Alone, this line has another cause: a wheel for CUDA on ROCm."""
    head = LMCACHE.format(level="WARNING", text="Failed to import backend lmcache.c_ops:")
    reason = "libcudart.so.13: cannot open shared object file: No such file or directory"
    log = diagnose(head, f"{reason}\n")
    assert codes(log) == ["KVD831"]
    assert "BUILD_WITH_HIP=1" in advice.remedy(log, log.findings[0]).now
    assert codes(
        diagnose(LMCACHE.format(level="WARNING", text=f"Failed to import backend lmcache.c_ops: {reason}"))
    ) == ["KVD831"]
    assert codes(diagnose(f"{reason}\n")) == ["KVD704"]


def test_a_bare_import_error_is_read() -> None:
    assert codes(diagnose("cannot import name 'LMCacheEngineMetadata' from 'lmcache.config'\n")) == ["KVD442"]
    assert codes(diagnose("we cannot import name tags from the registry\n")) == []


@pytest.mark.parametrize("where", ["batched put error", "Remote connection failed in contains"])
def test_a_hash_of_bytes_is_one_finding(where: str) -> None:
    """Whatever the store: the key cannot be written (0.3.12 utils.py, to_string)."""
    error = f"{where}: unsupported format string passed to bytes.__format__"
    log = diagnose(version("0.3.12"), LMCACHE.format(level="WARNING", text=error))
    assert codes(log) == ["KVD739"]
    assert "builtin" in advice.remedy(log, log.findings[0]).now


def test_a_gpu_that_lmcache_counts_otherwise_is_not_a_missing_one() -> None:
    """The same error of vLLM's own code is a container with too few GPUs."""
    error = "RuntimeError: CUDA error: invalid device ordinal"
    frames = '  File "/opt/app/{file}", line 7, in {function}\n    torch.cuda.set_device(rank)\n'
    head = "Traceback (most recent call last):\n"
    in_lmcache = frames.format(file="lmcache/integration/vllm/vllm_v1_adapter.py", function="init_lmcache_engine")
    in_vllm = frames.format(file="vllm/v1/worker/gpu_worker.py", function="init_device")
    assert codes(diagnose(head, in_lmcache, f"{error}\n")) == ["KVD750"]
    assert codes(diagnose(head, in_vllm, f"{error}\n")) == ["KVD242"]


def test_a_layers_key_is_read_from_0_3_14_on() -> None:
    """utils.py, parse_cache_key: 0.3.9.post1 to 0.3.13 look for the layer one part too early."""
    log = diagnose(version("0.3.13"), "ValueError: Invalid key string: vllm@m@1@0@-5d1b@bfloat16@0\n")
    assert codes(log) == ["KVD899"]
    assert "0.3.14" in advice.remedy(log, log.findings[0]).now


def test_a_failed_load_that_vllm_knows_of_was_reported() -> None:
    """Releases from 0.5.5 on report it; which one it is the line does not say."""
    line = "LMCache ERROR: Something went wrong when processing the retrieve request for request_id=r1, result=False\n"
    failing = "ERROR 09-20 10:00:00 [scheduler.py:3043] Failing 1 request(s) due to KV load failure "
    assert "KVD301" in codes(diagnose(line))
    log = diagnose(line, f"{failing}(failure_policy=fail, 6144 tokens affected)\n")
    assert "KVD303" in codes(log)
    assert "KVD301" not in codes(log)
