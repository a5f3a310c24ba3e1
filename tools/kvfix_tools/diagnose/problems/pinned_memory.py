"""Host memory that the driver, the container or the machine does not let a process pin, or keep."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem

_THREAD = "https://github.com/LMCache/LMCache/"
_LESS = (
    "a smaller max_local_cpu_size (LMCACHE_MAX_LOCAL_CPU_SIZE, in GB, for EACH worker: eight times with TP=8; server: "
    "--l1-size-gb)"
)
_MEMLOCK = "docker run --ulimit memlock=-1 (Kubernetes: LimitMEMLOCK=infinity for containerd), ulimit -l inside"

PROBLEMS = (
    Problem(
        code="KVD1847",
        name="machine-out-of-memory",
        severity=Severity.CRASH,
        title="The machine had no memory left, and the kernel killed a process for it.",
        # That a container's limit was reached the kernel says as `Memory cgroup out of memory`.
        shows=(Died("Out of memory: Killed process <pid> (<name>)"),),
        sentence="{name} (process {pid}) was killed, by no container's limit",
        replaces=("KVD853",),
        cause="All processes of the machine together were too large, and the kernel takes one with a high score, which "
        "need not be the one that grew: compare anon-rss in its line with what the others had. Buffers count for each "
        "worker (max_local_cpu_size), as does the server's L1 and lmcache_server, which never evicts. Where GPU and "
        "host share their memory (GB10, Jetson) the model's weights and KV cache count too, most while they load.",
        now="lower what is largest: max_local_cpu_size, --l1-size-gb, with shared memory --gpu-memory-utilization, "
        "until the sum leaves a tenth free; the server first, then vLLM; docker run --oom-score-adj -500 for "
        "`lmcache server`. If the server was killed restart vLLM too: requests may wait for it for ever",
        good="memory for the sum; no release changes that",
        sure=False,
        threads=(_THREAD + "issues/4759",),
    ),
    Problem(
        code="KVD790",
        name="pinned-memory-refused",
        severity=Severity.CRASH,
        title="The driver does not give LMCache as much pinned host memory as it asks for.",
        shows=(
            Failed(text="cudaHostAlloc failed: <why>"),
            Failed(text="cudaHostRegister failed: <why>"),
            Logged(text="cudaHostAlloc failed: <why>"),
        ),
        said=(
            r"(?i)lmcache",
            r"(?i)cpu.?offload|pinned|pin_memory|local_cpu",
            r"(?i)memory (?:can ?not|could not|can't) be (?:allocated|pinned)",
        ),
        sentence="pinning failed: {why}",
        cause="`out of memory`: the machine or the container has less memory than all workers ask for together, or "
        "ulimit -l is small. `invalid argument`: too much in one call: some drivers refuse 512 GB and more, WSL and "
        "small containers a few GB.",
        now=_LESS + "; " + _MEMLOCK,
        good="max_local_cpu_size times the workers well below the container's memory; pools of 512 GB and more: a "
        "driver that takes them, no release of LMCache splits the call yet (0.5.6; pull request 5177 is open)",
        threads=(_THREAD + "issues/1063", _THREAD + "issues/1051", _THREAD + "pull/5177"),
    ),
    Problem(
        code="KVD791",
        name="pinned-by-torch-refused",
        severity=Severity.CRASH,
        title="torch cannot pin LMCache's CPU buffer.",
        shows=(
            Failed(text="CUDA error: invalid argument", within="memory_management.py:__init__"),
            Failed(text="CUDA error: invalid argument", within="cache_engine.py:_Create_memory_allocator"),
            Failed(text="CUDA error: out of memory", within="memory_management.py:__init__"),
            Failed(text="CUDA error: invalid argument", source="dtype=torch.uint8, pin_memory=True"),
            Failed(text="CUDA error: out of memory", source="dtype=torch.uint8, pin_memory=True"),
        ),
        sentence="the driver refused to pin the CPU buffer in one piece",
        releases={"lmcache": "<0.3.9"},
        cause="LMCache before 0.3.9 pinned through torch, which asks for powers of two in one piece; the driver "
        "refuses.",
        now=_LESS + "; below 2 GB worked for one reporter",
        fixed={"lmcache": "0.3.9"},
        threads=(_THREAD + "issues/1063", _THREAD + "issues/1425"),
    ),
    Problem(
        code="KVD792",
        name="buffer-not-mapped",
        severity=Severity.CRASH,
        title="The system does not give LMCache the memory for its CPU buffer.",
        shows=(
            Failed(text="mmap failed: <why>"),
            Failed(text="mbind failed: <why>"),
            Failed(text="shm_open failed: <why>"),
            Failed(text="ftruncate failed: <why>"),
        ),
        sentence="{why}",
        cause="mmap: not enough memory, or not enough huge pages where they are asked for. shm_open, ftruncate: "
        "/dev/shm is too small (docker: 64 MB). mbind: the container may not choose NUMA nodes (CAP_SYS_NICE).",
        now=_LESS + "; docker run --shm-size=<more than --l1-size-gb> --cap-add SYS_NICE, or --ipc host",
        good="memory, /dev/shm and huge pages of the container as large as the buffers",
    ),
    Problem(
        code="KVD793",
        name="huge-pages-missing",
        severity=Severity.CRASH,
        title="There are fewer huge pages than LMCache's buffer needs.",
        shows=(
            Failed(kind="RuntimeError", text="Insufficient hugepages: <free> free, <needed> required"),
            Logged(text="Failed to allocate huge pages. Pool has <total> pages (<free> free, each <needed>)"),
            Logged(text="Hugepage availability check failed: Insufficient hugepages: <free> free, <needed> required"),
        ),
        sentence="{free} huge pages are free, {needed}",
        releases={"lmcache": ">=0.4.6"},
        cause="Huge pages of 2 MB are set aside by the system, for all processes together: a buffer of N GB needs N * "
        "512.",
        now="sudo sysctl -w vm.nr_hugepages=<pages that are required>, for each worker; or local_cpu_use_hugepages: "
        "false (server: without --l1-use-hugepages)",
        good="vm.nr_hugepages in /etc/sysctl.conf; Kubernetes: hugepages-2Mi in the pod's limits",
    ),
    Problem(
        code="KVD794",
        name="l1-not-pinned-slow",
        severity=Severity.SLOW,
        title="A part of the server's memory could not be pinned: copies to and from it are slow.",
        shows=(
            Logged(text="pin_memory failed for chunk at ptr="),
            Logged(text="cudaHostRegister failed for ptr="),
            Logged(text="pin_memory failed for Device-DAX L1 mapping"),
        ),
        releases={"lmcache": ">=0.5.1"},
        cause="ulimit -l is too small, or the machine's memory is nearly used up: the server goes on with memory that "
        "the GPU cannot reach directly.",
        now=_MEMLOCK + "; a smaller --l1-size-gb",
        good="unlimited memlock, and --l1-size-gb at most 80 % of the container's memory",
    ),
    Problem(
        code="KVD795",
        name="ascend-pin-limit",
        severity=Severity.CRASH,
        title="The Ascend driver does not register LMCache's host memory.",
        shows=(
            Failed(kind="RuntimeError", text="register ptr failed"),
            Logged(text="register ptr failed"),
        ),
        sure=False,
        cause="Size and driver decide. Above 200 to 250 GB aclrtHostRegister answers 207001, whatever ulimit and "
        "memory there are. At any size, with `Unable to halHostRegister: 65534` before it: the NPU driver is older "
        "than 24.1, or the container lacks IPC_LOCK.",
        now="LMCACHE_MAX_LOCAL_CPU_SIZE=200 or less, for each worker; is it less already: `npu-smi info` must show "
        "driver 24.1.0 or newer (25.3 is best), docker run --privileged or --cap-add IPC_LOCK --ulimit memlock=-1",
        good="NPU driver 25.3 or newer; no release of LMCache-Ascend is known to split the call",
        threads=(
            "https://github.com/LMCache/LMCache-Ascend/issues/242",
            "https://github.com/LMCache/LMCache-Ascend/issues/91",
        ),
    ),
    Problem(
        code="KVD796",
        name="hccl-buffer-larger-than-card",
        severity=Severity.CRASH,
        title="P2P over HCCL registers the whole CPU buffer with the card, and it is larger than the card's memory.",
        shows=(Failed(text="Failed to register memory | HCCL Error Code"),),
        cause="The network card of the NPU registers no more than the NPU has (64 GB); with large models less.",
        now="LMCACHE_MAX_LOCAL_CPU_SIZE=16",
        good="LMCache-Ascend with its pull request 259, which stages through a small buffer",
        threads=("https://github.com/LMCache/LMCache-Ascend/pull/184",),
    ),
    Problem(
        code="KVD797",
        name="memlock-too-small",
        severity=Severity.CRASH,
        title="The process may not lock memory: ulimit -l is too small.",
        shows=(
            Failed(text="Unable to pin host memory with error code"),
            Failed(text="ibv_reg_mr<what>: Cannot allocate memory"),
            Logged(text="ibv_reg_mr<what>Cannot allocate memory"),
            Logged(text="Please set max locked memory (ulimit -l) to 'unlimited'"),
            Logged(text="mlock<what>Cannot allocate memory"),
        ),
        cause="RDMA and pinned buffers are locked into memory, and the container's limit (64 kB to 8 MB by default) is "
        "far below them.",
        now=_MEMLOCK,
        good="memlock unlimited for every container that uses RDMA or pinned buffers; --cap-add IPC_LOCK",
        threads=("https://github.com/LMCache/LMCache-Ascend/issues/5",),
    ),
    Problem(
        code="KVD798",
        name="buffer-not-pinned-for-kernel",
        severity=Severity.CRASH,
        title="A kernel was given a host buffer that is not pinned.",
        shows=(
            Failed(text="Host tensor not registered/pinned (or bad ptr)"),
            Failed(text="Invalid device. Device must be cuda or pinned cpu."),
        ),
        cause="The buffer was allocated without being pinned (the driver refused, or a store brought its own, as "
        "InfiniStore did before LMCache 0.3.1), and the copy kernel reads host memory directly.",
        now="remote_url of infinistore:// before LMCache 0.3.1: pip install -U lmcache; else "
        + _LESS
        + "; "
        + _MEMLOCK
        + "; with a remote_url: unset it once, to see whether it is the store's buffer",
        good="a buffer that the driver pins, and LMCache 0.3.1 or newer with InfiniStore; look for an earlier line "
        "about cudaHostRegister",
        threads=("https://github.com/LMCache/LMCache/issues/502", "https://github.com/LMCache/LMCache/pull/517"),
    ),
    Problem(
        code="KVD966",
        name="too-few-huge-pages",
        severity=Severity.CRASH,
        title="LMCache gets no huge pages for its CPU buffer.",
        shows=(Logged("Failed to allocate huge pages. ", "lmcache/v1/memory_management.py"),),
        releases={"lmcache": ">=0.4.6"},
        cause="local_cpu_use_hugepages is on, and the node has fewer free huge pages than the buffer needs, or the "
        "container was given none.",
        now="sysctl -w vm.nr_hugepages=N with N = max_local_cpu_size in GiB * 512 (pages of 2 MiB), times ranks; in "
        "Kubernetes hugepages-2Mi in the resources; or local_cpu_use_hugepages: false",
        good="huge pages reserved at the node's start, or none used",
    ),
    Problem(
        code="KVD830",
        name="nixl-buffer-not-pinned",
        severity=Severity.CRASH,
        title="LMCache cannot pin the host buffer of its NIXL storage.",
        shows=(Failed(kind="RuntimeError", text="Failed to pin NIXL CPU buffer for DMA access"),),
        releases={"lmcache": ">=0.5.1"},
        cause="nixl_buffer_device: cpu pins a buffer of its own in each worker. ulimit -l or the container's memory is "
        "smaller, or the driver refuses so much in one call; the line above names the call.",
        now="a smaller nixl_buffer_size, or max_local_cpu_size, for EACH worker; " + _MEMLOCK,
        good="buffers times the workers well below the container's memory",
    ),
    Problem(
        code="KVD439",
        name="gpu-without-numa-node",
        severity=Severity.CRASH,
        title="numa_mode is manual, and this worker's GPU has no NUMA node in the mapping.",
        shows=(
            Failed(kind="AssertionError", text="Current device <gpu> is not in the GPU NUMA mapping."),
            Failed(kind="AssertionError", text="NUMA mode is set to `manual` but gpu_to_numa_mapping is None."),
        ),
        sentence="the mapping leaves this worker's GPU out",
        cause="gpu_to_numa_mapping in extra_config must have an entry for each GPU index as the worker sees it: with "
        "CUDA_VISIBLE_DEVICES=4,5 they are 0 and 1.",
        now="extra_config: {gpu_to_numa_mapping: {0: 0, 1: 0, 2: 1, 3: 1}} with every index (nvidia-smi topo -m shows "
        "the nodes), or numa_mode: auto; restart",
        good="keep it so: the set-up was wrong, and no release guesses a node",
    ),
    Problem(
        code="KVD480",
        name="lazy-pool-cannot-pin",
        severity=Severity.CRASH,
        title="The pool that grows as needed cannot be pinned on this machine.",
        shows=(
            Failed(kind="RuntimeError", text="does not support memory pinning. LazyMemoryAllocator"),
            Failed(kind="RuntimeError", text="LazyMemoryAllocator buffer base"),
        ),
        releases={"lmcache": ">=0.5.2"},
        cause="It reserves address space and pins it piece by piece, which needs the driver: a process without a GPU "
        "cannot. `buffer base ... is not aligned`: align_bytes (--l1-align-bytes) is larger than a page.",
        now="lmcache server --no-l1-use-lazy (in process: enable_lazy_memory_allocator: false), --l1-align-bytes "
        "4096; a server without a GPU: --supported-transfer-mode engine_driven",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD481",
        name="dax-device-too-small",
        severity=Severity.CRASH,
        title="The server's L1 is larger than the Device-DAX memory that it is to lie in.",
        shows=(
            Failed(kind="RuntimeError", text="l1 devdax size (<size> bytes) exceeds <path> capacity (<capacity> bytes"),
        ),
        sentence="{size} bytes are asked of {path}, it has {capacity}",
        releases={"lmcache": ">=0.5.2"},
        cause="--l1-size-gb is counted in 2**30 bytes, and the device is mapped from its start.",
        now="--l1-size-gb at most the device's bytes (cat /sys/bus/dax/devices/dax0.0/size) divided by 2**30; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
)
