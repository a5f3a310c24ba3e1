"""InfiniStore, the RDMA store of AIBrix and of LMCache: what its client and its server say."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_TYPE2 = "aibrix_offloading_connector_type2.py"
_AIBRIX = "https://github.com/vllm-project/aibrix/issues"
_DEVICES = (
    "`ibv_devinfo` in the container of both sides, for a device with PORT_ACTIVE; server: --dev-name DEVICE "
    "--link-type Ethernet (or IB) --hint-gid-index -1 (AIBrix: annotation infinistore.kvcache.orchestration.aibrix.ai/"
    'hint-gid-index: "-1"); engine: AIBRIX_KV_CACHE_OL_INFINISTORE_VISIBLE_DEV_LIST=DEVICE or DEVICE:GID_INDEX'
)

PROBLEMS = (
    Problem(
        code="KVD462",
        name="infinistore-gid-not-valid",
        severity=Severity.CRASH,
        title="InfiniStore's client cannot open its RDMA device: there is no address at the GID index it was given.",
        shows=(
            Logged("GID is all zero"),
            Logged("[libinfinistore.cpp:<line>] Failed to open RDMA device"),
            Logged("[rdma.cpp:<line>] Failed to query GID"),
        ),
        sentence="the device has no address at this GID index",
        cause="GID indexes differ between NICs, machines and containers: the one that is right for the server need not "
        "exist here. A pod without the host's network or without an RDMA device plugin has none at all.",
        now=_DEVICES,
        good="no GID index by hand: with -1 InfiniStore looks for the RoCE v2 one of the device",
        sure=False,
        threads=(f"{_AIBRIX}/1091", f"{_AIBRIX}/1171", "https://github.com/bytedance/InfiniStore/pull/176"),
    ),
    Problem(
        code="KVD463",
        name="infinistore-server-dies-at-device",
        severity=Severity.CRASH,
        title="InfiniStore's server dies as it opens its RDMA device.",
        shows=(Logged("[infini] [error] [utils.cpp:<line>] Stacktrace:"),),
        sentence="the server got a signal, mostly SIGSEGV at `open rdma device`",
        cause="Where the line before is `open rdma device`, that device is down or not in the container: the server "
        "reads its port and crashes as it logs that. Without --dev-name it is mlx5_1, the default. A pod needs "
        "rdma/... in its resources, or the host's network and `privileged`.",
        now=_DEVICES,
        good="a device that is up, named in --dev-name; which release says so and does not crash is not known here",
        sure=False,
        threads=(f"{_AIBRIX}/1144", f"{_AIBRIX}/1171", f"{_AIBRIX}/1228"),
    ),
    Problem(
        code="KVD464",
        name="infinistore-memory-not-registered",
        severity=Severity.SLOW,
        title="AIBrix writes to InfiniStore from memory that was not registered for RDMA: no chunk gets there.",
        shows=(Logged("[libinfinistore.cpp:<line>] Please register memory first"),),
        sentence="nothing is written: the memory is not registered",
        cause="Each buffer is registered with the connection once (register_mr). After a connection that failed or was "
        "made anew nothing is registered, and each write is refused with `Failed to write to infinistore, ret = -1`.",
        now="look further up for the first error of [infini] (the device, the connection), repair that, restart the "
        "engine; ulimit -l unlimited in its container",
        good="an engine whose connection to InfiniStore was made without an error at its start",
        sure=False,
        threads=(f"{_AIBRIX}/1093",),
    ),
    Problem(
        code="KVD380",
        name="vineyard-not-reached",
        severity=Severity.CRASH,
        title="AIBrix's vLLM does not reach Vineyard, its KV store.",
        shows=(
            Failed(kind="ConnectionError", text="Failed to connect to vineyard"),
            Logged("Failed to connect to vineyard"),
        ),
        cause="The RPC service of the KVCache resource does not exist yet or has another name than "
        "VINEYARD_RPC_ENDPOINT, or the socket VINEYARD_IPC_SOCKET is not mounted into the pod. vLLM does not wait for "
        "it.",
        now="kubectl get svc,pod -n NAMESPACE | grep kvcache, then VINEYARD_RPC_ENDPOINT=SERVICE:9600 as that prints "
        "it; restart the engine when the store runs",
        good="an AIBrix from 0.3 on, which keeps KV in InfiniStore or HPKV in place of Vineyard",
        threads=(
            "https://github.com/vllm-project/aibrix/issues/696",
            "https://github.com/vllm-project/aibrix/issues/874",
        ),
    ),
    Problem(
        code="KVD1676",
        name="aibrix-type2-loses-count",
        severity=Severity.CRASH,
        title="AIBrix's connector of type 2 dies under load, of a request that has ended or of too many slots.",
        shows=(
            Failed(kind="KeyError", within=f"{_TYPE2}:_start_load_kv"),
            Failed(kind="KeyError", within=f"{_TYPE2}:save_kv_layer"),
            Failed(kind="KeyError", within=f"{_TYPE2}:wait_for_save"),
            Failed(kind="RuntimeError", text="The size of tensor a", within=f"{_TYPE2}:_start_load_kv"),
            Failed(kind="RuntimeError", text="The size of tensor a", within=f"{_TYPE2}:save_kv_layer"),
        ),
        said=(r"AIBrixOffloadingConnectorV1Type2", r"KeyError|RuntimeError|EngineDead|(?i:crash)"),
        cause="KeyError: handles of a batch before are still there, and the request is not in this one. Size of a "
        "tensor: the slots of all requests, rounded up to blocks, are more than max_num_batched_tokens.",
        now="an aibrix_kvcache built with its pull request 2232 (May 2026); until then without this connector, or "
        "LMCacheConnectorV1",
        good="an AIBrix with pull request 2232",
        threads=(f"{_AIBRIX}/2231",),
    ),
)
