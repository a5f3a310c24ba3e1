"""Mooncake's transfer engine between two nodes: segments, handshakes, connections, transfers that do not end."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

_ISSUES = "https://github.com/kvcache-ai/Mooncake/issues/"

PROBLEMS = (
    Problem(
        code="KVD017",
        name="mooncake-transfer-never-completes",
        severity=Severity.HANG,
        title="A transfer of Mooncake's was posted, and neither completed nor failed in its time.",
        shows=(
            Logged("Failed to complete transfers after <seconds> seconds for batch"),
            Logged("Sync batch data transfer timeout after"),
            Logged("Sync data transfer timeout after"),
            Logged("Slice timeout detected"),
            Logged("CQ completion timeout diagnostic"),
            Logged("[Mooncake Cuda] Transfer timeout"),
        ),
        sure=False,
        cause="Packets do not arrive although the connection was made: cards of the two sides in other subnets or "
        "rails, the wrong GID (RoCE v1 or link-local), a switch without PFC or ECN, or MTUs that differ. On one "
        "node: two cards that do not reach each other. Else the peer stands still, or the batch is larger than the "
        "link moves in MC_TRANSFER_TIMEOUT (30 s).",
        now="ib_write_bw between the very cards (-d mlx5_0 -x GID) on both nodes; MC_GID_INDEX of show_gids (RoCE v2, "
        "the routable address); one card a side in device_name; protocol tcp to see whether it is RDMA; slow link: "
        "MC_TRANSFER_TIMEOUT=120",
        good="a fabric in which every card of one side reaches every card of the other, or device_name so that it does",
        threads=(_ISSUES + "1088", "https://github.com/sgl-project/sglang/pull/32758"),
    ),
    Problem(
        code="KVD018",
        name="mooncake-segment-unknown",
        severity=Severity.HANG,
        title="The metadata has no entry of the Mooncake peer that is asked for.",
        shows=(
            Logged("Failed to get segment descriptor for segment <segment>"),
            Logged("Failed to retrieve segment descriptor, name <segment>"),
            Logged("Failed to get segment description for target_id: <segment>"),
            Logged("Failed to open segment for endpoint='<segment>'"),
        ),
        sentence="segment {segment}",
        sure=False,
        cause="A segment is a process, named HOST:PORT at the metadata server (P2PHANDSHAKE: asked of itself). It has "
        "ended or restarted with another port, gave a host name that this node resolves otherwise, or the two use "
        "different metadata servers. A line `Error from http client` just before decides: the metadata server was not "
        "asked (`Failed initialization`: libcurl in this process) or did not answer.",
        now="curl 'http://METADATA/metadata?key=mooncake/ram/HOST:PORT'; local_hostname of each node an address that "
        "the others reach; the same metadata_server everywhere; restart this engine after its peer has restarted; "
        'after `Failed initialization`: metadata_server "P2PHANDSHAKE" or etcd://, on all nodes',
        good="peers that stay, addresses in place of names, one metadata server",
        threads=(_ISSUES + "1754",),
    ),
    Problem(
        code="KVD019",
        name="mooncake-handshake-rejected",
        severity=Severity.HANG,
        title="A Mooncake peer rejects the RDMA handshake: it knows this node's card under another name.",
        shows=(
            Logged("Handshake rejected by <peer>"),
            Logged("Rejected handshake request by peer <peer>"),
            Logged("Invalid argument: received packet mismatch"),
            Logged("Invalid argument: peer nic path inconsistency"),
            Logged("Local RDMA context not found for handshake NIC"),
            Logged("RDMA ready ACK rejected by"),
        ),
        sure=False,
        cause="Both sides name a connection HOST:PORT@CARD. The names differ: the metadata has an entry of the "
        "process before a restart, two processes share HOST:PORT, or a card is named that the peer does not use "
        "(device_name). Words behind `message:` are the peer's own reason (mtu, gid: see KVD505).",
        now="restart both sides together (old entries go); another port for each process of a host; the same "
        "device_name rules on both sides; MC_GID_INDEX where `gid` stands in the message",
        good="one name and port for each process, and releases of Mooncake that are the same on both sides",
    ),
    Problem(
        code="KVD020",
        name="mooncake-no-connection-to-card",
        severity=Severity.HANG,
        title="Mooncake cannot make an RDMA connection to a card of the peer.",
        shows=(
            Logged("Worker: Cannot make connection for endpoint: <peer>"),
            Logged("All rails failed for context"),
            Logged("Cannot redispatch slice because all peer rails are paused"),
            Logged("failed connection setup (active)"),
            Logged("wait existing handshake timeout"),
            Logged("Worker: Timed out waiting for RDMA ready ACK"),
        ),
        sure=False,
        cause="The handshake goes by TCP to the port of the peer's metadata, then the queue pairs connect by their "
        "GIDs. The lines before it say which failed: `connect()`: the TCP port; `RTR`: GID, MTU or partition; "
        "nothing: the peer has ended.",
        now="nc -vz PEER PORT with the port of the line; show_gids on both and MC_GID_INDEX of a RoCE v2 address of "
        "one network; device_name with cards that reach each other; restart the engine whose peer restarted",
        good="cards of one fabric on both sides",
    ),
    Problem(
        code="KVD021",
        name="mooncake-peer-unreachable",
        severity=Severity.HANG,
        title="A Mooncake peer cannot be reached by TCP for the handshake.",
        shows=(
            Logged("SocketHandShakePlugin: connect()<peer>: Connection timed out"),
            Logged("SocketHandShakePlugin: connect()<peer>: No route to host"),
            Logged("SocketHandShakePlugin: connect()<peer>: Network is unreachable"),
            Logged("SocketHandShakePlugin: failed to get IP address of peer server"),
            Logged("SocketHandShakePlugin: getsockopt(SO_ERROR)"),
            Logged("Socket read timed out"),
        ),
        sure=False,
        replaces=("KVD020", "KVD886", "KVD520"),
        cause="Nothing answers at the peer's address: a firewall or network policy between the nodes, an address of a "
        "pod or an interface that is not routed, a name that does not resolve, or a peer that stands still. Ports are "
        "taken at random from MC_MIN_RPC_PORT to MC_MAX_RPC_PORT (15000 to 17000).",
        now="nc -vz PEER PORT from this node with the address of the line; local_hostname an address that is routed "
        "(hostNetwork: true for a try); open ports 15000-17000 between the nodes; MC_HANDSHAKE_CONNECT_TIMEOUT for a "
        "slow one",
        good="routed addresses and open ports",
    ),
    Problem(
        code="KVD022",
        name="mooncake-metadata-server-unreachable",
        severity=Severity.CRASH,
        title="Mooncake cannot read or write its metadata server.",
        shows=(
            Logged("EtcdStoragePlugin: unable to <what>"),
            Logged("HTTPStoragePlugin: <what>"),
            Logged("Failed to register segment descriptor, name <name>"),
            Logged("cannot publish segments, check the availability of metadata storage"),
            Logged("RdmaTransport: cannot publish segments"),
            Logged("Failed to register RPC meta entry"),
        ),
        cause="metadata_server (etcd://HOST:2379, http://HOST:8080/metadata, redis://HOST:6379) is not up, not "
        "reachable from this node, or is asked with another protocol than it speaks; an HTTP proxy may stand "
        "between; a name that is registered already belongs to a process that still lives.",
        now="from this node: curl http://HOST:8080/metadata?key=x (http) or etcdctl --endpoints HOST:2379 endpoint "
        "health; unset http_proxy; start it before the engines; or metadata_server P2PHANDSHAKE, which needs none",
        good="one metadata server that outlives the engines, or P2PHANDSHAKE",
        sure=False,
    ),
    Problem(
        code="KVD006",
        name="mooncake-nvlink-not-possible",
        severity=Severity.CRASH,
        title="Mooncake takes its NVLink transport, which this build or this machine does not have.",
        shows=(
            Logged("Unsupported transport nvlink"),
            Logged("Unsupported transport nvlink_intra, please rebuild Mooncake"),
            Logged("NvlinkTransport: cuMemCreate failed: <code>"),
            Logged("NvlinkTransport: cuMemExportToShareableHandle failed: <code>"),
            Logged("NvlinkTransport: not all <what> support"),
        ),
        cause="Where Mooncake finds no RDMA device (a container without /dev/infiniband), or with MC_FORCE_MNNVL, it "
        "takes NVLink between nodes: a build with USE_MNNVL, and for cuMemCreate (800: not permitted, 801: not "
        "supported) an NVLink fabric with IMEX (GB200; not H20, H100 in one node). The wheel has no nvlink_intra.",
        now="container with --device /dev/infiniband --ulimit memlock=-1; without RDMA `protocol: tcp` "
        '("mooncake_protocol": "tcp") and unset MC_FORCE_MNNVL; for NVLink within a node NixlConnector with UCX\'s '
        "cuda_ipc; restart both",
        good="a transport that the machine has, named in the configuration",
        threads=(
            "https://github.com/kvcache-ai/Mooncake/pull/1612",
            "https://github.com/kvcache-ai/Mooncake/issues/965",
        ),
    ),
)
