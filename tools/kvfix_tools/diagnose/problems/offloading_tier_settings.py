"""Settings of vLLM's offloading tiers, of SimpleCPUOffloadConnector and of rarer connectors that are refused."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_TIERING = "vllm/v1/kv_offload/tiering"
_SIMPLE = "vllm/v1/simple_kv_offload"
_KVCR = f"{_TIERING}/kvcr/manager.py"
_TRANSFER = "vllm/config/kv_transfer.py"
_FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"

PROBLEMS = (
    Problem(
        code="KVD164",
        name="offload-tier-settings-refused",
        severity=Severity.CRASH,
        title="`secondary_tiers` or the settings of a tier are not valid, and vLLM does not start.",
        shows=(
            Failed(
                kind="ValueError",
                text="secondary_tiers must be a list of tier configurations",
            ),
            Failed(
                kind="ValueError",
                text="backpressure config must include 'backpressure_cls'",
            ),
            Failed(kind="ValueError", text="low_water_s (<low>) must be <="),
            Failed(kind="ValueError", text="store_threshold must be >= 2, got <value>"),
            Failed(kind="ValueError", text="max_tracker_size must be >= 1, got <value>"),
            Failed(kind="ValueError", text="alpha must be in (0, 1], got"),
            Failed(kind="ValueError", text="Backpressure is not supported for the P2P secondary tier."),
            Failed(kind="ValueError", text="unbound_store_timeout_s must be a positive number, got <value>"),
        ),
        cause="It is a list of objects, one for each tier, each with `type` and the settings of that type. Back "
        "pressure has a class and two marks, the low one below the high one; a p2p tier has none. "
        "`store_threshold` counts from 2 on, times in seconds.",
        now='"kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 68719476736, '
        '"secondary_tiers": [{"type": "fs", "root_dir": "/kvcache"}]}, without `backpressure`; restart',
        good="the configuration",
    ),
    Problem(
        code="KVD165",
        name="kvcr-tier-refused",
        severity=Severity.CRASH,
        title="The settings of the KVCR tier do not fit each other or this engine.",
        shows=(
            Failed(kind="TypeError", text="KVCRSecondaryTierManager.__init__() got an unexpected keyword argument"),
            *(
                Failed(kind=kind, text=text, at=_KVCR)
                for kind, text in (
                    ("ValueError", "Unknown KVCR policy: <policy>"),
                    ("TypeError", "is not a KVCachePolicy"),
                    ("ValueError", "kvcr_service_socket_path and compatibility_digest must be configured together"),
                    ("ValueError", "KVCR secondary tier requires router capabilities"),
                    ("ValueError", "KVCR local G2/G3 inventory requires self_describing_kv_events"),
                    ("ValueError", "control_ports must"),
                    ("ValueError", "secondary_g2_slots must be non-negative"),
                )
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="An argument that its adapter does not take (`backpressure_detector`) is a fault of that build of vLLM, "
        "not a setting: 0.32.0 has it right. Else: The tier needs one control port for each data parallel rank of "
        "this machine, the service's socket together with its digest, and events that describe themselves if it keeps "
        "an inventory.",
        now="what the message names: `control_ports` as a list of as many ports (1 to 65535) as there are local data "
        "parallel ranks; both of kvcr_service_socket_path and compatibility_digest, or none; restart",
        good="the configuration",
    ),
    Problem(
        code="KVD166",
        name="offload-file-tier-without-direct-io",
        severity=Severity.SLOW,
        title="The file tier's folder does not take direct I/O: blocks go through the page cache.",
        shows=(Logged("O_DIRECT is not supported at '<folder>'; falling back", at=f"{_TIERING}/fs/manager.py"),),
        sentence="{folder}",
        releases={"vllm": ">=0.32"},
        cause="The file system (tmpfs, overlay, some network file systems) refuses O_DIRECT. It works, and takes host "
        "memory and processor time for the copies.",
        now="`root_dir` on a local ext4 or xfs (NVMe), mounted into the container; nothing, if the rate is enough",
        good="such a folder",
    ),
    Problem(
        code="KVD982",
        name="simple-offload-driver-too-old",
        severity=Severity.CRASH,
        title="The driver has no batch copy, which SimpleCPUOffloadConnector needs.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="cuGetProcAddress(cuMemcpyBatchAsync) failed: <error>",
                at=f"{_SIMPLE}/cuda_mem_ops.py",
            ),
            Failed(kind="OSError", text="could not load the HIP runtime: <error>", at=f"{_SIMPLE}/cuda_mem_ops.py"),
        ),
        sentence="{error}",
        releases={"vllm": ">=0.32"},
        cause="cuMemcpyBatchAsync came with CUDA 12.8: the driver (nvidia-smi, upper right) is older. On AMD the HIP "
        "runtime's library is not found by the loader.",
        now="OffloadingConnector in its place (--kv-offloading-size 64 without VLLM_USE_SIMPLE_KV_OFFLOAD); AMD: "
        "LD_LIBRARY_PATH=/opt/rocm/lib; restart",
        good="an NVIDIA driver of release 570 or newer",
    ),
    Problem(
        code="KVD983",
        name="simple-offload-starts-inside-a-block",
        severity=Severity.SLOW,
        title="vLLM's own hit ends inside a block, and SimpleCPUOffloadConnector cannot add to it.",
        shows=(
            Logged(
                "SimpleCPU external lookup requires scheduler-block-aligned local tokens, got <tokens> tokens with "
                "scheduler block size <block>",
                at=f"{_SIMPLE}/manager.py",
            ),
            Failed(
                kind="AssertionError",
                text="SimpleCPU external loads must start at a scheduler-block boundary",
                at=f"{_SIMPLE}/manager.py",
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="It copies whole blocks of the scheduler (the least common multiple of the KV groups' block sizes). With "
        "hits at hash boundaries (--prefix-match-unit, hybrid models) a local hit may end before such a block does; "
        "the request keeps it and loads nothing.",
        now="without --prefix-match-unit; or OffloadingConnector in its place (without VLLM_USE_SIMPLE_KV_OFFLOAD); "
        "restart",
        good="the settings; the answer is right, only slower",
    ),
    Problem(
        code="KVD984",
        name="simple-offload-blocks-not-aligned-to-disk",
        severity=Severity.CRASH,
        title="A block is no multiple of the disk's unit, and SimpleCPUOffloadConnector's disk does not start.",
        shows=(
            Failed(
                kind="AssertionError",
                text="total_block_bytes=<bytes> not aligned to <unit>",
                at=f"{_SIMPLE}/disk_backend.py",
            ),
        ),
        sentence="a block has {bytes} bytes, the unit is {unit}",
        releases={"vllm": ">=0.32"},
        cause="Blocks are written with direct I/O, in multiples of the unit. Bytes of a block are tokens of a block "
        "times bytes of KV of a token, over all layers of this rank.",
        now="a larger --block-size (double it until bytes divide by the unit), or the backend cpu; restart",
        good="the block size",
    ),
    Problem(
        code="KVD989",
        name="multi-connector-finished-counts-differ",
        severity=Severity.CRASH,
        title="Connectors below MultiConnector expect different numbers of workers to report a transfer.",
        shows=(
            Failed(
                kind="ValueError",
                text="MultiConnector children returned incompatible finished counts: <counts>",
                at=f"{_V1}/multi_connector.py",
            ),
        ),
        sentence="{counts}",
        releases={"vllm": ">=0.32"},
        cause="One number holds for the whole engine: how many workers have to say that a request is done. P/D "
        "connectors ask for other numbers (the other side's ranks) than those that every rank reports to.",
        now="one connector of the two (P/D), and the store's inside the engine by --kv-offloading-size; restart",
        good="children with the same count",
    ),
    Problem(
        code="KVD990",
        name="connector-name-empty",
        severity=Severity.CRASH,
        title="--kv-transfer-config has no connector's name, or an empty module path.",
        shows=(
            Failed(kind="ValueError", text="Connector name is not set in KVTransferConfig", at=_FACTORY),
            Failed(kind="ValueError", text="kv_connector_module_path cannot be an empty string.", at=_FACTORY),
        ),
        releases={"vllm": ">=0.32"},
        cause="A template (Helm, compose) was filled in with nothing.",
        now='--kv-transfer-config \'{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}\', without '
        "kv_connector_module_path; restart",
        good="the template",
    ),
    Problem(
        code="KVD991",
        name="hisparse-settings-refused",
        severity=Severity.CRASH,
        title="HiSparseConnector is not set up as it has to be.",
        shows=(
            Failed(text="Only one HiSparseConnector may be configured", at=_TRANSFER),
            Failed(text="HiSparseConnector requires host_pool_gib", at=_TRANSFER),
            Failed(text="HiSparseConnector host_pool_gib must be positive", at=_TRANSFER),
            Failed(text="HiSparse does not support pipeline parallelism.", at="vllm/config/vllm.py"),
            Failed(text="HiSparse requires the hybrid KV cache manager", at="vllm/config/vllm.py"),
            Failed(text="HiSparse currently requires NVIDIA CUDA.", at="vllm/config/vllm.py"),
            Failed(text="HiSparse does not support decode context parallelism.", at="vllm/config/vllm.py"),
            Failed(text="HiSparse does not support cudagraph_mode=FULL;", at="vllm/config/vllm.py"),
            Failed(text="HiSparse requires --scheduler-reserve-full-isl;", at="vllm/config/vllm.py"),
            Failed(text="HiSparse is only supported for DSA models with index_topk.", at="vllm/config/vllm.py"),
            Failed(text="HiSparse requires Model Runner V2;", at="vllm/config/vllm.py"),
        ),
        releases={"vllm": ">=0.32"},
        cause="It keeps KV of sparse attention (DeepSeek's DSA, on NVIDIA) in a pool of host memory whose size has to "
        "be given, once, with the hybrid KV cache manager on and without pipeline stages or context parallelism.",
        now='"kv_connector_extra_config": {"host_pool_gib": 64}, --pipeline-parallel-size 1, '
        "--decode-context-parallel-size 1; without --disable-hybrid-kv-cache-manager, "
        "--no-scheduler-reserve-full-isl, cudagraph_mode FULL and VLLM_USE_V2_MODEL_RUNNER=0; another model or card: "
        "without HiSparseConnector; restart",
        good="the configuration",
    ),
    Problem(
        code="KVD992",
        name="layout-name-unknown",
        severity=Severity.CRASH,
        title="VLLM_KV_CACHE_LAYOUT names a layout that this vLLM does not have.",
        shows=(
            Failed(
                text="Unknown KV cache layout <name>. Valid layouts: <valid>",
                at="vllm/config/cache.py",
            ),
        ),
        sentence="{name}; there are {valid}",
        releases={"vllm": ">=0.32"},
        cause="Up to 0.31 the names were NHD and HND; from 0.32 on they name the order of all dimensions (LBNHC, BLHNC "
        "and the like).",
        now="unset VLLM_KV_CACHE_LAYOUT, or one of the names in the message; the same on prefill and decode; restart",
        good="the environment",
    ),
    Problem(
        code="KVD993",
        name="flexkv-not-installed",
        severity=Severity.CRASH,
        title="FlexKVConnectorV1 needs the package FlexKV, which is not installed.",
        shows=(Failed(kind="ImportError", text="FlexKV is not installed.", at=f"{_V1}/flexkv_connector.py"),),
        releases={"vllm": ">=0.32"},
        cause="The connector in vLLM only calls it. It is not on PyPI, and has to be built for this torch and CUDA.",
        now="build it from https://github.com/taco-project/FlexKV in vLLM's environment; or another connector "
        "(--kv-offloading-size 64)",
        good="an image with FlexKV",
    ),
    Problem(
        code="KVD994",
        name="hidden-states-connector-alone",
        severity=Severity.CRASH,
        title="ExampleHiddenStatesConnector is used without what makes hidden states.",
        shows=(
            Failed(
                kind="AssertionError",
                text="ExampleHiddenStatesConnector only works when using",
                at=f"{_V1}/example_hidden_states_connector.py",
            ),
            Failed(
                kind="ValueError",
                text="Could not uniquely identify the extract-hidden-states KV cache group",
                at=f"{_V1}/example_hidden_states_connector.py",
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="Hidden states are written by the speculative method `extract_hidden_states`, into a KV group of its "
        "own.",
        now='--speculative-config \'{"method": "extract_hidden_states", "num_speculative_tokens": 1, ...}\' as in '
        "vLLM's example of this release; or take the connector out; restart",
        good="the configuration",
    ),
)
