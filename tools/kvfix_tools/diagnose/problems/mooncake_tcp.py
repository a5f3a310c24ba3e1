"""Mooncake over TCP, NVLink and EFA: what one transport cannot that another can."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Logged, Problem

_MOONCAKE, _SGLANG = "https://github.com/kvcache-ai/Mooncake", "https://github.com/sgl-project/sglang"
_CONNECT = "failed to create connection to <peer>. Error: connect: "

PROBLEMS = (
    Problem(
        code="KVD986",
        name="mooncake-tcp-refused",
        severity=Severity.HANG,
        title="Mooncake over TCP does not reach the port of the other engine.",
        shows=(
            Logged("TcpTransport: ASIO exception: connect: Connection refused"),
            Logged("TcpTransport: ASIO exception: connect: Connection timed out"),
            Logged("TcpTransport: ASIO exception: connect: No route to host"),
            Logged(f"TcpTransport::getConnection {_CONNECT}Connection refused"),
            Logged(f"TcpTransport::getConnection {_CONNECT}Connection timed out"),
            Logged(f"TcpTransport::getConnection {_CONNECT}No route to host"),
        ),
        sentence="the other side does not take connections",
        cause="Each process listens on a port of its own, which it announces with its host name. Refused: that process "
        "has ended, or announced 127.0.0.1 or the host name of a container. Timed out or no route: a firewall, or a "
        "network that the other node does not have.",
        now="look whether the other process runs; its local_hostname (MooncakeConnector: VLLM_HOST_IP) has to be the "
        "address that this one reaches: `nc -vz HOST PORT` from here; in containers the host's network",
        good="addresses that every node reaches, and open ports between the nodes",
        threads=("https://github.com/kvcache-ai/Mooncake/issues/292",),
    ),
    Problem(
        code="KVD1134",
        name="mooncake-tcp-reads-device-memory",
        severity=Severity.HANG,
        title="Mooncake sends KV over TCP, and a socket cannot read or write memory of the GPU.",
        shows=tuple(
            Logged(f"Session::{what}Body failed. {buffer}Error: Bad address")
            for what in ("write", "read")
            for buffer in ("", "Attempt to <what> data <data> using buffer <buffer>. ")
        ),
        sentence="the kernel refuses the address of KV memory (errno 14)",
        cause="Mooncake found no RDMA card (or TCP was asked for) and took its TCP transport. That copies memory of "
        "the "
        "GPU to the host first only in a build with -DUSE_CUDA=ON; this one hands the GPU's address to the socket "
        "(Ascend: no build copies). No firewall and no dead peer, whatever SGLang says of the session.",
        now="RDMA: container with --device /dev/infiniband, `ibv_devices` not empty, --disaggregation-ib-device "
        "mlx5_0. "
        "Without: SGLang --disaggregation-transfer-backend nixl, vLLM NixlConnector with UCX_TLS=tcp,cuda_copy,"
        "cuda_ipc; Mooncake built with -DUSE_CUDA=ON, no mooncake-transfer-engine-non-cuda",
        good="a transport that reads GPU memory; SGLang's KV was only meant for GPUDirect RDMA when this was reported",
        threads=(
            *(f"{_MOONCAKE}/issues/{number}" for number in (257, 383, 519, 602, 917)),
            f"{_SGLANG}/issues/7118",
            f"{_SGLANG}/issues/7338",
            "https://github.com/vllm-project/vllm-ascend/issues/9747",
            f"{_MOONCAKE}/issues/2145",
        ),
    ),
    Problem(
        code="KVD1136",
        name="mooncake-tcp-ports-used-up",
        severity=Severity.HANG,
        title="Mooncake over TCP has used up this node's ports: it opens a connection for each piece of KV.",
        shows=(
            Logged(f"TcpTransport::getConnection {_CONNECT}Cannot assign requested address"),
            Logged("TcpTransport: ASIO exception: connect: Cannot assign requested address"),
        ),
        sentence="no local port is free",
        cause="Each transfer makes a connection of its own, and a closed one keeps its port for 60 s (TIME_WAIT). "
        "Under "
        "load the 28,000 of `ip_local_port_range` are gone. SGLang then says of both sides that they are dead; they "
        "are not.",
        now="`export MC_TCP_ENABLE_CONNECTION_POOL=1` on both sides and restart; until then fewer requests at once, "
        "`sysctl -w net.ipv4.ip_local_port_range='10240 65000' net.ipv4.tcp_tw_reuse=1`. On a node with RDMA: why "
        "is TCP used (`Found 0 HCAs` in Mooncake's first lines)",
        good="RDMA, or Mooncake's connection pool, which is off by default, crashed 0.3.10.post2 (KVD1198) and grows "
        "without a limit (Mooncake#2930): both sides restarted now and then",
        threads=(f"{_MOONCAKE}/pull/1954", f"{_MOONCAKE}/issues/2930", f"{_SGLANG}/pull/31208"),
    ),
    Problem(
        code="KVD1182",
        name="mooncake-takes-efa-for-rdma",
        severity=Severity.HANG,
        title="Mooncake makes a queue pair of RDMA on a card of AWS EFA, which has none.",
        shows=(Logged("Failed to create QP: Operation not supported"),),
        sentence="the card answers Operation not supported (95)",
        cause="Mooncake's wheels are built without EFA (USE_EFA=OFF). The protocol `efa` is then taken without a word, "
        "and RDMA, which finds EFA's cards, is what runs. A crash may follow.",
        now="Mooncake built with -DUSE_EFA=ON -DUSE_CUDA=ON and protocol efa on both sides; with this wheel: SGLang "
        '--disaggregation-transfer-backend nixl, vLLM NixlConnector with `"backends": ["LIBFABRIC"]`',
        good="a transport that knows EFA: no wheel of Mooncake up to 0.3.10 does",
        threads=(f"{_MOONCAKE}/issues/2070", f"{_MOONCAKE}/pull/1523"),
    ),
    Problem(
        code="KVD1184",
        name="mooncake-nvlink-cannot-open",
        severity=Severity.HANG,
        title="Mooncake moves KV over NVLink, and this process cannot open the other's GPU memory.",
        shows=(
            Logged("NvlinkTransport: cudaIpcOpenMemHandle failed"),
            Logged("cudaIpcOpenMemHandle failed: <error> (nvlink_transport.cpp"),
        ),
        sure=False,
        cause="Without an RDMA card that it can use, Mooncake takes NVLink within the machine. The handle of the other "
        "process does not open: its memory is not of cudaMalloc (expandable segments, sleep mode, fabric handles), or "
        "the two containers do not see each other's GPUs.",
        now="--device /dev/infiniband for both containers (then RDMA is taken); unset PYTORCH_CUDA_ALLOC_CONF; both "
        "with "
        '--gpus all --ipc host; `"mooncake_protocol": "tcp"` or NixlConnector',
        good="the transport that was meant: `Found 0 HCAs` in Mooncake's first lines says that RDMA was not found",
        threads=("https://github.com/vllm-project/vllm/issues/51518",),
    ),
    Problem(
        code="KVD1194",
        name="mooncake-lacks-the-transport",
        severity=Severity.CRASH,
        title="This Mooncake has no transport for the protocol of a segment.",
        shows=(
            Logged("error code is NotSupportedTransport"),
            Logged("Local segment descriptor not found"),
        ),
        sure=False,
        cause="A segment says by which protocol it is reached (tcp, rdma, efa, ascend, nvlink), and this build or this "
        "process has not installed it: clients of one cluster with other protocols, or a build for EFA, which before "
        "February 2026 installs no TCP.",
        now="the same protocol on all clients and engines (MOONCAKE_PROTOCOL, `protocol`, `mooncake_protocol`), then "
        "restart the master and all of them: old segments keep theirs; one build of Mooncake everywhere",
        good="one build and one protocol for all clients",
        threads=(f"{_MOONCAKE}/issues/882", f"{_MOONCAKE}/pull/1523"),
    ),
    Problem(
        code="KVD1198",
        name="mooncake-tcp-crashes",
        severity=Severity.CRASH,
        title="Mooncake's TCP transport crashed the process while it sent.",
        shows=(Died(within="mooncake::Session::writeBody"), Died(within="mooncake::ClientSession::writeBody")),
        sentence="a segmentation fault in writeBody",
        sure=False,
        cause="The end of a write uses a buffer or a session that is freed already: after minutes to hours of load "
        "(0.3.7.post2), and at once with MC_TCP_ENABLE_CONNECTION_POOL=1 in 0.3.10.post2, after writes that failed "
        "with "
        "`Bad address`.",
        now="RDMA in place of TCP; `unset MC_TCP_ENABLE_CONNECTION_POOL`; a Mooncake newer than 0.3.10.post2; with "
        "`Bad address` before it, what KVD1134 says",
        good="RDMA; whether a release ends it is not known (Mooncake#2145 is closed, #1267 is open)",
        threads=(f"{_MOONCAKE}/issues/1267", f"{_MOONCAKE}/issues/2145"),
    ),
)
