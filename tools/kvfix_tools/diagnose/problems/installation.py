"""What is installed does not load: another torch, CUDA, driver, system or GPU than the one that it was built for."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_REBUILD = (
    "pip install --force-reinstall --no-deps --no-build-isolation --no-binary lmcache lmcache==<the release you want>, "
    "in vLLM's own environment (it compiles: nvcc of torch's CUDA is needed); then python -c 'import torch, "
    "lmcache.c_ops' (lmcache.cuda_ops from 0.5.4 on) must say nothing"
)
#: How names of torch's own functions begin.
_TORCH = (
    "_ZN3c10",
    "_ZNK3c10",
    "_ZN2at",
    "_ZNK2at",
    "_ZN5torch",
    "_ZNK5torch",
    "_ZTIN3c10",
    "_ZTVN3c10",
    "_ZTIN5torch",
)
_KERNEL = "no kernel image is available for execution on the device"

PROBLEMS = (
    Problem(
        code="KVD701",
        name="lmcache-of-another-torch",
        severity=Severity.CRASH,
        title="LMCache's compiled library was built for another torch than the one that is installed, and does not "
        "load.",
        shows=(
            *(Failed(kind="ImportError", text=f"lmcache/<file>.so: undefined symbol: {name}") for name in _TORCH),
            *(Logged(text=f"lmcache/<file>.so: undefined symbol: {name}") for name in _TORCH),
            *(Failed(kind="ImportError", text=f"c_ops.cpython<file>.so: undefined symbol: {name}") for name in _TORCH),
        ),
        said=(r"(?i)lmcache", r"undefined symbol", r"_ZNK?\d|\btorch\b"),
        sentence="LMCache's library asks torch for a function that this torch does not have",
        cause="The library was compiled against another torch. pip does not see it: LMCache's wheels ask for torch "
        "without a release. A name that ends in `Ss` is of a torch with the old C++ ABI; `SetDeviceEa` is torch 2.7 or "
        "older, `SetDeviceEab` newer.",
        now=_REBUILD,
        good="install vLLM first, then LMCache into the same environment, and never another torch after it; or an "
        "image in which they were built together (lmcache/vllm-openai)",
        threads=(
            "https://github.com/ray-project/ray/issues/56695",
            "https://github.com/llm-d/llm-d/issues/325",
            "https://github.com/LMCache/LMCache/issues/1712",
            "https://github.com/LMCache/LMCache/issues/1294",
            "https://github.com/LMCache/LMCache/issues/681",
        ),
    ),
    Problem(
        code="KVD702",
        name="torchac-of-another-torch",
        severity=Severity.CRASH,
        title="torchac_cuda, a separate package of LMCache 0.2, was built for another torch and does not load.",
        shows=(Failed(kind="ImportError", text="torchac_cuda.cpython<file>undefined symbol"),),
        said=(r"torchac_cuda", r"undefined symbol"),
        sentence="torchac_cuda does not load with this torch",
        releases={"lmcache": "<0.3.9"},
        cause="LMCache 0.2 keeps its kernels in a package of its own, which must be compiled against the installed "
        "torch.",
        now="pip install --force-reinstall --no-build-isolation --no-deps torchac_cuda, in vLLM's environment",
        fixed={"lmcache": "0.3.9"},
        threads=(
            "https://github.com/LMCache/LMCache/issues/544",
            "https://github.com/LMCache/LMCache/issues/523",
        ),
    ),
    Problem(
        code="KVD703",
        name="lmcache-rocm-build-incomplete",
        severity=Severity.CRASH,
        title="LMCache's library for ROCm lacks functions of its own, and does not load.",
        shows=(
            Failed(kind="ImportError", text="lmcache/<file>.so: undefined symbol: <part>alloc_pinned"),
            Failed(kind="ImportError", text="lmcache/<file>.so: undefined symbol: alloc_pinned"),
        ),
        said=(
            r"(?i)lmcache",
            r"(?i)\brocm\b|\bhip\b|\bamd\b",
            r"alloc_pinned_|mem_alloc\.cpp|(?i:lmcache)[ =v]{1,2}0\.3\.[45]\b",
        ),
        releases={"lmcache": "<0.3.9"},
        cause="The build for ROCm left out the source file with the allocators of pinned memory (0.3.4 and 0.3.5).",
        now="CXX=hipcc BUILD_WITH_HIP=1 pip install --no-build-isolation --no-deps --no-binary lmcache lmcache==0.3.9",
        fixed={"lmcache": "0.3.9"},
        threads=("https://github.com/LMCache/LMCache/issues/1465", "https://github.com/LMCache/LMCache/issues/1364"),
    ),
    Problem(
        code="KVD704",
        name="cuda-runtime-of-another-release",
        severity=Severity.CRASH,
        title="A package was built for another release of CUDA than the one that is installed.",
        shows=(
            Failed(text="libcudart.so.<release>: cannot open shared object file"),
            Failed(text="libnvrtc.so.<release>: cannot open shared object file"),
            Failed(text="libcublas.so.<release>: cannot open shared object file"),
            Logged(text="libcudart.so.<release>: cannot open shared object file"),
        ),
        sentence="a wheel of CUDA {release} is installed where the libraries of CUDA {release} are not",
        cause="The package whose import stands last in the traceback links CUDA's runtime of one major release, and "
        "the environment has another: LMCache's wheels up to 0.4.4 and mooncake-transfer-engine are of CUDA 12, "
        "LMCache's from 0.4.5 on of CUDA 13, and vLLM's image of 0.20.2 is of CUDA 13.",
        now="Mooncake: pip uninstall -y mooncake-transfer-engine, pip install mooncake-transfer-engine-cuda13 (no card "
        "of NVIDIA: -non-cuda). Else libcudart.so.12: pip install nvidia-cuda-runtime-cu12, and into LD_LIBRARY_PATH "
        "what python -c 'import nvidia.cuda_runtime as c; print(c.__path__[0] + \"/lib\")' prints; libcudart.so.13: "
        "pip install nvidia-cuda-runtime, nvidia.cu13 in that line",
        good="wheels of one CUDA for vLLM, torch, LMCache, nixl and mooncake: for LMCache the release that fits, or a "
        "build in place (--no-build-isolation --no-binary lmcache)",
        threads=("https://github.com/vllm-project/vllm/issues/52300",),
    ),
    Problem(
        code="KVD151",
        name="nixl-ep-of-another-cuda",
        severity=Severity.CRASH,
        title="vLLM does not start: nixl_ep, which it does not need here, is built for another CUDA.",
        shows=(Failed(kind="ImportError", text="<library>: cannot open shared object", through="/nixl_ep/"),),
        sentence="nixl_ep asks for {library}",
        releases={"vllm": "<0.26"},
        replaces=("KVD704",),
        cause="vLLM imports nixl_ep wherever it finds the folder, also without expert parallelism. The wheel is of "
        "another CUDA than the image.",
        now="move the folder away that the traceback names (mv .../nixl_ep .../nixl_ep.off); where NixlConnector is "
        "used: pip uninstall -y nixl nixl-cu12 && pip install nixl-cu13 (CUDA 12 images: the other way round); restart",
        good="vLLM 0.26.0 or newer, which tries the import and goes on without it",
        threads=(
            "https://github.com/kaito-project/kaito/issues/2086",
            "https://github.com/vllm-project/vllm/issues/39923",
        ),
    ),
    Problem(
        code="KVD705",
        name="no-driver-in-the-container",
        severity=Severity.CRASH,
        title="The process sees no NVIDIA driver.",
        shows=(
            Failed(text="libcuda.so.1: cannot open shared object file"),
            Failed(text="Found no NVIDIA driver on your system"),
            Logged(text="libcuda.so.1: cannot open shared object file"),
        ),
        sentence="libcuda.so.1, which comes with the driver, is not in this container or on this machine",
        cause="The container was started without access to the GPUs, or the machine has no driver.",
        now="docker run --gpus all (Kubernetes: resources.limits nvidia.com/gpu, also for the LMCache server's pod), "
        "then nvidia-smi inside",
        good="the NVIDIA container toolkit as the runtime of every container that runs vLLM or the LMCache server",
    ),
    Problem(
        code="KVD706",
        name="torch-library-not-found",
        severity=Severity.CRASH,
        title="A compiled library does not find torch's libraries.",
        shows=(
            Failed(kind="ImportError", text="libc10.so: cannot open shared object file"),
            Failed(kind="ImportError", text="libtorch.so: cannot open shared object file"),
            Failed(kind="ImportError", text="libtorch_cpu.so: cannot open shared object file"),
            Failed(kind="ImportError", text="libtorch_python.so: cannot open shared object file"),
        ),
        sure=False,
        cause="torch was not imported before it: then only the test is wrong, not the installation. If it comes from "
        "vLLM, torch is damaged or in another environment: python -c 'import torch' tells.",
        now="python -c 'import torch, lmcache.c_ops' (lmcache.cuda_ops from 0.5.4 on): import torch first",
        good="torch, vLLM and LMCache in one environment",
    ),
    Problem(
        code="KVD708",
        name="nvjitlink-of-another-release",
        severity=Severity.CRASH,
        title="CUDA's nvJitLink of another release is found first, and torch's libraries do not load.",
        shows=(
            Failed(kind="ImportError", text="undefined symbol: __nvJitLink<symbol>"),
            Logged(text="undefined symbol: __nvJitLink<symbol>"),
        ),
        sentence="a libnvJitLink without __nvJitLink{symbol} is found before torch's own",
        cause="LD_LIBRARY_PATH names a CUDA of the system that is older than torch's.",
        now="unset LD_LIBRARY_PATH, and start again; or put torch's own first: python -c 'import nvidia.nvjitlink as "
        'n; print(n.__path__[0] + "/lib")\' (CUDA 13: nvidia.cu13)',
        good="no CUDA of the system in LD_LIBRARY_PATH: torch's wheels bring theirs",
        threads=("https://github.com/LMCache/LMCache/issues/180",),
    ),
    Problem(
        code="KVD709",
        name="system-library-too-old",
        severity=Severity.CRASH,
        title="A wheel was built for a newer system: glibc or libstdc++ of this one is too old.",
        shows=(
            Failed(kind="ImportError", text="version `GLIBC_<release>' not found"),
            Failed(kind="ImportError", text="version `GLIBCXX_<release>' not found"),
            Failed(kind="ImportError", text="version `CXXABI_<release>' not found"),
        ),
        sentence="the system has no C or C++ library of the release {release} or newer",
        cause="A compiled package asks for a newer C or C++ library than the one that is found. GLIBC is the system's; "
        "GLIBCXX and CXXABI are libstdc++'s, of which conda may bring an older one.",
        now="GLIBCXX, CXXABI: conda install -c conda-forge libstdcxx-ng, or LD_LIBRARY_PATH=$CONDA_PREFIX/lib; GLIBC: "
        "a newer system or container (Ubuntu 22.04 or newer)",
        good="an image in which the packages were built (lmcache/vllm-openai, vllm/vllm-openai)",
    ),
    Problem(
        code="KVD710",
        name="kernels-not-for-this-gpu",
        severity=Severity.CRASH,
        title="A compiled library has no kernels for this GPU.",
        shows=(Failed(text=_KERNEL), Logged(text=_KERNEL)),
        sentence="a library has no kernels for this GPU's architecture",
        cause="The wheel was compiled for other GPU architectures. If the traceback ends in lmcache/ (to_gpu, "
        "from_gpu, multi_layer_kv_transfer) it is LMCache's library, else vLLM's, torch's or another one's. CUDA "
        "reports it late: with CUDA_LAUNCH_BLOCKING=1 the traceback names the right one.",
        now="nvidia-smi --query-gpu=compute_cap --format=csv,noheader, then for LMCache: TORCH_CUDA_ARCH_LIST=<that> "
        "pip install --force-reinstall --no-deps --no-build-isolation --no-binary lmcache lmcache==<your release>",
        good="wheels that were built for this architecture; with 12.0 (RTX 50) and 12.1 (GB10) mostly a build of your "
        "own",
        threads=(
            "https://github.com/LMCache/LMCache/issues/1646",
            "https://github.com/gpustack/gpustack/issues/2965",
            "https://github.com/ai-dynamo/dynamo/issues/7569",
        ),
    ),
    Problem(
        code="KVD711",
        name="driver-too-old",
        severity=Severity.CRASH,
        title="The NVIDIA driver is older than the CUDA that the packages were built with.",
        shows=(
            Failed(text="the provided PTX was compiled with an unsupported toolchain"),
            Failed(text="CUDA driver version is insufficient for CUDA runtime version"),
            Failed(text="The NVIDIA driver on your system is too old"),
            Failed(text="forward compatibility was attempted on non supported HW"),
            Logged("requirement error: unsatisfied condition: cuda>="),
        ),
        cause="The packages are of a newer CUDA than the driver knows; nvidia-smi says up to which CUDA it goes. On "
        "AMD, with cupy in the traceback: cupy is the one for CUDA (cupy.cuda.runtime.is_hip is False).",
        now="wheels or an image of the CUDA that nvidia-smi shows in its first line, or older; on AMD pip uninstall "
        "cupy-cuda12x cupy-cuda13x, pip install cupy-rocm-7-0",
        good="a newer driver: 580 or newer for CUDA 13",
    ),
    Problem(
        code="KVD712",
        name="vllm-extension-not-loaded",
        severity=Severity.CRASH,
        title="vLLM's own compiled library does not load.",
        shows=(
            Failed(kind="ImportError", text="vllm/_C<file>.so: undefined symbol: <what>"),
            Failed(kind="ImportError", text="_C.abi3.so: undefined symbol: <what>"),
            Failed(kind="ImportError", text="vllm/_moe_C<file>.so: undefined symbol: <what>"),
            Logged(text="Failed to import from vllm._C<file>undefined symbol: <what>"),
            Failed(kind="AttributeError", text="'_OpNamespace' '_C<file>' object has no attribute '<what>'"),
        ),
        sentence="vllm/_C does not load ({what} is missing)",
        cause="It was built for another torch than the one that is installed: mostly another package, or LMCache "
        "installed after vLLM, has replaced torch.",
        now="pip install --force-reinstall vllm==<your release>, then LMCache with --no-deps",
        good="one environment in which pip check says nothing; torch as vLLM's release asks for it",
    ),
    Problem(
        code="KVD713",
        name="lmcache-kernels-missing-slow",
        severity=Severity.SLOW,
        title="LMCache found no compiled kernels for CUDA, and copies with torch: slow.",
        shows=(
            Logged(
                text="compiled extension not found; CudaDeviceOps stays on the torch baseline",
                at="lmcache/v1/platform/cuda/device_ops.py",
            ),
            Logged(
                text="compiled extension not found; CudaDeviceOps stays on the torch baseline",
                at="lmcache/v1/platform/devices/cuda/device_ops.py",
            ),
        ),
        releases={"lmcache": ">=0.5.3"},
        cause="The library was not compiled, or does not load with this torch or CUDA: LMCache says `not found` for "
        "both.",
        now="python -c 'import torch, lmcache.cuda_ops' (lmcache.c_ops before 0.5.4) shows the true error; then "
        + _REBUILD.partition(";")[0],
        good="a wheel that was built for this torch and CUDA",
    ),
    Problem(
        code="KVD714",
        name="lmcache-without-its-library",
        severity=Severity.CRASH,
        title="LMCache is there, and its compiled part is not.",
        shows=(
            Failed(text="No module named 'lmcache.c_ops'"),
            Failed(text="cannot import name 'c_ops' from 'lmcache'"),
            Failed(text="No module named 'lmcache.cuda_ops'"),
            Failed(text="No module named 'lmcache.native_storage_ops'"),
            Failed(text="No module named 'lmcache.lmcache_native'"),
        ),
        replaces=("KVD741",),  # of it the log has no more than vLLM's line about V0, which ends nothing here
        cause="It was installed without being compiled, or a source folder named lmcache in the working directory or "
        "in PYTHONPATH is imported instead of the installed package.",
        now="start from another directory; python -c 'import lmcache; print(lmcache.__file__)' must name "
        "site-packages. If it does: " + _REBUILD.partition(";")[0],
        good="LMCache from a wheel, or compiled in vLLM's environment",
        threads=("https://github.com/LMCache/LMCache/issues/423",),
    ),
)
