"""Builds that fail, and packages around LMCache of a release that it does not expect."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_ISSUES = "https://github.com/LMCache/LMCache/issues"
_ASCEND = "https://github.com/LMCache/LMCache-Ascend/issues"
_CUDART = "libcudart.so.<release>: cannot open shared object file"

PROBLEMS = (
    Problem(
        code="KVD440",
        name="server-imports-vllm",
        severity=Severity.CRASH,
        title="The LMCache server dies at its start of an import of vLLM, which it does not need.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="This is not allowed since there's already a kernel registered",
                within="token_hasher.py:_init_none_hash",
            ),
            Failed(kind="RuntimeError", text="This is not allowed since there's already a kernel registered"),
        ),
        sentence="torch registers a kernel for the second time",
        releases={"lmcache": "<0.4.6"},
        cause="The server asks vLLM for its first hash, also with blake3, where it is not used. vLLM's import "
        "registers kernels of torch.distributed, which torch 2.11 refuses where they exist; the server catches "
        "ImportError, not this RuntimeError. That is it where token_hasher.py is in the traceback.",
        now="pip install -U 'lmcache>=0.4.6', or start `lmcache server` in an environment without vLLM: it computes "
        "the hash itself then",
        fixed={"lmcache": "0.4.6"},
        sure=False,
        threads=(f"{_ISSUES}/3414",),
    ),
    Problem(
        code="KVD442",
        name="metadata-class-renamed",
        severity=Severity.CRASH,
        title="Something that was made for LMCache before 0.3.13 asks for a class that LMCache has renamed.",
        shows=(
            Failed(text="cannot import name 'LMCacheEngineMetadata' from 'lmcache.config'"),
            Logged("cannot import name 'LMCacheEngineMetadata' from 'lmcache.config'"),
        ),
        releases={"lmcache": ">=0.3.13"},
        cause="LMCache 0.3.13 made LMCacheEngineMetadata (lmcache.config) into LMCacheMetadata. What imports it stands "
        "in the last frame: vLLM's own copy of the connector (vllm/.../lmcache_integration, from LMCache 0.3.9 to "
        "0.3.12), or a plugin such as lmcache-ascend of an older release.",
        now='no "use_native" in kv_connector_extra_config; LMCacheMPConnector: vLLM 0.20 and LMCache 0.4.4 or newer; '
        "a plugin: the release of the same number as LMCache; else pip install lmcache==0.3.12",
        good="LMCache's own connector (LMCacheConnectorV1 without use_native), and releases of the same month",
        threads=(f"{_ISSUES}/2853",),
    ),
    Problem(
        code="KVD443",
        name="experimental-switch-not-set",
        severity=Severity.CRASH,
        title="LMCache reads the settings of its old engine, and is run with the new one.",
        shows=(
            Failed(kind="AssertionError", text="LMCache experimental configuration is should be passed."),
            Failed(kind="AssertionError", text="LMCache v1 configuration is should be passed."),
        ),
        releases={"lmcache": "<0.3.9"},
        cause="Before LMCache 0.3 the engine for vLLM's V1 was `experimental`, and its settings are read only with "
        "LMCACHE_USE_EXPERIMENTAL=True in the environment: neither LM_CACHE_USE_EXPERIMENTAL nor a key in the file "
        "does it. 0.3 takes it as true unless it is set to false.",
        now="export LMCACHE_USE_EXPERIMENTAL=True (LMCACHE_, without a second underscore), and restart",
        good="LMCache 0.3.9 or newer, which has only that engine and needs no switch",
        threads=(f"{_ISSUES}/447",),
    ),
    Problem(
        code="KVD447",
        name="build-without-cuda-toolkit",
        severity=Severity.CRASH,
        title="LMCache is built from source where torch finds no CUDA toolkit.",
        shows=(
            Failed(kind="OSError", text="CUDA_HOME environment variable is not set"),
            Logged("CUDA_HOME environment variable is not set"),
        ),
        sentence="the build finds no nvcc",
        cause="pip compiles LMCache's kernels (once torchac_cuda's), since no wheel fits or -e was given. torch "
        "looks for nvcc in CUDA_HOME, in PATH and in /usr/local/cuda; images of type runtime have none, and sudo drops "
        "the variable.",
        now="pip install --only-binary :all: lmcache (wheels bring the kernels); to build: export "
        "CUDA_HOME=/usr/local/cuda with $CUDA_HOME/bin/nvcc in it, pip install --no-build-isolation -e .; on Ascend or "
        "without a GPU: NO_CUDA_EXT=1 pip install --no-build-isolation -e . (newer: NO_GPU_EXT=1)",
        good="a wheel of LMCache, or the image lmcache/vllm-openai; Ascend: lmcache-ascend beside LMCache",
        threads=(f"{_ISSUES}/388", f"{_ASCEND}/26"),
    ),
    Problem(
        code="KVD1852",
        name="build-with-nvcc-that-torch-does-not-know",
        severity=Severity.CRASH,
        title="nvcc cannot compile PyTorch's own headers: it is newer than this torch, or older.",
        shows=(
            Logged("List_inl.h:<line>: error: "),
            Logged("need 'typename' before 'decltype"),
        ),
        sentence="the compiler stumbles over a header of torch's",
        cause="LMCache (or another extension) is built from source with the nvcc of CUDA_HOME. nvcc 13.3 refuses code "
        "in torch's ATen/core/List_inl.h that 13.0 takes. torch only warns of `a minor version mismatch`.",
        now="the nvcc of torch's own CUDA (`python -c 'import torch; print(torch.version.cuda)'`): for 13.0 install "
        "cuda-toolkit-13-0, export CUDA_HOME=/usr/local/cuda-13.0 PATH=/usr/local/cuda-13.0/bin:$PATH, and build "
        "again; or without a build: pip install --only-binary :all: lmcache",
        good="one CUDA for nvcc and torch, in the image that builds; or a wheel",
        threads=(f"{_ISSUES}/4090", "https://github.com/ginkgo-project/ginkgo/issues/2031"),
    ),
    Problem(
        code="KVD1678",
        name="ascend-kernels-do-not-build",
        severity=Severity.CRASH,
        title="LMCache-Ascend cannot compile its kernels.",
        shows=(Failed(kind="RuntimeError", text="Failed to build c_ops.so: Command"),),
        cause="`exit status 127`: the shell did not find a command. cmake is not installed, or /bin/sh is no bash, and "
        "setup.py of 2025 begins with `source`. `exit status 1` or 2: the first error of cmake or the compiler above "
        "says it; look whether the submodule third_party/kvcache-ops is there.",
        now="pip install cmake ninja pybind11; git submodule update --init --recursive; in a container of Debian or "
        "Ubuntu `ln -sf bash /bin/sh`; then pip install --no-build-isolation -v -e .",
        good="an LMCache-Ascend from 2026 on, whose setup.py needs no bash, or its container",
        sure=False,
        threads=(f"{_ASCEND}/27",),
    ),
    Problem(
        code="KVD449",
        name="ascend-310p-reshape-fails",
        severity=Severity.CRASH,
        title="An operator of Ascend 310P fails: torch_npu is of another release than the operator wants.",
        shows=(
            Failed(kind="RuntimeError", text="current working operator name is ReshapeCacheOperation"),
            Logged("current working operator name is ReshapeCacheOperation"),
        ),
        cause="reshape_and_cache on 300I Duo (310P) works with one build of torch_npu only. It is vllm-ascend's "
        "operator: LMCache only runs beside it.",
        now="pip install torch==2.5.1 torch_npu==2.5.1.post1.dev20250619 (with vLLM 0.9.2, lmcache-ascend 0.3.7)",
        good="the torch_npu that the image of vllm-ascend for 310P brings",
        sure=False,
        threads=(f"{_ASCEND}/92", f"{_ASCEND}/167"),
    ),
    Problem(
        code="KVD450",
        name="otel-packages-differ",
        severity=Severity.CRASH,
        title="OpenTelemetry's exporter is newer than its SDK: LMCache's metrics cannot start.",
        shows=(
            Failed(
                kind="TypeError",
                text="MetricReader.__init__() got an unexpected keyword argument 'otel_component_type'",
            ),
        ),
        releases={"lmcache": ">=0.4.3"},
        cause="opentelemetry-exporter-prometheus 0.62b1 hands over an argument that opentelemetry-sdk has from 1.41.0 "
        "on; pip keeps an older SDK, as both only ask for a minimum.",
        now="pip install 'opentelemetry-exporter-prometheus<=0.61b0' (or -U opentelemetry-api opentelemetry-sdk "
        "'opentelemetry-exporter-otlp>=1.41'); until then lmcache server --disable-observability",
        good="OpenTelemetry's packages of one release: the SDK 1.41.0 or newer with that exporter",
        threads=("https://github.com/LMCache/LMCache/pull/3000",),
    ),
    Problem(
        code="KVD451",
        name="pkg-resources-gone",
        severity=Severity.CRASH,
        title="An old LMCache imports pkg_resources, which setuptools no longer has.",
        shows=(Failed(kind="ModuleNotFoundError", text="No module named 'pkg_resources'", within="lmcache/"),),
        releases={"lmcache": "<0.3.9"},
        cause="lmcache/usage_context.py before 0.3.9 imports pkg_resources for the usage statistics. New environments "
        "(uv, slim images) have no setuptools, and its newest releases no pkg_resources.",
        now="pip install 'setuptools<81', and restart",
        fixed={"lmcache": "0.3.9"},
    ),
    Problem(
        code="KVD707",
        name="torch-without-cuda",
        severity=Severity.CRASH,
        title="The installed torch was built without CUDA, and a compiled library asks for its CUDA part.",
        shows=(
            Failed(kind="ImportError", text="libc10_cuda.so: cannot open shared object file"),
            Failed(kind="ImportError", text="libtorch_cuda.so: cannot open shared object file"),
            Failed(kind="AssertionError", text="Torch not compiled with CUDA enabled"),
            Failed(kind="RuntimeError", text="Tried to instantiate dummy base class"),
        ),
        cause="On a GPU of NVIDIA: a later pip install has put torch's CPU wheel (or one for ROCm) over the one that "
        "vLLM had brought. On XPU, HPU, NPU: the code in the last frame but torch's is written for CUDA only.",
        now="pip install --force-reinstall vllm==<your release>, which brings its own torch; python -c 'import torch; "
        "print(torch.__version__, torch.version.cuda)' must name a CUDA. Another device: without that connector",
        good="install what comes after vLLM with --no-deps, or with vLLM's torch as a constraint (pip install -c)",
    ),
    Problem(
        code="KVD1760",
        name="mooncake-of-another-cuda",
        severity=Severity.CRASH,
        title="Mooncake's wheel was built for another CUDA than the one that is installed, or for one at all.",
        shows=(
            *(Failed(text=_CUDART, source=f"from mooncake.{module} import") for module in ("engine", "store")),
            Failed(text=_CUDART, source="import mooncake"),
            Logged("mooncake/<program>: error while loading shared libraries: libcudart.so.<release>"),
        ),
        sentence="Mooncake asks for libcudart.so.{release}",
        replaces=("KVD704", "KVD386"),
        cause="mooncake-transfer-engine is of CUDA 12, mooncake-transfer-engine-cuda13 of CUDA 13. Without a card of "
        "NVIDIA neither loads; -non-cuda before 0.3.13.post1 wants libcudart.so.12 too, by mistake.",
        now="pip uninstall -y mooncake-transfer-engine, then CUDA 13: pip install mooncake-transfer-engine-cuda13; "
        "CUDA 12: pip install mooncake-transfer-engine nvidia-cuda-runtime-cu12; no card of NVIDIA: pip install "
        "'mooncake-transfer-engine-non-cuda>=0.3.13.post1' (Ascend: -npu, Moore Threads: -musa)",
        good="one of these packages alone, for the CUDA that python -c 'import torch; print(torch.version.cuda)' names",
        threads=(
            "https://github.com/vllm-project/vllm/issues/42511",
            "https://github.com/kvcache-ai/Mooncake/issues/1298",
            "https://github.com/kvcache-ai/Mooncake/issues/967",
            "https://github.com/kvcache-ai/Mooncake/issues/3314",
        ),
    ),
    Problem(
        code="KVD1763",
        name="offload-plugin-of-another-vllm",
        severity=Severity.CRASH,
        title="A plugin for vLLM's OffloadingConnector imports modules of another release of vLLM.",
        shows=(Failed(kind="ModuleNotFoundError", text="No module named 'vllm.v1.kv_offload.<module>'"),),
        sentence="this vLLM has no kv_offload/{module}",
        cause="vLLM 0.26 has kv_offload/base.py, cpu/ and tiering/ where 0.20 and older have abstract.py, spec.py, "
        "mediums.py and worker/. What `spec_module_path` or `spec_name` names (NPUOffloadingSpec of vllm-ascend, "
        "SharedStorageOffloadingSpec of llmd_fs_backend) was written for the other.",
        now='files: no plugin, `"spec_name": "TieringOffloadingSpec"` with secondary_tiers of type fs (vLLM 0.26 or '
        "newer); NPUs: AscendStoreConnector, or vllm-ascend with pull request 10575, without spec_name and "
        "spec_module_path; else the plugin's release for this vLLM",
        good="plugin and vLLM of one month",
        threads=(
            "https://github.com/vllm-project/vllm-ascend/issues/10830",
            "https://github.com/llm-d/llm-d-kv-cache/pull/632",
        ),
    ),
    Problem(
        code="KVD1766",
        name="ascend-libraries-of-another-release",
        severity=Severity.CRASH,
        title="torch_npu or a plugin for Ascend does not load: CANN's or ATB's libraries are of another release.",
        shows=(
            Failed(kind="ImportError", text="libtorch_npu.so: undefined symbol: <symbol>"),
            Failed(kind="ImportError", text="undefined symbol: _ZN3atb"),
            Failed(kind="ImportError", text="libatb.so: cannot open shared object file"),
        ),
        cause="torch_npu is compiled against one CANN and its ATB (nnal). The environment has another, or the shell "
        "did not read its set_env.sh.",
        now="source /usr/local/Ascend/ascend-toolkit/set_env.sh; source /usr/local/Ascend/nnal/atb/set_env.sh; python "
        "-c 'import torch, torch_npu' must say nothing; else the toolkit and nnal that vllm-ascend's installation page "
        "names for this release, or its image",
        good="the image quay.io/ascend/vllm-ascend of the release, in which they fit",
        threads=("https://github.com/vllm-project/vllm-ascend/issues/117",),
    ),
    Problem(
        code="KVD1728",
        name="torch-not-for-this-gpu",
        severity=Severity.CRASH,
        title="PyTorch itself has no kernels for this GPU.",
        shows=(
            Failed(text="no kernel image is available for execution on the device", source="torch."),
            Logged("with CUDA capability sm_<architecture> is not compatible with the current PyTorch installation"),
        ),
        sentence="an operation of torch itself has no kernel",
        replaces=("KVD710",),
        cause="The torch of this image is older than the GPU: RTX 50 (12.0) needs torch 2.7 or newer for CUDA 12.8. "
        "The connector has no part in it.",
        now="python3 -c 'import torch; print(torch.__version__, torch.cuda.get_arch_list())' in this container; a "
        "newer image, whose list has this GPU's architecture (sm_120)",
        good="torch, vLLM and LMCache that are all built for this architecture",
        threads=(
            "https://github.com/vllm-project/production-stack/issues/528",
            "https://github.com/llm-d/llm-d/issues/84",
        ),
    ),
)
