"""What NIXL says itself, in lines of its agent and its plugins for UCX and libfabric: before the exception in Python.

Compiled: a test looks for the signs in the libraries of nixl's wheel.
"""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem, Sign

_NIXL, _SGLANG = "https://github.com/ai-dynamo/nixl", "https://github.com/sgl-project/sglang"
_VLLM = "https://github.com/vllm-project/vllm"


def _says(*texts: str) -> tuple[Sign, ...]:
    return tuple(Logged(text) for text in texts)


PROBLEMS = (
    Problem(
        code="KVD1150",
        name="nixl-list-not-registered",
        severity=Severity.CRASH,
        title="NIXL was given a list of memory that is not registered so with any backend.",
        shows=_says("prepXferDlist: failed to prepare"),
        sure=False,
        cause="Agent '' is this side, a name the other. An address, a length or a device number of the list lies in no "
        "memory that the agent registered: the two engines have other numbers of regions, heads or ranks (another "
        "tensor parallel size, data parallel attention, a hybrid model's state), or the other one was restarted with "
        "another KV cache (NIXL_ERR_NOT_FOUND).",
        now="the same tensor parallel size, KV dtype and block size on both sides, and restart both; SGLang with a "
        "hybrid model: the same attention parallelism (--enable-dp-attention on both or on neither)",
        good="a release of the engine that supports this pair of layouts",
        threads=(f"{_SGLANG}/issues/31295",),
    ),
    Problem(
        code="KVD1152",
        name="nixl-lists-differ",
        severity=Severity.CRASH,
        title="The two lists of a NIXL transfer do not fit: other numbers of blocks, or blocks of other lengths.",
        shows=_says(
            "different descriptor list sizes (local=",
            "different number of indices for local (",
            "length mismatch at index ",
        ),
        sure=False,
        cause="Each block of one side is paired with one of the other. Prefill and decode differ in block size, KV "
        "dtype or heads for each rank, or one named fewer blocks (a prefix that decode has already).",
        now="the same --block-size, --kv-cache-dtype, attention backend and --tensor-parallel-size on both sides; "
        "--no-enable-prefix-caching on decode shows whether its own prefix is what differs",
        good="settings that are equal on both sides, and one release of the engine",
    ),
    Problem(
        code="KVD1154",
        name="nixl-peer-forgotten-in-a-transfer",
        severity=Severity.HANG,
        title="NIXL forgot the peer between the preparation of a transfer and its end.",
        shows=_says(
            "was invalidated or re-registered after prepped xfer request creation",
            "was invalidated or re-registered after transfer request creation; not posting stale handle",
            "was invalidated or re-registered during transfer",
            "invalid request handle, remote agent was invalidated or re-registered",
        ),
        sure=False,
        cause="A broken connection makes NIXL drop what it knows of the peer; a second handshake with the same agent "
        "does so too (two threads that connect at once, a peer that was restarted). The transfer fails, and its KV "
        "did not come.",
        now='restart the engine that logs it when the peer is up; vLLM before 0.32: `"kv_load_failure_policy": '
        '"recompute"` on decode; look why the connection broke (the peer\'s log, UCX lines before it)',
        good="vLLM 0.32.0, which makes a new handshake with a peer that NIXL has dropped, and a stable link",
        threads=("https://github.com/ModelTC/LightLLM/issues/1470",),
    ),
    Problem(
        code="KVD1156",
        name="nixl-notification-not-sent",
        severity=Severity.LEAK,
        title="NIXL could not tell the peer that its KV was read or is there.",
        shows=_says(
            "no specified or potential backend could send the inter-agent notifications",
            "genNotif: backend '<backend>' returned error status",
        ),
        sure=False,
        cause="The peer is gone, or the connection to it broke. Prefill then keeps the blocks of such requests until "
        "their lease or time limit ends; decode that misses one waits for it.",
        now="look whether the peer runs; if it does, restart the engine that logs it (NIXL keeps no way to a peer that "
        "it has dropped)",
        good="vLLM 0.32.0 or newer, which connects anew, and a stable link",
        threads=("https://github.com/ModelTC/LightLLM/issues/1470", f"{_NIXL}/issues/1983"),
    ),
    Problem(
        code="KVD1158",
        name="nixl-ucx-without-cuda",
        severity=Severity.CRASH,
        title="The UCX that NIXL loaded cannot move GPU memory.",
        shows=_says("NVIDIA GPU(s) were detected, but UCX CUDA support was not found!"),
        sentence="UCX has no CUDA support",
        cause="Another UCX than that of nixl's wheel was loaded (LD_LIBRARY_PATH, a system package, HPC-X), UCX_TLS "
        "leaves out cuda_copy and cuda_ipc, or the wheel is for another CUDA. Registration of the KV cache then fails "
        "with NIXL_ERR_BACKEND, or a transfer crashes.",
        now="unset LD_LIBRARY_PATH entries with another libucp.so and UCX_MODULE_DIR; `pip install --force-reinstall "
        "nixl` (nixl-cu13 with CUDA 13); UCX_TLS unset, or with cuda_copy,cuda_ipc",
        good="nixl's own UCX, of this CUDA",
    ),
    Problem(
        code="KVD1160",
        name="nixl-ucx-without-rdma",
        severity=Severity.SLOW,
        title="The node has RDMA cards, and the UCX that NIXL loaded does not use them.",
        shows=_says("IB device(s) were detected, but accelerated IB support was not found!"),
        sentence="UCX has no accelerated support for the cards",
        cause="UCX's module for verbs or mlx5 did not load: rdma-core (libibverbs, libmlx5) is missing in the image, "
        "/dev/infiniband is not in the container, UCX_TLS leaves out rc, or another UCX was loaded. KV goes over TCP, "
        "at a tenth of the speed or less.",
        now="apt-get install -y rdma-core ibverbs-providers; container with --device /dev/infiniband --cap-add "
        "IPC_LOCK "
        "--ulimit memlock=-1; UCX_TLS=rc,cuda_copy,cuda_ipc,tcp; `ucx_info -d | grep mlx5` of that UCX",
        good="the same in the image; UCX_LOG_LEVEL=info shows the transports of each connection",
        threads=("https://github.com/ai-dynamo/dynamo/pull/1314", "https://github.com/vllm-project/aibrix/issues/1407"),
    ),
    Problem(
        code="KVD1162",
        name="nixl-libfabric-finds-no-card",
        severity=Severity.CRASH,
        title="NIXL's LIBFABRIC backend finds no card that it can use.",
        shows=_says(
            "No network devices discovered; cannot create rails",
            "Failed to create rails for libfabric rail manager",
            "No provider found with FI_HMEM capability for rail",
            "Failed to initialize libfabric backend:",
        ),
        sure=False,
        cause="No EFA device in the container, a libfabric without its EFA provider (not that of the EFA installer), "
        "or one that cannot reach GPU memory (FI_HMEM: no GPUDirect on this instance, or a driver without dma-buf).",
        now="Kubernetes: `vpc.amazonaws.com/efa: 1` or more in the pod's resources; Docker: --device /dev/infiniband; "
        "`fi_info -p efa` in the container has to list domains; LD_LIBRARY_PATH=/opt/amazon/efa/lib first; without EFA "
        '`"backends": ["UCX"]`',
        good="an image with the EFA installer's libfabric, and pods with EFA devices",
        threads=(f"{_NIXL}/issues/1163",),
    ),
    Problem(
        code="KVD1164",
        name="nixl-libfabric-transfer-fails",
        severity=Severity.HANG,
        title="A transfer of NIXL's LIBFABRIC backend failed on a card.",
        shows=_says(
            "Transfer completed with CQ error",
            "progressCompletionQueue failed on rail ",
            "Failed to process completions on rail",
            "Failed to progress rails in ",
            "prepareAndSubmitTransfer failed for descriptor ",
        ),
        sure=False,
        cause="The card reports the reason in the line before it (`prov_errno`): `Unresponsive receiver`, "
        "`Unreachable remote`: the peer ended, or the security group holds EFA's traffic back. `Remote key`, `RMA "
        "address`: the peer restarted or registered anew. `Resource temporarily unavailable` alone is load.",
        now="the peer's log at this time; restart both sides together; the security group open to itself in both "
        "directions; fewer transfers at once",
        good="nixl 1.3.1 or newer (before, small transfers over several EFA cards may hang without a word: nixl#1862), "
        "the same on both sides",
        threads=(f"{_NIXL}/issues/1162", f"{_NIXL}/issues/1862", f"{_NIXL}/pull/1924"),
    ),
    Problem(
        code="KVD1166",
        name="nixl-libfabric-no-connection",
        severity=Severity.HANG,
        title="NIXL's LIBFABRIC backend has no connection to the peer.",
        shows=_says(
            "No valid connection found for agent: ",
            "No connection found for agent: ",
            "Could not find connection for agent: ",
            "Failed to establish connection with ",
            "notifSendPriv: failed to establish connection with ",
            "Connection not found for peer agent: ",
        ),
        sure=False,
        cause="The peer's metadata was never loaded or was dropped after a disconnect, its process was restarted (its "
        "EFA address is new), or its first message does not come through.",
        now="restart both sides together; the security group open to itself in both directions; the same nixl and "
        "EFA installer on both; `fi_pingpong -p efa` between the two nodes",
        good="peers that end together, or a router that drops a peer that was restarted",
    ),
    Problem(
        code="KVD1168",
        name="nixl-libfabric-memory",
        severity=Severity.CRASH,
        title="NIXL's LIBFABRIC backend cannot register memory with the cards.",
        shows=_says(
            "Rail Manager registerMemory failed",
            "Failed to register memory on rail ",
            "No rails selected for memory type ",
            "No accelerator runtime, skipping VRAM support",
        ),
        sure=False,
        cause="`skipping VRAM`: the plugin found no CUDA in this process. Else the card refuses: GPUDirect is not "
        "there "
        "(no dma-buf or peer memory in the driver), memlock is too small, or the card has no room for so many regions.",
        now="ulimit -l unlimited; nvidia driver with open kernel modules; `modinfo efa`; a smaller "
        "--gpu-memory-utilization; nixl of this CUDA (nixl-cu13 with CUDA 13)",
        good="GPUDirect RDMA set up on every node (`fi_info -p efa -c FI_HMEM`)",
    ),
    Problem(
        code="KVD1170",
        name="nixl-metadata-refused",
        severity=Severity.HANG,
        title="NIXL cannot use what the other engine says of itself.",
        shows=_says(
            "error loading connection info for backend '",
            "error loading remote metadata for agent '",
            "failed to deserialize remote metadata",
            "error in deserializing remote agent name",
            "Metadata mismatch for agent: ",
        ),
        sure=False,
        cause="`connection info`: the two have no transport or network in common (UCX_TLS, UCX_NET_DEVICES, one with "
        "RDMA and one without, a card without an address). `deserialize`: other releases of NIXL. `remote metadata`, "
        "`mismatch`: the peer has another KV cache than at the first handshake: it was restarted.",
        now="the same UCX_TLS and UCX_NET_DEVICES on both (UCX_TLS=tcp,cuda_copy,cuda_ipc for a try); `pip show nixl` "
        "equal on both; restart the engine that logs it after the peer",
        good="one release of NIXL and one set of transports on all engines",
        threads=(f"{_VLLM}/issues/50765",),
    ),
)
