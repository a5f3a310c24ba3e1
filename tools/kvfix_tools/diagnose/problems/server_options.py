"""Options of the LMCache server that do not fit its machine, or the vLLM that connects to it."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_ADAPTER = "lmcache/integration/vllm/vllm_multi_process_adapter.py"
_CONFIG = "lmcache/v1/multiprocess/config.py"
_MANAGER = "lmcache/v1/distributed/storage_manager.py"
_GDS = "lmcache/v1/gpu_connector/gds_backends"
_MP = ("LMCacheMPConnector", "MultiConnector")

PROBLEMS = (
    Problem(
        code="KVD465",
        name="gds-backend-of-another-device",
        severity=Severity.CRASH,
        title="The server's L1 on disk (GDS) is to use a library that is not for this GPU or this device.",
        shows=(
            Failed(kind="ValueError", text="cufile requires a CUDA PyTorch build", at=f"{_GDS}/cufile.py"),
            Failed(kind="ValueError", text="hipfile requires a ROCm PyTorch build", at=f"{_GDS}/hipfile.py"),
            Failed(kind="ValueError", text="mufile requires a MUSA PyTorch build", at=f"{_GDS}/mufile.py"),
            Failed(kind="ValueError", text="mufile requires --gds-l1-use-direct-io", at=f"{_GDS}/mufile.py"),
            Failed(kind="ValueError", text="phx requires a ROCm or CUDA PyTorch build", at=f"{_GDS}/phx.py"),
            Failed(kind="ValueError", text="ugds requires a ROCm or CUDA PyTorch build", at=f"{_GDS}/ugds.py"),
            Failed(kind="ValueError", text="uGDS path must be a character device: <path>", at=f"{_GDS}/ugds.py"),
            Failed(kind="ValueError", text="uGDS path is not managed by ugds_drv: <path>", at=f"{_GDS}/ugds.py"),
            Failed(kind="ValueError", text="no default GDS backend for this environment"),
            Failed(kind="ValueError", text="unsupported GDS L1 backend: <name>"),
        ),
        releases={"lmcache": ">=0.5.6"},
        cause="--gds-l1-backend chooses the library: cufile for NVIDIA, hipfile for AMD, mufile for Moore Threads; "
        "ugds wants a character device of ugds_drv as --gds-l1-path, not a folder. torch in the server's environment "
        "has to be built for the same GPU.",
        now="lmcache server --gds-l1-backend auto, with the torch of this GPU (python -c 'import torch; "
        "print(torch.version.cuda, torch.version.hip)'); or --l1-size-gb without --gds-l1-path",
        good="the backend that `auto` takes, or an L1 in host memory",
    ),
    Problem(
        code="KVD466",
        name="server-without-experimental",
        severity=Severity.SLOW,
        title="The LMCache server does not answer what this client asks first: it is older, or busy.",
        shows=(Logged("LMCache server did not answer GET_EXPERIMENTAL within", _ADAPTER),),
        sentence="the server did not say which experimental features it has",
        connectors=_MP,
        releases={"lmcache": ">=0.5.3"},
        cause="Servers before 0.5.3 do not know this request and drop it. The client goes on without those features "
        "(transfer_query); what else differs between the two releases fails later.",
        now="the same LMCache for server and vLLM: `lmcache --version` (or pip show lmcache) in both containers; with "
        "equal releases look whether the server is overloaded",
        good="image tags of one release: lmcache/standalone:vX with lmcache/vllm-openai:vX",
        sure=False,
    ),
    Problem(
        code="KVD467",
        name="blend-server-without-blend-client",
        severity=Severity.CRASH,
        title="The LMCache server runs CacheBlend, and no vLLM tells it the rotary positions of its model.",
        shows=(
            # blend_v3.py up to 0.5.4, then blend/retrieve.py and blend/lookup.py.
            Failed(kind="ValueError", text="Instance <instance> has no CB rope state; send CB_REGISTER_ROPE"),
            Logged("No CB GPU context for model <model> ws <size> during"),
        ),
        said=(
            r"(?i)engine-type[= ]blend",
            r"CB_REGISTER_ROPE|(?i:\bblend\w* (?:is |does |do )?(?:never|not|n't))",
        ),
        releases={"lmcache": ">=0.4.7"},
        cause="--engine-type blend needs a client that sends CB_REGISTER_ROPE (_V3 up to 0.5.4) after its KV caches. "
        "LMCacheMPConnector of the releases up to 0.5.6 sends none, so nothing is blended.",
        now="lmcache server without --engine-type blend: prefix hits only (CacheBlend in vLLM's own process, "
        "enable_blending: true, wants a line written into vLLM by hand: KVD746)",
        good="a connector that has CacheBlend for the server: none is in LMCache 0.5.6",
        threads=("https://github.com/LMCache/LMCache/issues/5101",),
    ),
    Problem(
        code="KVD189",
        name="server-option-not-known",
        severity=Severity.CRASH,
        title="An option of the LMCache server has a value that it does not know.",
        shows=(
            Failed(kind="ValueError", text="Unknown prefetch policy <name>. Known: <known>"),
            Failed(kind="ValueError", text="Unknown store policy <name>. Known: <known>"),
            Failed(kind="ValueError", text="Unsupported eviction policy: <name>"),
            Failed(kind="ValueError", text="Unsupported supported_transfer_mode <name>"),
            Failed(kind="ValueError", text="Unknown --enable experimental module <name>"),
        ),
        sentence="{name}",
        cause="In 0.5.6 --eviction-policy knows LRU, ARC, IsolatedLRU and noop, --l2-prefetch-policy default and "
        "retain, --l2-store-policy default and skip_l1, --supported-transfer-mode auto, lmcache_driven and "
        "engine_driven; older releases know fewer. Names are taken as written.",
        now="lmcache server --l1-size-gb 50 --eviction-policy LRU, the other options left out; `lmcache server --help` "
        "lists what this release knows",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD190",
        name="l2-grows-without-bound",
        severity=Severity.SLOW,
        title="The server's L2 has no eviction: it grows until its disk or store is full.",
        shows=(
            Logged("configured with '<policy>' eviction but does not support global eviction (max_capacity_bytes=0)"),
            Logged("is declared for <path> but no 'eviction' block is configured"),
        ),
        releases={"lmcache": ">=0.4.5"},
        cause="Eviction needs both in the adapter's JSON: max_capacity_gb, from which the watermark is counted, and an "
        "eviction block. With one alone nothing is ever deleted.",
        now='"max_capacity_gb": 500, "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.8, '
        '"eviction_ratio": 0.2} in the JSON of --l2-adapter; restart the server',
        good="both in the adapter's JSON, with max_capacity_gb below the disk's size",
    ),
    Problem(
        code="KVD188",
        name="full-prefetch-without-windows",
        severity=Severity.SLOW,
        title="Blending, P2P and warming up cannot fetch chunks of a model with a sliding window: nothing comes from "
        "L2.",
        shows=(Logged("plan_load: 'full' fetching does not support sliding-window key groups"),),
        releases={"lmcache": ">=0.5.6"},
        cause="They fetch every chunk that is found (`full`), and of layers with a window only the last chunks are "
        "kept (prefetch_policy.py 0.5.6:253). Plain lookups fetch a prefix and work.",
        now="for such a model: lmcache server without --engine-type blend and without P2P (coordinator)",
        good="no release does this for models with a sliding window (0.5.6)",
    ),
    Problem(
        code="KVD191",
        name="blend-server-needs-lmcache-driven",
        severity=Severity.CRASH,
        title="--engine-type blend and experimental modules need the transfer mode lmcache_driven.",
        shows=(
            Failed(kind="ValueError", text="blend engine requires supported_transfer_mode 'lmcache_driven' or 'auto'"),
            Failed(kind="ValueError", text="requires supported_transfer_mode='lmcache_driven' or 'auto'"),
        ),
        releases={"lmcache": ">=0.4.7"},
        cause="They work on the engine's KV memory itself, which the server sees only in lmcache_driven.",
        now="lmcache server --engine-type blend --supported-transfer-mode lmcache_driven, on the engine's machine "
        "with the same GPUs and --ipc host",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1654",
        name="server-options-out-of-range",
        severity=Severity.CRASH,
        title="An option of the LMCache server is empty or out of its range.",
        shows=(
            Failed(kind="ValueError", text="Kafka bootstrap servers must be non-empty", at=_CONFIG),
            Failed(kind="ValueError", text="Kafka cache-event topic must be non-empty", at=_CONFIG),
            Failed(kind="ValueError", text="Kafka delivery timeout must be a finite number > 0, got <got>", at=_CONFIG),
            Failed(kind="ValueError", text="grpc server workers must be >= 1; got <got>", at=_CONFIG),
            Failed(kind="ValueError", text="--server-module entries must be JSON objects"),
            Failed(kind="ValueError", text="server module module_path must be a non-empty string"),
            Failed(kind="ValueError", text="server module factory_name must be a non-empty string"),
            Failed(kind="ValueError", text="server module config must be a JSON object"),
        ),
        releases={"lmcache": ">=0.5.6"},
        cause="With --coordinator-event-transport kafka the server needs --coordinator-kafka-bootstrap-servers; "
        "--grpc-server-workers is 1 or more (32 by default); --server-module takes one JSON object with module_path, "
        "factory_name and config, which is an object as well.",
        now="lmcache server --coordinator-event-transport kafka --coordinator-kafka-bootstrap-servers kafka:9092, or "
        'without that option (http); without --grpc-server-workers; --server-module \'{"module_path": "pkg.module", '
        '"factory_name": "build", "config": {}}\'',
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1658",
        name="blend-with-another-transfer",
        severity=Severity.CRASH,
        title="The LMCache server is to blend, and to transfer by another way than the GPU.",
        shows=(
            Failed(
                kind="ValueError",
                text="Blend engine requires transfer_mode='gpu', got <mode>",
                at="lmcache/v1/multiprocess/server.py",
            ),
        ),
        releases={"lmcache": "==0.4.6"},
        cause="--engine-type blend re-computes rotary positions on the GPU, so that it needs --transfer-mode gpu.",
        now="lmcache server --transfer-mode gpu, or without --engine-type blend",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1660",
        name="l1-and-l2-contradict",
        severity=Severity.CRASH,
        title="An L2 adapter and the L1s of the LMCache server do not fit each other.",
        shows=(
            Failed(kind="ValueError", text="<adapter> registers a single L1 memory region, but L1 currently spans <n>"),
            Failed(kind="ValueError", text="Device-DAX path already owned by an L1: <path>", at=_MANAGER),
            Failed(kind="ValueError", text="device <path> is already mapped by <owners>", at=_MANAGER),
            Failed(kind="ValueError", text="Unknown L1 affinity_tag: <tag>", at=_MANAGER),
        ),
        releases={"lmcache": ">=0.5.6"},
        cause="A DAX device belongs to one L1 or one L2 adapter. NIXL and other adapters that register L1's memory "
        "take one region of it: either DRAM or one DAX device. affinity_tag names an L1 that exists, one in memory "
        "(not GDS); without it the first is taken.",
        now="each /dev/dax once in all options; with such an L2 adapter one L1 (--l1-size-gb alone); no affinity_tag "
        "in the adapter's JSON; restart the server",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1672",
        name="gds-l1-with-an-l2",
        severity=Severity.SLOW,
        title="The LMCache server has its L1 on disk (GDS) and an L2 adapter, which cannot read from there.",
        shows=(
            Failed(
                kind="NotImplementedError", text="GDSMemoryObject(slab_offset=<offset>).byte_array is not supported"
            ),
            Failed(kind="NotImplementedError", text="GDSMemoryObject(slab_offset=<offset>).data_ptr is not supported"),
            Failed(kind="ValueError", text="L2 affinity requires a host-backed DRAM or DEVDAX L1"),
        ),
        sentence="an L2 adapter with an L1 of GDS",
        releases={"lmcache": ">=0.4.7"},
        cause="L2 adapters copy from and to L1's memory, and with --gds-l1-path there is none: chunks go from the GPU "
        "to the file. Up to 0.5.5 the server starts so, and each store to L2 fails; 0.5.6 refuses it at the start. "
        "A frame in l2_adapters/ shows that it is this.",
        now="lmcache server --gds-l1-path without --l2-adapter; or --l1-size-gb 50 without --gds-l1-path, and the disk "
        'as --l2-adapter \'{"type": "fs", "base_path": "/mnt/nvme/kv"}\'',
        sure=False,
        good="one of the two: no release up to 0.5.6 has both for one L1",
    ),
    Problem(
        code="KVD1788",
        name="server-without-coordinator",
        severity=Severity.SLOW,
        title="The LMCache server does not reach its coordinator: no P2P, and no lookups over all servers.",
        shows=(
            Logged("Coordinator registration/heartbeat failed: <error>"),
            Logged("P2P instance discovery failed: <error>"),
            Logged("Cache-event publish failed (instance <instance>); unsent batches are dropped and leave a seq gap"),
        ),
        releases={"lmcache": ">=0.4.7"},
        cause="The error decides: refused or timed out: no coordinator at --coordinator-url (the server tries again by "
        "itself); 404 or a validation error: something else answers there, or a coordinator of another LMCache "
        "release. The server's own L1 and L2 go on.",
        now="curl -s COORDINATOR_URL/instances from the server's container; the coordinator and all servers of one "
        "LMCache release; or the server without --coordinator-url",
        good="the coordinator as a service that starts before the servers",
        sure=False,
    ),
    Problem(
        code="KVD1789",
        name="device-backend-of-another-host",
        severity=Severity.CRASH,
        title="LMCACHE_DEVICE_BACKEND does not fit this host, or LMCache finds two backends and takes none.",
        shows=(
            Failed(kind="RuntimeError", text="LMCACHE_DEVICE_BACKEND=<name> is not registered. Available"),
            Failed(kind="RuntimeError", text="LMCACHE_DEVICE_BACKEND=<name> is registered but not available"),
            Failed(kind="RuntimeError", text="LMCache backends are available for device_type <type>: <names>. Set"),
        ),
        releases={"lmcache": ">=0.5.4"},
        cause="The variable names the device's backend (cuda, rocm, xpu, npu ...) where LMCache cannot tell it: one "
        "that is not installed, or whose driver is not in this container.",
        now="unset LMCACHE_DEVICE_BACKEND, or the name of the list that fits the GPU; the container with its GPU "
        "(--gpus all); restart",
        good="one backend in an image",
    ),
)
