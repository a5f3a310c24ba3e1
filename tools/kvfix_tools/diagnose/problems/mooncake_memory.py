"""Mooncake's transfer engine: memory that the RDMA card does not take, and cards that are not there."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_ISSUES = "https://github.com/kvcache-ai/Mooncake/issues/"
_SGLANG = "https://github.com/sgl-project/sglang/"
#: What a refused registration is followed by.
_FOLLOWS = ("KVD014", "KVD287", "KVD507", "KVD523")

PROBLEMS = (
    Problem(
        code="KVD010",
        name="mooncake-card-cannot-map-gpu",
        severity=Severity.CRASH,
        title="The RDMA card cannot map this memory: mostly GPU memory without nvidia_peermem.",
        shows=(
            Logged("Failed to register memory <address>: Bad address"),
            Logged("Failed to retrieve dmabuf for"),
            Logged("Failed to export dma_buf for addr="),
            Logged("DMA BUF supported required for GPU RDMA without nvidia-peermem"),
        ),
        replaces=_FOLLOWS,
        cause="`Bad address` (errno 14) is the kernel's answer for an address of which it has no pages: GPU memory, "
        "while nvidia_peermem is not loaded on the host; or GPU memory that CUDA cannot hand out (expandable "
        "segments, sleep mode). With WITH_NVIDIA_PEERMEM=0 the engine asks CUDA for a dma-buf instead, for which "
        "driver and kernel must be new enough.",
        now="on the host: modprobe nvidia_peermem; lsmod | grep peermem; open driver and kernel 5.12 or newer: "
        "WITH_NVIDIA_PEERMEM=0; no PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, no --enable-sleep-mode; without "
        'RDMA "mooncake_protocol": "tcp" (Mooncake: protocol tcp)',
        good="nvidia_peermem at boot (/etc/modules-load.d) on every node",
        threads=(_ISSUES + "1207", _ISSUES + "351", _SGLANG + "issues/6193"),
    ),
    Problem(
        code="KVD011",
        name="mooncake-memory-may-not-be-pinned",
        severity=Severity.CRASH,
        title="The system does not let Mooncake pin this much memory for the RDMA card.",
        shows=(
            Logged("Failed to register memory <address>: Cannot allocate memory"),
            Logged("Failed to register memory <address>: Operation not permitted"),
        ),
        replaces=_FOLLOWS,
        cause="`Cannot allocate memory` (errno 12): the limit of locked memory (ulimit -l, by default 64 kB or 8 MB "
        "in containers) is smaller than the buffer, or the card's tables are full. Pinned memory counts against the "
        "container's memory too.",
        now="container with --ulimit memlock=-1 (Kubernetes: IPC_LOCK in securityContext.capabilities, containerd "
        "with LimitMEMLOCK=infinity); ulimit -l inside says unlimited; a smaller global_segment_size; restart",
        good="memlock unlimited for the runtime of containers",
        threads=(_ISSUES + "351",),
    ),
    Problem(
        code="KVD012",
        name="mooncake-card-takes-no-more-memory",
        severity=Severity.CRASH,
        title="The RDMA card or its driver refuses to register more, or so large a, memory.",
        shows=(
            Logged("Failed to register memory <address>: Input/output error"),
            Logged("Failed to register memory <address>: Numerical result out of range"),
            Logged("Failed to register memory <address>: No space left on device"),
            Logged("Failed to register memory <address>: Invalid argument"),
            Logged("exceeds device max_mr_size"),
        ),
        replaces=_FOLLOWS,
        cause="The driver's answer: the region is longer than the card's max_mr_size, or its regions (max_mr) or "
        "mapped bytes are used up. Cloud and other vendors' cards (eRDMA, PPU's) have far less of both than mlx5; "
        "every engine and rank on the card takes its share.",
        now="ibv_devinfo -v | grep max_mr, dmesg | tail; MC_MAX_MR_SIZE=<max_mr_size> (larger regions are cut); less "
        "KV on the card: --gpu-memory-utilization, a smaller global_segment_size, fewer engines for a card; the "
        "vendor's newest driver",
        good="a card and driver for the memory that is to be moved",
        sure=False,
        threads=(_ISSUES + "454", _ISSUES + "1754"),
    ),
    Problem(
        code="KVD013",
        name="mooncake-finds-no-card",
        severity=Severity.CRASH,
        title="Mooncake finds no RDMA card of the names that it was given, or none that is up.",
        shows=(
            Logged("RdmaTransport: No available RNIC"),
            Logged("No matched device found: <names>"),
            Logged("RdmaTransport: cannot initialize RDMA resources"),
            Logged("Failed to install RDMA transport"),
        ),
        replaces=("KVD508",),
        cause="device_name (ib_device, --disaggregation-ib-device) is no name of ibv_devices on this node, "
        "/dev/infiniband is not in the container, or the card's port is down. Empty takes all cards. Names differ "
        "from node to node, and quotes or blanks in the setting become part of the name.",
        now="ibv_devices and ibv_devinfo (state: PORT_ACTIVE) inside the container; device_name as they print it, "
        "with commas and no blanks; container with --device /dev/infiniband --network host; without RDMA "
        "MC_FORCE_TCP=1 or protocol tcp",
        good="device_name set for each kind of node, or left empty",
        threads=(_SGLANG + "issues/6193",),
    ),
    Problem(
        code="KVD014",
        name="mooncake-memory-of-no-card",
        severity=Severity.HANG,
        title="Memory is to be moved that no card of Mooncake's has registered.",
        shows=(Logged("Memory region not registered by any active device(s): <address>"),),
        sentence="address {address}",
        sure=False,
        cause="An earlier line says why its registration failed (`Failed to register memory`); without one, the "
        "buffer was never registered, or all cards that had it are down.",
        now="look at the first `Failed to register memory` of this process; ibv_devinfo (PORT_ACTIVE); without RDMA "
        "protocol tcp; restart the engine",
        good="what the first failed registration says",
        threads=(_ISSUES + "1754",),
    ),
    Problem(
        code="KVD015",
        name="mooncake-tcp-cannot-copy-gpu",
        severity=Severity.HANG,
        title="Mooncake's TCP transport cannot copy to or from GPU memory.",
        shows=(
            Logged("failed to copy to CUDA memory"),
            Logged("failed to copy from CUDA memory"),
            Logged("cudaPointerGetAttributes failed"),
        ),
        sure=False,
        cause="TCP goes by host memory, and this process's copy failed: its CUDA context is broken by an earlier "
        "error, the memory was freed, or the wheel is of another CUDA (mooncake-transfer-engine is of CUDA 12, "
        "mooncake-transfer-engine-cuda13 of 13, -non-cuda of none).",
        now="pip list | grep -i mooncake: one wheel, of torch.version.cuda; look at the first CUDA error of the "
        "process; restart it",
        good="the wheel of Mooncake for this CUDA",
    ),
    Problem(
        code="KVD016",
        name="mooncake-python-module-mismatch",
        severity=Severity.CRASH,
        title="The engine of Mooncake that is installed is not the one that the caller was written for.",
        shows=(
            Failed(kind="AttributeError", text="'mooncake.engine.TransferEngine' object has no attribute"),
            Failed(kind="TypeError", text="incompatible function arguments", through="mooncake"),
        ),
        cause="Methods of the transfer engine and the store came and changed from release to release, and the caller "
        "(vLLM, SGLang, LMCache) calls one that this wheel lacks or has with other arguments. The message names it.",
        now="pip install -U mooncake-transfer-engine (CUDA 13: mooncake-transfer-engine-cuda13) on all nodes, the "
        "master too; only one of the wheels may be installed",
        good="the release of Mooncake that the caller asks for, one for all nodes",
        sure=False,
    ),
    Problem(
        code="KVD063",
        name="mooncake-memory-registered-twice",
        severity=Severity.CRASH,
        title="The same memory was given to Mooncake's transfer engine twice.",
        shows=(
            Logged("Transfer Engine does not support overlapped memory region"),
            Failed(text="Transfer Engine does not support overlapped memory region"),
        ),
        sure=False,
        cause="Two regions that are registered overlap: layers that share one tensor (cross-layer blocks, MLA with "
        "several groups, a draft model that shares KV), or an engine that is set up again in a process without "
        "unregister_memory of before, or two connectors with one transfer engine (MultiConnector).",
        now="one Mooncake connector for each process; without the draft model (--speculative-config); restart the "
        "process in place of setting the engine up again; the newest mooncake-transfer-engine",
        good="a connector that registers each tensor once",
        threads=("https://github.com/sgl-project/sglang/issues/4880",),
    ),
)
