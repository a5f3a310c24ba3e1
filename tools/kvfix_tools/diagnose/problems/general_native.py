"""Failures of any code that CUDA, a collective, a compiler or native code explains. For what no other record knows."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem, either, ended_by

PROBLEMS = (
    Problem(
        code="KVD240",
        name="memory-access-of-a-kernel-refused",
        general=True,
        severity=Severity.CRASH,
        title="A kernel on the GPU used memory that it may not use.",
        shows=(
            *either("an illegal memory access was encountered", "misaligned address", "unspecified launch failure"),
            *either("CUDA_ERROR_ILLEGAL_ADDRESS"),
            Died("an illegal memory access was encountered"),
        ),
        cause="CUDA reports it at a later call: the traceback shows who waited, not which kernel did it. With a "
        "connector the usual ones are block ids beyond the KV cache and KV memory that was freed or moved (sleep, "
        "reload); without it, kernels built for another torch.",
        now="with `enable_cross_layers_blocks` in kv_connector_extra_config: once without it. CUDA_LAUNCH_BLOCKING=1 "
        "once, with --enforce-eager: then the traceback is right. Once without --kv-transfer-config decides whether "
        "the connector has part in it",
        good="what the first traceback of that run names",
        sure=False,
    ),
    Problem(
        code="KVD995",
        name="index-in-a-kernel-out-of-range",
        general=True,
        severity=Severity.CRASH,
        title="A kernel on the GPU was given an index beyond its table.",
        shows=either("device-side assert triggered", "CUDA_ERROR_ASSERT"),
        cause="A token id beyond the vocabulary, a position beyond the rotary table (--max-model-len), a slot or block "
        "id beyond the KV cache, or probabilities that are not a number. The line with `Assertion` in standard error "
        "(IndexKernel.cu, vectorized_gather, TensorCompare) names which; the traceback shows only who waited.",
        now="grep -m1 Assertion on the worker's standard error. Drafts on: without --speculative-config. Then once "
        "CUDA_LAUNCH_BLOCKING=1 with --enforce-eager, and once without --kv-transfer-config: that decides whether "
        "blocks of a connector have part in it",
        good="what the Assertion names",
        sure=False,
    ),
    Problem(
        code="KVD997",
        name="driver-refuses-arguments",
        general=True,
        severity=Severity.CRASH,
        title="CUDA refused the arguments of a launch or of a copy.",
        shows=either("CUDA error: invalid argument", "CUDA error: invalid configuration argument"),
        cause="A kernel that asks for more shared memory, threads or a feature than this GPU has (built for another "
        "architecture: kernels for 9.0 and 10.0 on 12.0), or a copy of memory that is not allocated or registered. The "
        "innermost frame is near: a quantization or attention kernel is the first, a copy of KV the second; at a start "
        "with LMCache it may be the pinning of its CPU pool.",
        now="nvidia-smi --query-gpu=compute_cap --format=csv,noheader, then another --attention-backend or "
        "--moe-backend (or the model without that quantization); once without --kv-transfer-config decides whether the "
        "connector has part in it, once with LMCACHE_MAX_LOCAL_CPU_SIZE=5 whether it is pinning",
        good="a build whose kernels are for this GPU",
        sure=False,
    ),
    Problem(
        code="KVD998",
        name="step-without-requests-fails",
        severity=Severity.CRASH,
        title="A data parallel engine failed in a step without requests.",
        shows=(Failed(text="CUDA error", within="execute_dummy_batch"),),
        cause="With data parallelism an idle engine computes empty steps beside the busy ones. They touch the KV cache "
        "and the weights: one that is asleep or woken in part (wake_up with tags), or a collective whose other rank is "
        "gone, fails here.",
        now="the first error of the other ranks decides; with sleep mode: no requests to any rank between sleep and "
        "wake_up of both tags (weights, kv_cache)",
        good="the order: all ranks asleep, all awake",
        sure=False,
    ),
    Problem(
        code="KVD241",
        name="gpu-is-broken",
        general=True,
        severity=Severity.CRASH,
        title="The GPU or its link has a fault of hardware.",
        shows=(
            *either("uncorrectable ECC error", "CUDA error: uncorrectable NVLink", "fallen off the bus"),
            *either("hardware stack error", "system not yet initialized"),
        ),
        cause="The driver says so; no software above it causes this. `dmesg | grep -i xid` has the number of the "
        "fault. `system not yet initialized` is a fabric manager that does not run (NVSwitch machines).",
        now="drain the node: nvidia-smi -q -d ECC, reset the GPU or reboot; systemctl status nvidia-fabricmanager",
        good="another node",
    ),
    Problem(
        code="KVD242",
        name="gpu-not-there",
        general=True,
        severity=Severity.CRASH,
        title="The process has no GPU, or fewer than it asks for.",
        shows=either(
            "No CUDA GPUs are available",
            "invalid device ordinal",
            "no CUDA-capable device is detected",
            "Failed to infer device type",
            "CUDA error: initialization error",
            "could not select device driver",
        ),
        cause="The container was started without GPUs, CUDA_VISIBLE_DEVICES names too few, or the driver is not "
        "loaded. `invalid device ordinal` on the second machine of an engine: LMCache before 0.3.9 takes the rank of "
        "the whole engine for the number of a GPU (KVD456); its frame `_init_lmcache_engine` decides.",
        now="several machines: LMCache 0.3.9 or newer; nvidia-smi in this container; docker run --gpus all, or "
        "resources.limits nvidia.com/gpu; CUDA_VISIBLE_DEVICES with as many as there are ranks",
        good="the container's specification",
        sure=False,
    ),
    Problem(
        code="KVD243",
        name="collective-of-the-ranks-failed",
        general=True,
        severity=Severity.CRASH,
        title="A collective operation of the ranks failed or did not end.",
        shows=(
            *either(
                "NCCL error", "NCCL Error", "ncclInternalError", "ncclSystemError", "ncclRemoteError", "HCCL error"
            ),
            *either("Watchdog caught collective operation timeout", "gloo/transport"),
            Failed(kind="DistBackendError"),
            Failed(kind="DistNetworkError"),
        ),
        cause="A rank that fails or hangs lets all others fail here: the rank whose log has another error first is "
        "the cause. If none has, it is the network between the ranks, or /dev/shm (64 MB unless --shm-size is set).",
        now="the first error of the other ranks; if there is none: NCCL_DEBUG=INFO, --shm-size 16g (docker run) or "
        "--ipc host",
        good="what ends the first rank's error",
        sure=False,
    ),
    Problem(
        code="KVD244",
        name="tensors-on-two-devices",
        general=True,
        severity=Severity.CRASH,
        title="Code was given tensors of different devices.",
        shows=either("Expected all tensors to be on the same device", "is on cpu, but", "but got a CPU tensor"),
        cause="In a connector: a rank uses a device that is not its own (CUDA_VISIBLE_DEVICES per rank against the "
        "local rank), or a buffer in host memory where the code expects the GPU's. The message names both devices.",
        now="one value of CUDA_VISIBLE_DEVICES for all ranks of an engine; the connector's buffer device as its "
        "examples have it",
        good="report it with `kvfix-diagnose LOG --issue FILE.md`: the code has to move the tensor",
        sure=False,
    ),
    Problem(
        code="KVD247",
        name="kernel-cannot-be-built",
        general=True,
        severity=Severity.CRASH,
        title="A kernel or an extension could not be compiled at run time.",
        shows=(
            *either("Error compiling objects for extension", "Error building extension", "Ninja is required"),
            *either("mismatches the version that was used to compile PyTorch"),
            Failed(kind="CalledProcessError"),
            Failed(kind="CompilationError"),
            Failed(kind="OutOfResources"),
            *either("Failed to find C compiler", "Could not find nvcc"),
        ),
        cause="A compiler, its headers (python3-dev, CUDA) or a writable cache folder is missing, or the kernel does "
        "not fit this GPU. The compiler's own message stands above the traceback.",
        now="gcc --version, nvcc --version, ninja --version in the container; an image of the kind `-devel`; HOME and "
        "TRITON_CACHE_DIR writable",
        good="an image with the compiler",
        sure=False,
    ),
    Problem(
        code="KVD249",
        name="native-code-aborted",
        general=True,
        severity=Severity.CRASH,
        title="Native code ended the process: it does not go on in a state that it holds for broken.",
        shows=(
            Died("terminate called"),
            Died("Aborted"),
            Died("double free or corruption"),
            Died("free(): invalid"),
            Died("malloc(): "),
            Died("corrupted size vs"),
            Died("corrupted double-linked"),
            Died("SIGABRT"),
            *ended_by(6),
        ),
        cause="A C or C++ library called abort(). Its reason is the line before it (`what():`, an assertion, a check). "
        "`double free` and `malloc()` are memory that someone else has overwritten: often two copies of one library, "
        "or extensions that were built for another torch.",
        now="PYTHONFAULTHANDLER=1 at the next start prints the Python stack of every thread; kvfix doctor checks that "
        "the extensions fit this torch",
        good="wheels that were built for this torch and CUDA",
        sure=False,
    ),
    Problem(
        code="KVD250",
        name="processor-lacks-instruction",
        general=True,
        severity=Severity.CRASH,
        title="The program has an instruction that this processor does not have.",
        shows=(Died("Illegal instruction"),),
        cause="A wheel was built for a newer processor (AVX-512, AMX) than this machine's; a virtual machine may hide "
        "what the host has.",
        now="lscpu | grep -o 'avx[^ ]*': build the package from source on this machine, or run on a newer node",
        good="wheels for this processor, or nodes of one kind",
    ),
    Problem(
        code="KVD374",
        name="kernel-compiler-gives-up",
        general=True,
        severity=Severity.CRASH,
        title="LLVM gave up over a kernel, and ended the process.",
        shows=(Logged("LLVM ERROR:"), Failed(text="LLVM ERROR:")),
        cause="Triton compiles a kernel for a GPU that it does not support (older than compute capability 8.0: V100, "
        "T4), or a kernel of another Triton release. The connector has no part in it.",
        now="nvidia-smi --query-gpu=compute_cap --format=csv,noheader; below 8.0: another attention backend "
        "(VLLM_ATTENTION_BACKEND=XFORMERS, FLASHINFER) and no --enable-chunked-prefill, or a newer GPU; else "
        "rm -rf ~/.triton/cache and the Triton that this torch asks for",
        good="a GPU that this vLLM's kernels support",
        sure=False,
        threads=("https://github.com/kvcache-ai/Mooncake/issues/436",),
    ),
    Problem(
        code="KVD381",
        name="gpus-do-not-see-each-other",
        general=True,
        severity=Severity.CRASH,
        title="The check whether GPUs of this machine reach one another's memory failed.",
        shows=(
            Failed(text="Error happened when batch testing peer-to-peer access"),
            *either("peer access is not supported between these two devices"),
        ),
        cause="A helper process that copies from one GPU to the other died: its own error stands below or before it "
        "(GPUs of another container, CUDA_VISIBLE_DEVICES that differs between Ray's workers, an IOMMU). The "
        "connector has no part in it.",
        now="--disable-custom-all-reduce, or VLLM_SKIP_P2P_CHECK=1; nvidia-smi topo -p2p r shows who reaches whom",
        good="a container with all GPUs of the engine, and the IOMMU off",
        sure=False,
    ),
    Problem(
        code="KVD383",
        name="native-code-crashed",
        general=True,
        severity=Severity.CRASH,
        title="Native code used memory that is not its own, and the process died of the signal.",
        shows=(
            Died("Segmentation fault"),
            Died("Segfault encountered"),
            Died("SIGSEGV"),
            *ended_by(11),
        ),
        cause="The first name in the stack below it that is a library's own tells whose code it was: mooncake::, nixl, "
        "ucp_ or uct_ (UCX), c10 or at:: (torch), lmcache. Usual: two builds of one library in a process, extensions "
        "for another torch or CUDA, a transport that reads a buffer which was freed, or a peer that restarted.",
        now="dmesg | grep segfault names the library (`in libX.so`); PYTHONFAULTHANDLER=1 at the next start prints the "
        "Python stack; once without --kv-transfer-config decides whether the connector has part in it",
        good="the release of that library that its project names for this vLLM; report its stack there",
        sure=False,
        threads=(
            "https://github.com/kvcache-ai/Mooncake/issues/3428",
            "https://github.com/kvcache-ai/Mooncake/issues/1510",
            "https://github.com/ai-dynamo/dynamo/issues/285",
        ),
    ),
    Problem(
        code="KVD384",
        name="bus-error",
        general=True,
        severity=Severity.CRASH,
        title="The process died of a bus error: memory that it had mapped could not be provided.",
        shows=(
            Died("Bus error"),
            Died("SIGBUS"),
            *ended_by(7),
        ),
        said=(r"(?i)lmcache|vllm|kv[-_ ]?cache", r"(?i)\bbus error\b"),
        cause="Mostly /dev/shm is full: 64 MB in a container unless --shm-size is set, and vLLM, NCCL, offloading and "
        "`lmcache server` all keep memory there. Else a mapped file was cut, or huge pages ran out.",
        now="df -h /dev/shm in the container, then --shm-size 16g or --ipc host (Kubernetes: an emptyDir with medium: "
        "Memory at /dev/shm); rm what dead processes left there; grep Huge /proc/meminfo",
        good="a /dev/shm that holds all that is configured to lie in it",
        sure=False,
    ),
)
