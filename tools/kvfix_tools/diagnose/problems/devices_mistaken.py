"""GPUs of another number or another container than LMCache takes them for."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_LMCACHE = "https://github.com/LMCache/LMCache"
_NO_IPC = (
    "LMCACHE_MP_TRANSFER_MODE=engine_driven for vLLM and --supported-transfer-mode auto for the server (LMCache 0.4.7 "
    "or newer), which need no IPC of the GPU"
)

PROBLEMS = (
    Problem(
        code="KVD460",
        name="hip-ipc-between-containers",
        severity=Severity.HANG,
        title="On ROCm the server cannot open the worker's GPU memory: the containers do not share enough.",
        shows=(
            Failed(text="HIP error: invalid device context", within="to_tensor"),
            Failed(text="HIP error: invalid device pointer", within="to_tensor"),
            Failed(text="hipErrorInvalidContext", within="to_tensor"),
            Failed(text="hipErrorInvalidDevicePointer", within="to_tensor"),
        ),
        sentence="an IPC handle of HIP is not valid in the server",
        cause="HIP's handles are valid only where both processes are in the same namespaces. With the IPC namespace "
        "alone it says invalid device context, with IPC and PID invalid device pointer; the network has to be the "
        "host's too.",
        now="docker run --ipc host --pid host --network host for BOTH containers (Kubernetes: hostIPC, hostPID, "
        "hostNetwork: true), lmcache.mp.host tcp://127.0.0.1; or " + _NO_IPC,
        good="both in the host's namespaces, or in one container",
        threads=("https://github.com/ROCm/rocm-aic/pull/88",),
    ),
    Problem(
        code="KVD456",
        name="gpu-chosen-by-global-rank",
        severity=Severity.CRASH,
        title="LMCache takes the rank among all nodes for the number of a GPU of this node.",
        shows=(
            Failed(text="CUDA error: invalid device ordinal", within="vllm_adapter.py:init_lmcache_engine"),
            Failed(text="CUDA error: invalid device ordinal", within="vllm_v1_adapter.py:_init_lmcache_engine"),
        ),
        sentence="a worker of the second node asks for a GPU that is not there",
        releases={"lmcache": "<0.3.9"},
        cause="init_lmcache_engine selects the GPU by parallel_config.rank. On the second node that is as large as the "
        "number of GPUs or larger.",
        now="pip install -U 'lmcache>=0.3.9', which takes the rank modulo the GPUs of the node; until then one node",
        fixed={"lmcache": "0.3.9"},
        threads=(
            f"{_LMCACHE}/issues/814",
            f"{_LMCACHE}/issues/971",
            f"{_LMCACHE}/issues/1346",
            f"{_LMCACHE}/pull/1356",
        ),
    ),
    Problem(
        code="KVD457",
        name="sglang-gpu-chosen-by-global-rank",
        severity=Severity.CRASH,
        title="LMCache in SGLang takes the rank among all nodes for the number of a GPU of this node.",
        shows=(
            Failed(text="CUDA error: invalid device ordinal", within="sglang_adapter.py:global_min_tokens"),
            Failed(text="CUDA error: invalid device ordinal", within="sglang_adapter.py:start_load_kv"),
        ),
        sentence="a worker of the second node asks for a GPU that is not there",
        releases={"lmcache": "<0.3.11"},
        cause="SGLang hands over its global rank, and LMCache's connector makes the device of it: ranks 2 and 3 of two "
        "nodes with two GPUs each do not exist on the second one.",
        now="pip install -U 'lmcache>=0.3.11', which takes the node's own rank; until then one node for each server",
        fixed={"lmcache": "0.3.11"},
        threads=(f"{_LMCACHE}/issues/1988",),
    ),
)
