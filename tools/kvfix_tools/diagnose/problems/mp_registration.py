"""KV memory that a worker of vLLM cannot register with the LMCache server, or that the server cannot copy."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_MP = ("LMCacheMPConnector", "MultiConnector")
_NO_VMM = "vLLM without --enable-sleep-mode, and without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"

PROBLEMS = (
    Problem(
        code="KVD170",
        name="mp-kernel-refuses-groups",
        severity=Severity.SLOW,
        title="LMCache's kernel cannot copy the KV groups of this model together: nothing is stored.",
        shows=(
            Failed(text="CUDA error: invalid argument", within="_run_object_group_transfer_plan"),
            Failed(text="CUDA error: invalid argument", within="transfer_kv_per_object_group"),
        ),
        sure=False,
        cause="Reported of LMCache 0.5.1 with MiniMax-M3, whose layers have KV, an indexer's keys and a draft model's "
        "KV in groups of other shapes; each store fails so. The server logs the groups when the engine registers: with "
        "one group there is another cause.",
        now="serve this model without LMCache",
        good="a newer LMCache, tried with one request: a second one with the same prompt has to hit",
        threads=("https://github.com/LMCache/LMCache/issues/4154",),
    ),
    Problem(
        code="KVD832",
        name="autostarted-server-too-slow",
        severity=Severity.CRASH,
        title="The LMCache server that vLLM starts by itself runs, and is not ready in time.",
        shows=(
            Failed(
                kind="ConnectionError",
                text="LMCache MP server did not become healthy within <seconds>s. server_url=<server>",
            ),
        ),
        sentence="{server} was not ready after {seconds} s",
        connectors=_MP,
        releases={"lmcache": ">=0.5.6"},
        cause="The process is alive and answers no ping: it allocates and pins its whole L1 first (--l1-size-gb), "
        "restores an L2, or listens on another port than the connector asks.",
        now="lmcache.mp.autostart.wait_timeout: 300 in kv_connector_extra_config; look at the server's own lines for "
        "how far it has come",
        good="start `lmcache server` before vLLM, as a service of its own, with lmcache.mp.autostart: false",
        sure=False,
    ),
    Problem(
        code="KVD835",
        name="isolated-ipc-needs-fabric",
        severity=Severity.CRASH,
        title="With isolated IPC the KV memory that vLLM has mapped by itself cannot be shared with the server.",
        shows=(
            Failed(kind="RuntimeError", text="VMM allocation is only POSIX-fd exportable, but isolated_ipc is enabled"),
        ),
        connectors=_MP,
        releases={"lmcache": ">=0.5.5"},
        cause="vLLM's KV pool is virtual memory (sleep mode, or torch's expandable segments). Such memory is shared by "
        "a file descriptor over a common file system, which isolated IPC rules out, or by fabric handles, which need "
        "an IMEX channel.",
        now=_NO_VMM + "; or lmcache.mp.isolated_ipc: false, the server without --isolated-ipc, and one /dev/shm",
        good="an IMEX channel on the node (NVreg_CreateImexChannel0=1, NVIDIA_IMEX_CHANNELS=0 for both containers)",
    ),
    Problem(
        code="KVD858",
        name="kv-memory-in-several-chunks",
        severity=Severity.CRASH,
        title="A KV tensor of vLLM lies in several physical chunks of virtual memory: LMCache can share only one.",
        shows=(Failed(kind="RuntimeError", text="the tensor spans more than one cuMemCreate physical chunk"),),
        connectors=_MP,
        releases={"lmcache": ">=0.5.5"},
        cause="vLLM's KV pool is virtual memory of several allocations (sleep mode, or torch's expandable segments). "
        "One exported handle maps one of them.",
        now=_NO_VMM,
        good="no release shares such a tensor (0.5.6): keep the KV pool in plain device memory",
    ),
    Problem(
        code="KVD837",
        name="virtual-memory-not-imported",
        severity=Severity.CRASH,
        title="The LMCache server cannot map the KV memory that vLLM has exported as virtual memory.",
        shows=(
            Failed(kind="RuntimeError", text="cuMemImportFromShareableHandle(<kind>) failed: <why>"),
            Failed(kind="RuntimeError", text="No VMM fd resolver installed in this process"),
        ),
        sentence="the driver refuses the handle",
        connectors=_MP,
        releases={"lmcache": ">=0.5.5"},
        cause="Handle of kind fabric: the two processes share no IMEX channel. Kind fd, or no resolver: the descriptor "
        "did not reach the server over a common file system. Either: the server does not see that GPU.",
        now=_NO_VMM + "; or both containers with the same GPUs, /dev/shm and IMEX channel",
        good="keep it so: the driver decides what may be mapped, and no release of LMCache changes that",
        sure=False,
    ),
    Problem(
        code="KVD489",
        name="virtual-memory-not-exported",
        severity=Severity.CRASH,
        title="A worker's KV memory cannot be handed to the LMCache server (isolated IPC).",
        shows=(
            Failed(kind="RuntimeError", text="cuMemRetainAllocationHandle failed: <error>"),
            Failed(kind="RuntimeError", text="cuMemExportToShareableHandle(<kind>) failed: <error>"),
            Failed(kind="RuntimeError", text="cuMemGetAllocationPropertiesFromHandle failed: <error>"),
        ),
        sentence="{error}",
        releases={"lmcache": ">=0.5.6"},
        sure=False,
        cause="Memory can be handed over so only if it was made with cuMemCreate: by torch with "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or by vLLM's sleep mode. INVALID_CONTEXT: a thread without "
        "a CUDA context asked (a registration after the server came back).",
        now="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for vLLM; or without isolated IPC: server without "
        "--isolated-ipc, no lmcache.mp.isolated_ipc, both with --ipc host",
        good="one of the two ways on both sides",
    ),
    Problem(
        code="KVD490",
        name="virtual-memory-not-mapped",
        severity=Severity.CRASH,
        title="The LMCache server cannot map a worker's KV memory (isolated IPC).",
        shows=(
            Failed(kind="RuntimeError", text="cuMemMap failed: <error>"),
            Failed(kind="RuntimeError", text="cuMemAddressReserve failed: <error>"),
            Failed(kind="RuntimeError", text="cuMemSetAccess failed: <error>"),
        ),
        sentence="{error}",
        releases={"lmcache": ">=0.5.6"},
        sure=False,
        cause="The server sees another GPU under this number than the worker, or none; the driver in its container is "
        "older; or mappings of workers that have ended are still held.",
        now="the same GPUs (--gpus all, NVIDIA_VISIBLE_DEVICES) for the server's container as for vLLM's; restart the "
        "server, then vLLM",
        good="server and engine with the same devices and driver",
    ),
)
