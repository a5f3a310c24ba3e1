"""NVIDIA Dynamo's KV block manager (KVBM) and its connectors in vLLM: start, leader and workers, other releases."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem

_DYNAMO = "https://github.com/ai-dynamo/dynamo/"

PROBLEMS = (
    Problem(
        code="KVD031",
        name="kvbm-workers-do-not-answer",
        severity=Severity.HANG,
        title="KVBM's leader waits for its workers, and the engine does not come up.",
        shows=(
            Logged("ZmqActiveMessageLeader: Ping timed out"),
            Logged("Handshake: worker metadata round timed out/failed: <reason>"),
            Logged("ZMQ init/handshake failed: <reason>"),
            Logged("Failed to sync leader barrier: <reason>"),
            Failed(text="Failed to sync leader barrier"),
            Failed(text="ZMQ init/handshake failed"),
        ),
        general=True,
        sure=False,
        cause="Before they answer, the workers pin DYN_KVBM_CPU_CACHE_GB of host memory and zero their disk file "
        "(DYN_KVBM_DISK_CACHE_GB): minutes for hundreds of GB, or for ever on a full or slow disk. Else a worker has "
        "died (its own log), or the leader's ports (56001, 56002; DYN_KVBM_LEADER_ZMQ_PUB_PORT, _ACK_PORT) belong to "
        "another engine of the host. Pings that end with an answer are a normal start.",
        now="DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS=1200; DYN_KVBM_CPU_CACHE_GB=4 without DYN_KVBM_DISK_CACHE_GB, "
        "to see whether it is the memory; another pair of DYN_KVBM_LEADER_ZMQ_PUB_PORT and _ACK_PORT for each engine "
        "of a host; df -h of DYN_KVBM_DISK_CACHE_DIR",
        good="sizes that the host can pin, and a time limit that fits them",
        threads=(_DYNAMO + "issues/4087",),
    ),
    Problem(
        code="KVD1077",
        name="kvbm-barrier-of-another-engine",
        severity=Severity.CRASH,
        title="Two engines with KVBM meet at one barrier in etcd, or an engine meets the one of its last start.",
        shows=(
            Failed(text="barrier: AlreadyCompleted"),
            Failed(text="barrier: BarrierIdNotUnique"),
            Failed(text="barrier: BarrierWorkerIdNotUnique"),
            Logged("barrier: AlreadyCompleted"),
            Logged("barrier: BarrierIdNotUnique"),
            Logged("barrier: BarrierWorkerIdNotUnique"),
            Failed(text="AlreadyCompleted", through="vllm_integration/"),
        ),
        replaces=("KVD031",),
        cause="Leader and workers of an engine find each other under a name in etcd, `kvbm` unless it is set: prefill "
        "and decode, or two replicas, take the same. After a crash the old entry stays until its lease ends.",
        now="DYN_KVBM_BARRIER_ID_PREFIX=<another one for each engine, the pod's name> (Dynamo before 0.5: "
        "DYN_KVBM_BARRIER_ID), restart; alone on its etcd: wait for a minute, or restart etcd",
        good="the setting in each engine's start; KVBM on prefill only where decode does not need it",
        threads=(_DYNAMO + "issues/2826",),
    ),
    Problem(
        code="KVD032",
        name="kvbm-pinned-memory-refused",
        severity=Severity.CRASH,
        title="KVBM cannot allocate its pinned host memory.",
        shows=(
            Logged("Storage allocation failed: CUDA error: DriverError(<error>"),
            Logged("malloc_host failed: <error>"),
            Failed(text="Storage allocation failed: CUDA error: DriverError(<error>"),
            Failed(text="Failed to allocate pinned memory"),
        ),
        cause="CUDA_ERROR_INVALID_VALUE: write-combined pinned memory, which Grace-Blackwell (GB200) refuses for "
        "large sizes; Dynamo 0.9 falls back to plain pinned memory. CUDA_ERROR_OUT_OF_MEMORY: DYN_KVBM_CPU_CACHE_GB, "
        "for each worker, is more than the host or the container may pin.",
        now="INVALID_VALUE: DYN_KVBM_DISABLE_WRITE_COMBINED=1 (Dynamo 0.9 or newer); OUT_OF_MEMORY: a smaller "
        "DYN_KVBM_CPU_CACHE_GB, --ulimit memlock=-1, a larger memory limit of the container",
        good="Dynamo 0.9.0 or newer, and a size that fits the host",
        threads=(_DYNAMO + "pull/5328",),
    ),
    Problem(
        code="KVD033",
        name="kvbm-layout-not-supported",
        severity=Severity.CRASH,
        title="KVBM cannot describe the KV cache of this model or attention backend.",
        shows=(
            Failed(kind="NotImplementedError", text="Hybrid models with different KV cache shapes are not supported"),
            Failed(text="Unsupported kv cache layout. Got shape: <shape>"),
            Logged("Unsupported kv cache layout. Got shape: <shape>"),
            Failed(text="Failed to auto-detect layout from shape"),
            Logged("Failed to auto-detect layout from shape"),
            Failed(kind="ValueError", text="Unsupported request - requires mm extra keys"),
        ),
        cause="KVBM wants every layer of one shape, [2, blocks, ...] or [blocks, 2, ...] (MLA: [blocks, tokens, "
        "latent]). Models with sliding windows, Mamba or GDN layers, or indexers have several. Requests with images "
        "need keys of their own, which it does not make.",
        now="a model with one kind of attention; --attention-backend FLASH_ATTN; else without KVBM: "
        'OffloadingConnector (--kv-offloading-size GB) or {"kv_connector":"LMCacheMPConnector"}',
        good="a release of kvbm that takes the model: 1.6 still refuses several shapes",
    ),
    Problem(
        code="KVD034",
        name="kvbm-pd-connectors-wrong",
        severity=Severity.CRASH,
        title="PdConnector of Dynamo is given other connectors than it can combine.",
        shows=(
            Failed(kind="ValueError", text="PdConnector requires exactly two connectors (got <count>)"),
            Failed(kind="TypeError", text="Expected first connector to be <names>, got <given>"),
            Failed(kind="TypeError", text="Expected second connector to be NixlConnector, got <given>"),
        ),
        cause="It takes two, in this order: first DynamoConnector (KVBM), LMCacheConnectorV1 or FlexKVConnectorV1, "
        "then NixlConnector.",
        now='"kv_connector": "PdConnector", "kv_connector_extra_config": {"connectors": [{"kv_connector": '
        '"DynamoConnector", "kv_connector_module_path": "kvbm.vllm_integration.connector", "kv_role": "kv_both"}, '
        '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]}',
        good="the same",
    ),
    Problem(
        code="KVD035",
        name="kvbm-of-another-vllm",
        severity=Severity.CRASH,
        title="KVBM's connector and this vLLM count a request differently.",
        shows=(
            Failed(kind="AssertionError", text="Total number of scheduled tokens does not match"),
            Failed(text="slot must be in the"),
            Failed(text="device block overflow - candidate blocks exceed block count"),
            Failed(text="external_sequence_hash mismatch at block index"),
            Failed(text="slot operation failed: <reason>"),
            Logged("KVBM slot desync: engine scheduled tokens beyond registered device blocks"),
            Died(text="connector/leader/slot.rs"),
        ),
        sure=False,
        cause="kvbm follows the life of a request in a table of its own, written for one release of vLLM: preemption, "
        "asynchronous scheduling, speculative decoding and chunked prompts of another release take it by surprise.",
        now="the pair of vLLM and kvbm that Dynamo's image of that release has; --no-async-scheduling, without "
        "--speculative-config, until then; restart",
        good="vLLM and kvbm of one release of Dynamo (pip install 'ai-dynamo[vllm]==<release>' 'kvbm==<release>')",
        threads=(_DYNAMO + "issues/4580", _DYNAMO + "pull/8490"),
    ),
    Problem(
        code="KVD036",
        name="dynamo-of-another-vllm-patch",
        severity=Severity.CRASH,
        title="Dynamo and its patched vLLM (ai_dynamo_vllm) are of different releases.",
        shows=(
            Logged("'RemotePrefillRequest' object has no attribute"),
            Failed(kind="AttributeError", text="'RemotePrefillRequest' object has no attribute"),
            Failed(kind="AttributeError", text="'RemotePrefillParams' object has no attribute"),
            Failed(kind="ImportError", text="from 'vllm.remote_prefill'"),
            Failed(kind="ModuleNotFoundError", text="No module named 'vllm.remote_prefill'"),
        ),
        cause="Up to Dynamo 0.2 prefill and decode spoke by classes that Dynamo's patch adds to vLLM 0.7 and 0.8; "
        "each release has its own patch, and the two halves must be of one.",
        now="pip install ai-dynamo==<release> with ai_dynamo_vllm of the release that it names in its extras, no "
        "vllm of another origin beside it; or the container that Dynamo builds (container/build.sh --framework vllm)",
        good="Dynamo 0.4 or newer, which runs vLLM unpatched with NixlConnector",
        threads=(_DYNAMO + "issues/516",),
    ),
    Problem(
        code="KVD060",
        name="kvbm-disk-file-refused",
        severity=Severity.CRASH,
        title="The file system does not let KVBM make its disk cache's file.",
        shows=(
            Logged("fallocate failed with EOPNOTSUPP"),
            Logged("write all error: Invalid argument"),
            Logged("O_DIRECT alignment issues."),
            Logged("Failed to allocate temp file: <reason>"),
            Logged("Failed to allocate disk file: <reason>"),
            Logged("Failed to allocate file space: <reason>"),
            Failed(text="Failed to allocate temp file: <reason>"),
            Failed(text="Failed to allocate disk file: <reason>"),
            Failed(text="write all error: Invalid argument"),
        ),
        replaces=("KVD340",),
        cause="EOPNOTSUPP (`Operation not supported`): it has no fallocate (Lustre, NFS, some overlays). EINVAL "
        "(`Invalid argument`) in a write: it takes O_DIRECT only with pages aligned otherwise. ENOSPC, EDQUOT: "
        "DYN_KVBM_DISK_CACHE_GB, for each worker, does not fit. EACCES, EROFS: the directory cannot be written.",
        now="EOPNOTSUPP: DYN_KVBM_DISK_ZEROFILL_FALLBACK=1; EINVAL: DYN_KVBM_DISK_DISABLE_O_DIRECT=1; or "
        "DYN_KVBM_DISK_CACHE_DIR on a local ext4 or XFS disk; ENOSPC: a smaller DYN_KVBM_DISK_CACHE_GB; restart",
        good="a local disk with room for DYN_KVBM_DISK_CACHE_GB of each worker",
        threads=(_DYNAMO + "issues/2680", _DYNAMO + "issues/4508"),
    ),
)
