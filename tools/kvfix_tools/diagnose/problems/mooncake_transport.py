"""Mooncake's transport below the connectors of vLLM and vllm-ascend: memory, TCP, time limits."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_ASCEND = "https://github.com/vllm-project/vllm-ascend/issues"

PROBLEMS = (
    Problem(
        code="KVD502",
        name="mooncake-transfer-engine-failed",
        severity=Severity.HANG,
        title="Mooncake's transport could not move the KV from prefill to decode.",
        shows=(
            Logged("pulling kv_caches for <requests> failed: Mooncake transfer engine returned <ret>"),
            Logged("Sending to <session> failed (ret=<ret>) after"),
            Failed(kind="RuntimeError", text="Error in batch_transfer_sync_write: <ret>"),
        ),
        sentence="Mooncake answers {ret}",
        sure=False,
        replaces=("KVD202", "KVD261", "KVD1065", "KVD1196"),
        cause="RDMA between the two nodes does not work for this memory. Mooncake's own E and W lines just before, on "
        "prefill, decide: `No RDMA devices found` (container without /dev/infiniband), `transport retry counter "
        "exceeded` (network, GID), `Requested address ... not found` (memory not registered with that transport).",
        now="container with `--device /dev/infiniband --ulimit memlock=-1 --network host`; without RDMA "
        '`"kv_connector_extra_config": {"mooncake_protocol": "tcp"}` on both sides; `"device_name": "mlx5_0"`'
        " takes one NIC",
        good="a transport that both nodes have; vLLM before 0.32 leaves the request waiting after it (0.32.0 reports "
        "it)",
        threads=(f"{_ISSUES}/51518",),
    ),
    Problem(
        code="KVD506",
        name="mooncake-address-not-registered",
        severity=Severity.HANG,
        title="Mooncake moves KV over a transport with which its memory is not registered.",
        shows=(Logged("Requested address <address> not found"),),
        cause="The container has no /dev/infiniband, or the host no RDMA NIC. Mooncake says `No RDMA devices found` "
        "and takes NVLink or TCP (vLLM still says `using rdma`), and KV memory is not registered with that transport: "
        "the first transfer fails.",
        now="container with `--device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1`; or say it: "
        '`"kv_connector_extra_config": {"mooncake_protocol": "tcp"}` on both sides',
        good="the set-up; no release of vLLM says it",
        threads=(f"{_ISSUES}/51518",),
    ),
    Problem(
        code="KVD507",
        name="mooncake-memory-not-registered",
        severity=Severity.CRASH,
        title="Mooncake cannot register the KV cache, and the engine does not start.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="Mooncake batch memory registration failed",
                at=f"{_V1}/mooncake/mooncake_connector.py",
            ),
            Failed(kind="RuntimeError", text="Mooncake memory registration failed"),
        ),
        sure=False,
        cause="The NIC (on Ascend the card) refuses the memory; Mooncake's E line just before decides: nvidia_peermem "
        "not loaded, memlock too small, no /dev/infiniband; Ascend `ret:103900`: too much or too fragmented for the "
        "card.",
        now="`modprobe nvidia_peermem` on the host; container with `--ulimit memlock=-1 --device "
        '/dev/infiniband`; no --enable-sleep-mode; without RDMA `"kv_connector_extra_config": '
        '{"mooncake_protocol": "tcp"}`; Ascend: a smaller --gpu-memory-utilization',
        good="GPUDirect RDMA set up on every node",
        threads=(
            "https://github.com/kvcache-ai/Mooncake/issues/281",
            f"{_ASCEND}/13966",
        ),
    ),
    Problem(
        code="KVD508",
        name="mooncake-engine-not-initialized",
        severity=Severity.CRASH,
        title="Mooncake's transfer engine does not start.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="Mooncake Transfer Engine initialization failed",
                at=f"{_V1}/mooncake/mooncake_connector.py",
            ),
        ),
        sure=False,
        cause="Mooncake's own E lines before it decide: a NIC of `device_name` that does not exist or has no address, "
        "a protocol that this build does not have, or a host name that does not resolve to this node.",
        now='`ibv_devinfo` names the NICs: `"kv_connector_extra_config": {"device_name": "mlx5_0"}`; without RDMA'
        ' `"mooncake_protocol": "tcp"`; `export VLLM_HOST_IP=<this node\'s address>`',
        good="the set-up that Mooncake's line names",
    ),
    Problem(
        code="KVD518",
        name="mooncake-ascend-port-taken",
        severity=Severity.HANG,
        title="The port of Mooncake's sender is taken, and decode never gets KV from this worker.",
        shows=(
            Logged("Mooncake KVCacheSendingThread exception: Address already in use (addr='<address>')"),
            Failed(kind="RuntimeError", text="KV Cache sending/receiving thread failed to start"),
        ),
        cause="Engines of one host use ports from `kv_port` upwards, one for each rank. Two of them overlap, an engine "
        "of before still runs, or Mooncake took the port: its transport to the NPU draws ports from 20000 on, 1000 for "
        "each NPU of the node. Only the thread dies in some releases; the engine then looks healthy.",
        now="`kv_port` of the engines of a host further apart than their number of ranks, below 20000 or above 20000 + "
        "1000 x NPUs, and outside of `sysctl net.ipv4.ip_local_port_range`; `ss -ltnp` names who has it; restart this "
        "engine",
        good="the set-up: ports that do not overlap",
        threads=(f"{_ASCEND}/8938", f"{_ASCEND}/4725", "https://github.com/vllm-project/vllm-ascend/pull/6455"),
    ),
    Problem(
        code="KVD568",
        name="mooncake-ascend-blocks-expired",
        severity=Severity.WRONG,
        title="Prefill gave up the KV of a request before decode read it: what decode reads later may be another's.",
        shows=(
            Logged(
                "Force freed expired request: <request>. Reason: Request exceeded timeout threshold (<seconds> "
                "seconds)."
            ),
            Logged("Force freed expired request: <request>. Reason: exceeded timeout (<seconds> seconds)."),
            Logged("Force freed request: <request>"),
        ),
        sentence="request {request}",
        sure=False,
        cause="Decode did not fetch the KV in time (480 s or 600 s by default): it was too busy, or the router or the "
        "client gave the request up (then nothing is lost). Blocks that prefill frees go to the next request, and "
        "decode's read does not ask whether they are still its own: the answer is garbage if it reads them now.",
        now="`export VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=1800 VLLM_NIXL_ABORT_REQUEST_TIMEOUT=1800` on prefill (older "
        "vllm-ascend reads the second, whatever its line says; the oldest VLLM_ASCEND_KVCACHE_DELAY_FREE_TIMEOUT), and "
        "as long a time in the router; more decode engines, or a limit on what prefill accepts",
        good="a time limit that is longer than requests wait for decode; no release of vllm-ascend is known to refuse "
        "such a read",
        threads=(f"{_ASCEND}/15420", f"{_ASCEND}/7140"),
    ),
    Problem(
        code="KVD593",
        name="mooncake-ascend-groups-of-other-lengths",
        severity=Severity.HANG,
        title="A KV group has blocks on one side and none, or fewer, on the other: its KV is not moved.",
        shows=(
            Failed(
                kind="ValueError",
                text="operands could not be broadcast together with shape",
                within="group_concurrent_contiguous",
            ),
            Logged("Failed to transfer KV cache for request <request>: operands could not be broadcast together"),
        ),
        sure=False,
        cause="vllm-ascend's hybrid Mooncake connector pairs the blocks of both sides in order. Groups with compressed "
        "KV or a window (DeepSeek V4) have other numbers of blocks, and so has a request of which decode has a part "
        "already. The request then goes on without that KV (garbage) or waits.",
        now="the vllm-ascend below; until then `--no-enable-prefix-caching` on decode, and the same --block-size and "
        "--speculative-config on both sides, may help (not tried)",
        good="vllm-ascend with pull 9808 (June 2026), or its MooncakeConnectorV1, which takes DeepSeek V4 from pull "
        "10342 on; whether one of them ends a report of mid-June is not known",
        threads=(
            f"{_ASCEND}/9220",
            f"{_ASCEND}/10569",
            "https://github.com/vllm-project/vllm-ascend/pull/9808",
        ),
    ),
    Problem(
        code="KVD376",
        name="mooncake-transfer-returned-error",
        severity=Severity.HANG,
        title="Mooncake's transfer engine returned an error, and the caller only passes that on.",
        shows=(
            Failed(kind="RuntimeError", text="Mooncake Transfer Engine Return Error"),
            Failed(kind="RuntimeError", text="Mooncake transfer failed, ret"),
        ),
        sure=False,
        cause="The reason is in the E line of the transport before it (rdma_*.cpp, worker_pool.cpp, "
        "tcp_transport.cpp), on this side or the peer's: a peer that is gone, a card that does not reach the other, "
        "memory that is not registered.",
        now="grep -n '^E[0-9]' in the logs of both sides around this time; MC_LOG_LEVEL=INFO (glog: GLOG_v=1) at the "
        'next start; without RDMA "mooncake_protocol": "tcp" (SGLang: MC_FORCE_TCP=1) shows whether it is the card',
        good="what the transport's own line says",
        threads=("https://github.com/sgl-project/sglang/issues/6548",),
    ),
)
