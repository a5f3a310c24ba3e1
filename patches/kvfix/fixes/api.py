"""Everything that the files of the fixes import, for example an `Owner` for each class of vLLM or LMCache to fix.

Objects of vLLM and LMCache have the type `Any`, because their classes differ between releases. `stubs` makes objects
for probes. The decorators turn a function into the `fix` of a target, for example:

@fix_after(when=lambda connector, answer, request, *_: answer[0])
def fix(connector, answer, request, *_): ...
"""

import functools
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

from kvfix import engine_log
from kvfix.fixes import stubs
from kvfix.fixes.record import AT_START, NEW_REQUESTS, PRIVATE, Fix, Fixing, Owner, Probe, Target
from kvfix.metrics import note
from kvfix.wrapping import GO_ON, Function, View, Wrapper, after, around, before, instead, positional, replaced

__all__ = (
    "AT_START", "GO_ON", "NEW_REQUESTS", "PRIVATE", "Any", "Fix", "Fixing", "Function", "Owner", "Probe", "Target",
    "View", "Wrapper", "after", "around", "before", "engine_log", "instead", "note", "positional", "replaced", "stubs",
)  # fmt: skip

#: The return type of a function that `fix_around` decorates.
Steps = Generator[Any, Any, Any]


def _decorator(
    make: Callable[..., Wrapper], only: Function | None = None, when: Function | None = None, **options: Any
) -> Callable[[Function], Fixing]:
    """Return a decorator that turns the code of a fix into the `fix` of a target.

    make: before, after or around. only, when, on_fault: see kvfix.wrapping.
    """
    options["when"] = when if only is None else _both(only, when)

    def decorate(code: Function) -> Fixing:
        def fixing(module: ModuleType) -> Wrapper:
            wrap = make(code, **options)
            vars(wrap)["only"] = only
            return wrap

        vars(fixing)["fails_closed"] = options.get("on_fault") is not None
        return fixing

    return decorate


def _both(only: Function, when: Function | None) -> Function:
    return lambda *given, **named: only(given[0]) and (when is None or when(*given, **named))


#: `@fix_before(when=..., on_fault=...)` decorates code that runs before the fixed function.
fix_before = functools.partial(_decorator, before)
#: `@fix_after(when=..., on_fault=...)` decorates code that runs after the fixed function.
fix_after = functools.partial(_decorator, after)
#: `@fix_around` decorates a generator that runs before and after the fixed function. `answer = yield` calls the fixed
#: function. `yield (arguments,)` passes new arguments. A return before the `yield` skips the fixed function.
fix_around = functools.partial(_decorator, around)


def fix_calls(code: Function) -> Fixing:
    """Decorate code that takes the fixed function and its arguments, and calls the function, e.g. to handle errors."""

    def wrap(function: Function) -> Function:
        return functools.wraps(function)(lambda *args, **kwargs: code(function, *args, **kwargs))

    return lambda module: wrap


# LMCache in vLLM's own processes
LMCACHE_V1 = Owner("lmcache", "lmcache.integration.vllm.vllm_v1_adapter", "LMCacheConnectorV1Impl")
REQUEST_TRACKER = Owner("lmcache", "lmcache.integration.vllm.vllm_v1_adapter", "RequestTracker")
CACHE_ENGINE = Owner("lmcache", "lmcache.v1.cache_engine", "LMCacheEngine")
STORAGE_MANAGER = Owner("lmcache", "lmcache.v1.storage_backend.storage_manager", "StorageManager")
TOKEN_DATABASE = Owner("lmcache", "lmcache.v1.token_database", "TokenDatabase")
TENSOR_MEMORY_OBJ = Owner("lmcache", "lmcache.v1.memory_management", "TensorMemoryObj")
_LOOKUP = "lmcache.v1.lookup_client.lmcache"
LOOKUP_CLIENT = Owner("lmcache", f"{_LOOKUP}_lookup_client", "LMCacheLookupClient", "sockets")
BYPASS_LOOKUP_CLIENT = Owner("lmcache", f"{_LOOKUP}_lookup_client_bypass", "LMCacheBypassLookupClient", "bypass")
ASYNC_LOOKUP_CLIENT = Owner("lmcache", f"{_LOOKUP}_async_lookup_client", "LMCacheAsyncLookupClient")
ZMQ_CLIENT = Owner("lmcache", "lmcache.v1.rpc.zmq_transport", "ZmqReqRepClientTransport")
LOCAL_CPU_BACKEND = Owner("lmcache", "lmcache.v1.storage_backend.local_cpu_backend", "LocalCPUBackend")
LOCAL_DISK_BACKEND = Owner("lmcache", "lmcache.v1.storage_backend.local_disk_backend", "LocalDiskBackend")
GPU_CONNECTOR_V2 = Owner("lmcache", "lmcache.v1.gpu_connector.gpu_connectors", "VLLMPagedMemGPUConnectorV2", "V2")
GPU_CONNECTOR_V3 = Owner("lmcache", "lmcache.v1.gpu_connector.gpu_connectors", "VLLMPagedMemGPUConnectorV3", "V3")

# LMCache's multi-process connectors. For older vLLM, the user selects `_0180` (LMCache 0.4.4 to 0.5.5) or `_0201`
# (0.4.5 to 0.5.5) with `kv_connector_module_path`. vLLM has its own copy of the connector.
_MP = "lmcache.integration.vllm.lmcache_mp_connector"
LMCACHE_MP = Owner("lmcache", _MP, "LMCacheMPConnector", "LMCache")
LMCACHE_MP_0201 = Owner("lmcache", f"{_MP}_0201", "LMCacheMPConnector", "lmcache_mp_connector_0201")
LMCACHE_MP_0180 = Owner("lmcache", f"{_MP}_0180", "LMCacheMPConnector", "lmcache_mp_connector_0180")
_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
VLLM_MP = Owner("vllm", f"{_V1}.lmcache_mp_connector", "LMCacheMPConnectorUpstream", "vLLM")
_MP_ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter"
MP_WORKER_ADAPTER = Owner("lmcache", _MP_ADAPTER, "LMCacheMPWorkerAdapter")
MP_SCHEDULER_ADAPTER = Owner("lmcache", _MP_ADAPTER, "LMCacheMPSchedulerAdapter")
MP_HEARTBEAT = Owner("lmcache", _MP_ADAPTER, "HeartbeatThread")
MP_KV_GROUPS = Owner("lmcache", "lmcache.integration.vllm.kv_cache_groups")
MP_SERVER_TRANSFER = Owner("lmcache", "lmcache.v1.multiprocess.modules.lmcache_driven_transfer")
# The worker's client. Before LMCache 0.5.6, the class was in multiprocess.mq.
MP_CLIENT = Owner("lmcache", "lmcache.v1.multiprocess.transport.zmq_impl.mq", "MessageQueueClient")

# vLLM
SCHEDULER = Owner("vllm", "vllm.v1.core.sched.scheduler", "Scheduler")
_OFFLOADING = f"{_V1}.offloading"
OFFLOADING_SCHEDULER = Owner("vllm", f"{_OFFLOADING}.scheduler", "OffloadingConnectorScheduler")
OFFLOADING_WORKER = Owner("vllm", f"{_OFFLOADING}.worker", "OffloadingConnectorWorker")
OFFLOADING_WORKER_METADATA = Owner("vllm", f"{_OFFLOADING}.common", "OffloadingWorkerMetadata")
OFFLOADING_CONNECTOR = Owner("vllm", f"{_OFFLOADING}_connector", "OffloadingConnector")
OFFLOADING_TIERS = Owner("vllm", "vllm.v1.kv_offload.tiering.manager", "TieringOffloadingManager")
OFFLOADING_P2P = Owner("vllm", "vllm.v1.kv_offload.tiering.p2p.manager", "P2PSecondaryTierManager")
_SIMPLE = "vllm.v1.simple_kv_offload"
SIMPLE_SCHEDULER = Owner("vllm", f"{_SIMPLE}.manager", "SimpleCPUOffloadScheduler")
SIMPLE_WORKER = Owner("vllm", f"{_SIMPLE}.worker", "SimpleCPUOffloadWorker")
SIMPLE_WORKER_METADATA = Owner("vllm", f"{_SIMPLE}.metadata", "SimpleCPUOffloadWorkerMetadata")
SIMPLE_COPIES = Owner("vllm", f"{_SIMPLE}.copy_backend", "DmaCopyBackend")
SIMPLE_DISK = Owner("vllm", f"{_SIMPLE}.disk_backend", "DiskBackend")
_NIXL = f"{_V1}.nixl"
NIXL_PULL_SCHEDULER = Owner("vllm", f"{_NIXL}.pull_scheduler", "NixlPullConnectorScheduler")
NIXL_PUSH_SCHEDULER = Owner("vllm", f"{_NIXL}.push_scheduler", "NixlPushConnectorScheduler")
NIXL_BASE_SCHEDULER = Owner("vllm", f"{_NIXL}.base_scheduler", "NixlBaseConnectorScheduler")
NIXL_BASE_WORKER = Owner("vllm", f"{_NIXL}.base_worker", "NixlBaseConnectorWorker")
NIXL_PULL_WORKER = Owner("vllm", f"{_NIXL}.pull_worker", "NixlPullConnectorWorker")
NIXL_PUSH_WORKER = Owner("vllm", f"{_NIXL}.push_worker", "NixlPushConnectorWorker")
NIXL_SCHEDULER = Owner("vllm", f"{_NIXL}.scheduler", "NixlConnectorScheduler")
NIXL_SCHEDULER_0_15 = Owner("vllm", f"{_NIXL}_connector", "NixlConnectorScheduler")
_MOONCAKE = f"{_V1}.mooncake"
MOONCAKE_SCHEDULER = Owner("vllm", f"{_MOONCAKE}.mooncake_connector", "MooncakeConnectorScheduler")
MOONCAKE_WORKER = Owner("vllm", f"{_MOONCAKE}.mooncake_connector", "MooncakeConnectorWorker")
MOONCAKE_SCHEDULER_0_15 = Owner("vllm", f"{_MOONCAKE}_connector", "MooncakeConnectorScheduler")
MULTI_CONNECTOR_METRICS = Owner("vllm", f"{_V1}.multi_connector", "MultiKVConnectorPromMetrics")
_KV_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
SLIDING_WINDOW_MANAGER = Owner("vllm", _KV_MANAGERS, "SlidingWindowManager", "sliding window")
CHUNKED_LOCAL_MANAGER = Owner("vllm", _KV_MANAGERS, "ChunkedLocalAttentionManager", "chunked local attention")
CONNECTOR_BASE = Owner("vllm", f"{_V1}.base", "KVConnectorBase_V1")


def multi_process(
    function: str,
    probe: Probe,
    fix: Fixing,
    *,
    lmcache: str = ">=0.4.5,<=0.5.6",
    vllm: str = ">=0.26.0",
    for_0201: str = ">=0.4.5",
    for_0180: str = ">=0.4.4",
    order: int = 0,
) -> tuple[Target, ...]:
    """Return one target of this function for each multi-process connector that is broken in some releases."""
    broken = {LMCACHE_MP: lmcache, VLLM_MP: vllm, LMCACHE_MP_0201: for_0201, LMCACHE_MP_0180: for_0180}
    return tuple(
        getattr(owner, function)(broken=releases, probe=probe, fix=fix, order=order)
        for owner, releases in broken.items()
        if releases
    )
