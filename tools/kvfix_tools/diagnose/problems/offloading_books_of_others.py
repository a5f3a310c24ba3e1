"""Books of the OffloadingConnector that contradict themselves after a failure elsewhere."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_VLLM = "https://github.com/vllm-project/vllm/"
_SCHEDULER = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"

PROBLEMS = (
    Problem(
        code="KVD800",
        name="offload-forgets-a-block-twice",
        severity=Severity.CRASH,
        releases={"vllm": ">=0.21"},
        title="The OffloadingConnector ends a transfer that it has struck off already, and EngineCore dies.",
        shows=(
            Failed(kind="KeyError", within="offloading/scheduler.py:_remove_pending_job"),
            Failed(kind="KeyError", source="self._block_id_to_pending_jobs[bid]", at=_SCHEDULER),
        ),
        sentence="a block of a transfer was struck off twice",
        sure=False,
        cause="It keeps a set of transfers for each block, and strikes off block by block. A block that one transfer "
        "lists twice fails at the second: KV groups that share their blocks (sliding window, MLA models with several "
        "groups or with context parallelism). In 0.21 also after `cannot store blocks`: the tier was full.",
        now="restart without OffloadingConnector (--kv-offloading-size); keeping it: a larger --kv-offloading-size if "
        "`cannot store blocks` stands before it, else --disable-hybrid-kv-cache-manager and no "
        "--decode-context-parallel-size",
        good="vLLM 0.26.0 or newer; SimpleCPUOffloadConnector does not keep such books",
        threads=(_VLLM + "issues/42761",),
    ),
    Problem(
        code="KVD753",
        name="offload-region-not-made",
        severity=Severity.CRASH,
        title="The OffloadingConnector's shared memory was not made, and a second error hides why.",
        shows=(Failed(kind="AttributeError", text="'SharedOffloadRegion' object has no attribute 'mmap_obj'"),),
        sentence="the region is cleaned up that was never mapped",
        sure=False,
        cause="Mapping /dev/shm/vllm_offload_*.mmap failed, and what cleans up afterwards asks for the mapping. The "
        "exception before it, of the same worker, is the reason: /dev/shm is too small, or the ranks are on several "
        "machines (Ray, --nnodes), which this file cannot serve.",
        now="df -h /dev/shm: as large as cpu_bytes_to_use (docker run --shm-size, a Memory emptyDir); all ranks on one "
        "machine; else without TieringOffloadingSpec; restart",
        good="vLLM 0.26.0 or newer, which shows the first error",
        threads=(_VLLM + "issues/44888", _VLLM + "issues/54415"),
    ),
)
