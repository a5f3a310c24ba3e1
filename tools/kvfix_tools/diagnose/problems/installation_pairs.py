"""Packages that are missing, or releases of vLLM, LMCache, nixl and Mooncake that do not go together."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_MP = (
    "what goes together: vLLM 0.20 to 0.25 with LMCache 0.4.4 to 0.4.6, or with LMCache 0.5.2 to 0.5.5 and "
    '"kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector_0201"; vLLM 0.26 or newer with LMCache '
    "0.5.2 or newer and LMCACHE_USE_UPSTREAM_MP unset; the server of the same LMCache release"
)
_NATIVE = ("multi_process_adapter.py", "vllm_v1_adapter.py", "utils.py")
#: What vLLM hands to a connector.
_VLLM_OBJECTS = (
    "CachedRequestData", "NewRequestData", "SchedulerOutput", "Request", "VllmConfig", "ParallelConfig", "ModelConfig",
    "CacheConfig", "KVTransferConfig", "KVCacheConfig", "KVCacheBlocks", "ForwardContext", "SamplingParams",
)  # fmt: skip
#: Modules that LMCache imports for one of its backends, or for its server.
_OPTIONAL = (
    "cupy", "redis", "glide", "glide_sync", "valkey", "aiofile", "aiofiles", "boto3", "awscrt", "infinistore",
    "hf3fs", "eic", "maru", "bigtable", "aerospike", "openai", "fastapi", "uvicorn", "msgspec", "opentelemetry",
    "prometheus_client", "sortedcontainers", "nvtx", "xxhash", "blake3", "numa", "httpx", "rust_raw_block_io",
)  # fmt: skip

PROBLEMS = (
    Problem(
        code="KVD720",
        name="lmcache-not-installed",
        severity=Severity.CRASH,
        title="LMCache is not installed for the Python that runs vLLM, and its connector was asked for.",
        shows=(Failed(text="No module named 'lmcache'"), Logged(text="No module named 'lmcache'")),
        said=(
            r"ModuleNotFoundError\b[`'\"]*,? (?:for|of|on|about|with) (?:the )?(?:module )?[`'\"]?lmcache(?![.\w])"
            r"|No module named [`'\"]lmcache[`'\"]|\blmcache [`'\"]?ModuleNotFoundError",
        ),
        cause="LMCache is missing, or was installed for another Python than the one that runs vLLM.",
        now="$(dirname $(readlink -f $(which vllm)))/python -m pip install lmcache, or the image lmcache/vllm-openai",
        good="LMCache in vLLM's own environment",
        threads=("https://github.com/llm-d/llm-d/issues/661",),
    ),
    Problem(
        code="KVD721",
        name="connector-of-lmcache-before-0-3",
        severity=Severity.CRASH,
        title="A connector or an example of LMCache before 0.3 is used, whose modules no longer exist.",
        shows=(
            Failed(text="No module named 'lmcache.experimental"),
            Failed(text="No module named 'lmcache_vllm"),
            Logged(text="No module named 'lmcache.experimental"),
        ),
        cause="`lmcache.experimental` became `lmcache.v1` in 0.3; `lmcache_vllm` was given up. vLLM's connector of the "
        "V0 engine (LMCacheConnector) and old examples still ask for them.",
        now='--kv-transfer-config \'{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}\', with the V1 engine; a '
        "script that imports them itself: the example of your release in its place (CacheBlend: examples/blend_kv_v1)",
        good="vLLM 0.11.2 or newer with LMCacheConnectorV1",
        threads=(
            "https://github.com/LMCache/lmcache-vllm/issues/60",
            "https://github.com/LMCache/LMCache/issues/246",
            "https://github.com/vllm-project/production-stack/issues/574",
            "https://github.com/LMCache/LMCache/issues/629",
        ),
    ),
    Problem(
        code="KVD722",
        name="vllm-copy-of-lmcache-too-old",
        severity=Severity.CRASH,
        title="vLLM's own copy of LMCache's connector asks this LMCache for what it no longer has.",
        shows=tuple(
            Failed(text=text, within=f"lmcache_integration/{file}:<module>")
            for file in _NATIVE
            for text in ("No module named 'lmcache.<what>'", "cannot import name '<what>' from 'lmcache.")
        ),
        sentence="vLLM's copy of the connector asks LMCache for {what}, which this release does not have",
        connectors=("LMCacheConnectorV1", "LMCacheMPConnector", "MultiConnector"),
        cause="The copy in vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration was taken from LMCache "
        "0.3.9 to 0.3.12 and never brought on. It is used with `use_native: true`, by vLLM 0.11's LMCacheMPConnector "
        "always, and by that of vLLM 0.15 to 0.25 where LMCache has no connector of its own.",
        now='take "use_native" out of kv_connector_extra_config; with LMCacheMPConnector: LMCache 0.4.4 or newer (vLLM '
        "0.20 on), vLLM 0.11: LMCache 0.3.9",
        good="LMCache's own connector: LMCacheConnectorV1 without use_native, or LMCacheMPConnector with vLLM 0.26 or "
        "newer and LMCache 0.5.2 or newer",
    ),
    Problem(
        code="KVD723",
        name="mp-connector-of-another-release",
        severity=Severity.CRASH,
        title="The multi-process connector and LMCache's adapter below it are of different releases.",
        shows=(
            Failed(kind="TypeError", text="ParallelStrategy.__init__() takes"),
            Failed(kind="TypeError", text="LMCacheMPSchedulerAdapter.<method>() got an unexpected keyword argument"),
            Failed(kind="TypeError", text="LMCacheMPWorkerAdapter.<method>() got an unexpected keyword argument"),
            Failed(kind="TypeError", text="LMCacheMPSchedulerAdapter.__init__() missing"),
            Failed(kind="TypeError", text="LMCacheMPWorkerAdapter.__init__() missing"),
            Failed(kind="AttributeError", text="'LMCacheMPWorkerAdapter' object has no attribute"),
            Failed(kind="AttributeError", text="'LMCacheMPSchedulerAdapter' object has no attribute"),
            Failed(kind="ZMQError", text="Invalid argument (addr='t')"),
            Failed(kind="ImportError", text="cannot import name 'BlockAllocationRecord' from 'lmcache"),
            Failed(
                kind="ImportError",
                text="cannot import name 'ParallelStrategy' from 'lmcache.integration.vllm.vllm_multi",
            ),
        ),
        said=(
            r"LMCacheMP(?:Worker|Scheduler)Adapter|\bmulti_process_adapter",
            r"(?i)\bfallback|in-tree|vllm's copy|out of sync",
            r"AttributeError|TypeError",
        ),
        connectors=("LMCacheMPConnector", "MultiConnector"),
        cause="vLLM's copy of the connector (0.20 to 0.33), or LMCache's lmcache_mp_connector_0180 and _0201, calls "
        "the adapter as it was in 0.4.4 to 0.4.6: ParallelStrategy has other fields from 0.4.7 on, and 0.5.0 takes a "
        "list of servers (`addr='t'` is the first letter of tcp://). Where LMCache's adapter is not imported, vLLM "
        "takes its own (lmcache_integration), which lacks cache_salt and get_block_ids_with_load_errors.",
        now=_MP,
        good="vLLM 0.26 or newer with LMCache 0.5.2 or newer: the log then says `Using external LMCacheMPConnector`",
        threads=(
            "https://github.com/LMCache/LMCache/issues/4134",
            "https://github.com/LMCache/LMCache/issues/4267",
        ),
    ),
    Problem(
        code="KVD724",
        name="mp-connector-needs-newer-vllm",
        severity=Severity.CRASH,
        title="LMCache's multi-process connector asks for parts of a newer vLLM.",
        shows=(
            Failed(text="cannot import name '<what>' from 'vllm.v1.kv_cache_interface'", within="lmcache/"),
            Failed(text="cannot import name '<what>' from 'vllm.distributed.kv_transfer", within="lmcache/"),
            Failed(text="cannot import name '<what>' from 'vllm.distributed.kv_events", within="lmcache/"),
            Failed(text="No module named '<what>.attention.backend'", within="lmcache/"),
        ),
        sentence="it imports {what}, which this vLLM does not have",
        cause="lmcache.integration.vllm.lmcache_mp_connector is for the newest vLLM: from LMCache 0.4.7 on it needs "
        "KVCacheSpecKind, which vLLM 0.20 does not have and 0.26 has.",
        now="for an older vLLM: LMCache 0.5.2 to 0.5.5 and "
        '"kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector_0201"',
        fixed={"vllm": "0.26.0"},
        threads=("https://github.com/LMCache/LMCache/issues/4134",),
    ),
    Problem(
        code="KVD725",
        name="lmcache-of-another-vllm",
        severity=Severity.CRASH,
        title="LMCache asks for what this vLLM does not have: the two releases do not go together.",
        shows=(
            *(
                Failed(kind="AttributeError", text=f"'{name}' object has no attribute '", within="lmcache/")
                for name in _VLLM_OBJECTS
            ),
            Failed(text="from 'vllm.utils", within="lmcache/"),
            Failed(text="from 'vllm.config", within="lmcache/"),
            Failed(text="from 'vllm.attention", within="lmcache/"),
            Failed(text="from 'vllm.sequence", within="lmcache/"),
            Failed(text="from 'vllm.vllm_flash_attn", within="lmcache/"),
            Failed(text="No module named 'vllm.attention", within="lmcache/"),
            Failed(text="No module named 'vllm.utils", within="lmcache/"),
            Failed(text="No module named 'vllm.worker", within="lmcache/"),
            Failed(text="No module named 'vllm.sequence", within="lmcache/"),
            Failed(text="No module named 'vllm.model_executor", within="lmcache/"),
        ),
        cause="vLLM has moved, renamed or dropped it, or has it only later. CacheBlend's attention code "
        "(lmcache/v1/compute) is the first to break; the connector itself (LMCacheConnectorV1) of LMCache 0.3.9 and "
        "newer imports with vLLM 0.32. Builds of LMCache from source follow the newest vLLM (resumed_req_ids: 0.11.1).",
        now="without `enable_blending` if the traceback goes through lmcache/v1/compute; else a release of LMCache, "
        "0.3.10 or newer, in place of a build from source",
        good="a pair that was released together: the image lmcache/vllm-openai:<LMCache's release> names its vLLM",
    ),
    Problem(
        code="KVD726",
        name="connector-with-two-arguments",
        severity=Severity.CRASH,
        title="A connector that is loaded from a module is too old for this vLLM: its constructor takes two arguments.",
        shows=(
            Failed(
                text="Connector <name> uses deprecated 2-argument constructor signature",
                at="vllm/distributed/kv_transfer/kv_connector/factory.py",
            ),
            Logged(
                text="Connector <name> uses deprecated 2-argument constructor signature. External",
                at="vllm/distributed/kv_transfer/kv_connector/factory.py",
            ),
        ),
        sentence="{name} takes two arguments, this vLLM hands three",
        releases={"vllm": ">=0.26.0"},
        cause="vLLM hands kv_cache_config as a third argument and refuses connectors without it. "
        "LMCacheConnectorV1Dynamic takes it from LMCache 0.4.1 on.",
        now='for LMCache: "kv_connector":"LMCacheConnectorV1" without kv_connector_module_path, or LMCache 0.4.1 or '
        "newer",
        good="LMCache 0.4.1 or newer; for a connector of your own: __init__(self, vllm_config, role, kv_cache_config)",
    ),
    Problem(
        code="KVD727",
        name="lmcache-lacks-kv-events",
        severity=Severity.CRASH,
        title="vLLM calls a method of LMCache's connector that this LMCache does not have.",
        shows=(Failed(kind="AttributeError", text="'LMCacheConnectorV1Impl' object has no attribute 'get_<what>'"),),
        sentence="LMCacheConnectorV1Impl has no get_{what}",
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        cause="vLLM 0.15 and newer asks for get_kv_events, which LMCache has from 0.3.10.post2 on.",
        now="pip install --upgrade --no-deps lmcache==0.4.1 (or newer, of this torch and CUDA)",
        fixed={"lmcache": "0.3.10.post2"},
    ),
    Problem(
        code="KVD730",
        name="transport-library-not-found",
        severity=Severity.CRASH,
        title="The transport's library lacks a library of the system.",
        shows=(
            Failed(text="libibverbs.so.1: cannot open shared object file"),
            Failed(text="librdmacm.so.1: cannot open shared object file"),
            Failed(text="libnuma.so.1: cannot open shared object file"),
            Failed(text="ascend_transport.so: cannot open shared object file"),
            Failed(text="libcufile.so.0: cannot open shared object file"),
        ),
        cause="Mooncake and NIXL need the RDMA libraries of the system, LMCache libnuma, GDS libcufile; the image has "
        "not got them. ascend_transport.so is in /usr/local/lib, where the loader does not look.",
        now="apt-get install -y libibverbs1 librdmacm1 ibverbs-providers libnuma1; Ascend: export "
        "LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/usr/local/lib; libcufile: CUDA's own package (libcufile-<release>)",
        good="these packages in the image",
        threads=("https://github.com/vllm-project/vllm-ascend/issues/6949",),
    ),
    Problem(
        code="KVD728",
        name="mp-connector-module-gone",
        severity=Severity.CRASH,
        title="The module of a multi-process connector is not in this LMCache.",
        shows=(
            Failed(kind="ModuleNotFoundError", text="No module named 'lmcache.integration.vllm.lmcache_mp_connector"),
            Failed(
                kind="ModuleNotFoundError", text="No module named 'lmcache.integration.vllm.vllm_multi_process_adapter'"
            ),
        ),
        connectors=("LMCacheMPConnector", "MultiConnector"),
        cause="lmcache_mp_connector came with LMCache 0.4.5; lmcache_mp_connector_0180 (for vLLM 0.18) is in 0.4.4 to "
        "0.5.5, lmcache_mp_connector_0201 (for vLLM 0.20) in 0.4.5 to 0.5.5, both are gone from 0.5.6 on; the adapter "
        "came with 0.3.13.",
        now="for vLLM 0.26 or newer: no kv_connector_module_path; for an older vLLM: LMCache 0.5.5 and "
        '"kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector_0201"',
        good="vLLM 0.26 or newer with LMCache 0.5.2 or newer",
        threads=("https://github.com/LMCache/LMCache/issues/4134",),
    ),
    Problem(
        code="KVD731",
        name="package-of-a-backend-missing",
        severity=Severity.CRASH,
        title="A package that a backend, a transport or the server needs is not installed.",
        shows=(
            *(Failed(text=f"No module named '{name}", within="lmcache/") for name in _OPTIONAL),
            Failed(text="No module named 'nixl"),
            Failed(text="No module named 'rixl"),
            Failed(text="No module named 'mooncake'"),
            Failed(text="No module named 'mooncake.<part>'"),
            Failed(text="No module named 'nvshmem"),
            Failed(text="Valkey support requires the glide_sync module", within="lmcache/"),
            Failed(text="Rust raw-block extension is not installed", within="lmcache/"),
        ),
        cause="A backend that the configuration names, or the server, needs a package that LMCache does not install by "
        "itself, or the image left it out.",
        now="pip install the package of that module: cupy-cuda12x or cupy-cuda13x for cupy (cupy-rocm-7-0 on ROCm), "
        "redis, valkey-glide (glide), valkey-glide-sync (glide_sync), aiofile, awscrt, infinistore, openai, nixl, "
        "mooncake-transfer-engine (CUDA 13: nixl-cu13, mooncake-transfer-engine-cuda13), nvshmem4py-cu12; for the C++ "
        "and Rust parts build LMCache from source (pip install -e .)",
        good="the package in the image, or a backend that needs none",
        threads=("https://github.com/LMCache/LMCache/issues/3326",),
    ),
    Problem(
        code="KVD732",
        name="unsupported-vllm-for-resumes",
        severity=Severity.CRASH,
        title="LMCache cannot read from this vLLM which requests were preempted.",
        shows=(
            Failed(
                kind="AttributeError",
                text="Unable to determine preemption status for request",
                at="lmcache/integration/vllm/vllm_v1_adapter.py",
            ),
        ),
        releases={"lmcache": ">=0.3.10"},
        cause="vLLM's scheduler output has neither `resumed_req_ids` nor `resumed_from_preemption`: it is a fork, or "
        "older than the releases that LMCache reads.",
        now="a vLLM of 0.11.2 to 0.32, as released",
        good="releases of vLLM and LMCache that were made for each other",
    ),
)
