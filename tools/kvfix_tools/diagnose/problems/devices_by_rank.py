"""LMCache takes another device than the worker, because it counts ranks where vLLM counts devices."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
#: Functions of LMCache in which a device is chosen.
_CHOOSES = ("init_lmcache_engine", "_init_lmcache_engine", "create_lmcache_metadata", "set_device_for_worker")

PROBLEMS = (
    Problem(
        code="KVD750",
        name="device-counted-by-rank",
        severity=Severity.CRASH,
        title="LMCache uses another GPU than its worker: it takes the worker's rank for the number of a GPU.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="Event device index does not match recording stream's device index",
                through="lmcache/",
            ),
            *(Failed(text="invalid device ordinal", within=name, through="lmcache/") for name in _CHOOSES),
        ),
        sentence="LMCache and the worker are on different GPUs",
        connectors=_IN_PROCESS,
        cause="With data parallelism vLLM gives a worker the GPU after those of the engines before it, and LMCache "
        "counts within its own engine (local_worker_id = parallel_config.rank, utils.py 0.5.6:434). With several "
        "machines LMCache before 0.3.9 counted over all of them, and asked for a GPU that this one does not have.",
        now="one engine for each container or process that sees its own GPUs alone: CUDA_VISIBLE_DEVICES=2,3 vllm "
        "serve... without --data-parallel-size, a load balancer before them; or --data-parallel-backend ray; several "
        "machines: LMCache 0.3.9 or newer",
        good="no release of LMCacheConnectorV1 counts so yet (0.5.6; pull request 3268 was closed): "
        "LMCacheMPConnector for data parallelism",
        threads=(_LMCACHE + "pull/3268", _LMCACHE + "issues/814"),
    ),
)
