"""Errors of native transports and stores that no record knows: by the source file that logged them.

Mooncake and NIXL log through glog: `E0804 05:20:44.8 1321 store_py.cpp:495] ...`. The file says which part failed.
"""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem, Sign


def logged_by(*files: str) -> tuple[Sign, ...]:
    """Signs of errors that these files log: by glog, or by yalantinglibs (.hpp)."""
    return tuple(Logged(f"{'[' if file.endswith('.hpp') else ' '}{file}:<line>] ") for file in files)


PROBLEMS = (
    Problem(
        code="KVD330",
        name="way-to-mooncake-master-fails",
        general=True,
        severity=Severity.HANG,
        title="A call of Mooncake's client to its master failed, or the master failed.",
        shows=logged_by(
            "master_client.cpp",
            "coro_rpc_client.hpp",
            "coro_rpc_server.hpp",
            "coro_http_server.hpp",
            "rpc_service.cpp",
            "master_service.cpp",
            "wrapped_master_service.cpp",
            "ha_helper.cpp",
            "etcd_helper.cpp",
        ),
        sure=False,
        cause="The status at the line's end decides: a time-out or a closed connection: the master is not there, has "
        "restarted, or is too busy. A status of its own (INVALID_PARAMS, OBJECT_NOT_FOUND ...): master and client are "
        "of different releases, or the object has been evicted. `bad address: 0.0.0.0 error: Host not found`: this "
        "host has no IPv4 address but loopback's, so no port is opened there.",
        now="on the worker's node: nc -vz HOST PORT with master_server_address; pip show mooncake-transfer-engine on "
        "both sides (one release); the master's own log at this time",
        good="one release of Mooncake on master and workers, and a master that outlives them",
    ),
    Problem(
        code="KVD331",
        name="mooncake-metadata-fails",
        general=True,
        severity=Severity.HANG,
        title="Mooncake could not read or write what engines know of one another (its metadata).",
        shows=logged_by("transfer_metadata.cpp", "transfer_metadata_plugin.cpp", "transfer_metadata_plugin.h"),
        sure=False,
        cause="The metadata server (metadata_server in Mooncake's configuration: etcd, http or redis; P2PHANDSHAKE: "
        "the peer itself) is not reachable, or the peer's entry is not there: the peer has ended, or registered "
        "itself under another host name.",
        now="curl 'http://HOST:8080/metadata?key=mooncake/ram/PEER:PORT' (etcdctl get for etcd); local_hostname in "
        "every configuration must be an address that the other nodes can reach; restart the peer that is missing",
        good="one metadata server that all nodes reach, and addresses instead of host names",
    ),
    Problem(
        code="KVD332",
        name="mooncake-store-client-fails",
        general=True,
        severity=Severity.SLOW,
        title="Mooncake's store client could not put, get, or set itself up.",
        shows=logged_by(
            "store_py.cpp",
            "pybind_client.cpp",
            "real_client.cpp",
            "dummy_client.cpp",
            "client_service.cpp",
            "client.cpp",
            "file_storage.cpp",
            "storage_backend.cpp",
            "client_buffer.cpp",
        ),
        sure=False,
        cause="The words behind the file decide. `allocate`, `buffer`: the worker's local buffer is smaller than what "
        "is in flight. `segment`, `mount`, `setup`, `client`: its memory could not be registered, or the master "
        "refused. `transfer`: the way between the nodes. `ping`: the master dropped this client: it, or its network, "
        "stood still. `Expected <kind>Descriptor`: master and client of two releases, or an object that went to disk. "
        "What does not come is computed again.",
        now="allocate or buffer: a larger local_buffer_size; segment or setup: a smaller global_segment_size and the E "
        "line before this one; transfer: protocol and device_name in Mooncake's configuration (tcp for a try)",
        good="the setting that this decides",
    ),
    Problem(
        code="KVD333",
        name="mooncake-rdma-transport-fails",
        general=True,
        severity=Severity.HANG,
        title="Mooncake's RDMA transport failed on this node's network card, or on the way to the peer's.",
        shows=logged_by(
            "rdma_transport.cpp",
            "rdma_context.cpp",
            "rdma_endpoint.cpp",
            "worker_pool.cpp",
            "endpoint_store.cpp",
            "efa_transport.cpp",
            "efa_context.cpp",
            "efa_endpoint.cpp",
            "barex_transport.cpp",
        ),
        sure=False,
        cause="`register`, `memory region`, `ibv_reg_mr`: the card may not pin this memory (ulimit -l, nvidia_peermem "
        "for GPU memory). `handshake`, `QP`, `endpoint`, `gid`: cards or GIDs of the two nodes do not reach each "
        "other. `transport retry counter exceeded`: the peer or a switch is gone.",
        now="ibv_devinfo (port ACTIVE), show_gids, lsmod | grep peermem, ulimit -l; device_name names the cards to "
        'use, and "protocol": "tcp" shows whether it is the card',
        good="cards that reach one another, and device_name set to them",
    ),
    Problem(
        code="KVD334",
        name="mooncake-tcp-transport-fails",
        general=True,
        severity=Severity.HANG,
        title="Mooncake's TCP transport failed.",
        shows=logged_by("tcp_transport.cpp"),
        sure=False,
        cause="The words behind `Error:` decide. `Bad address`: a socket cannot read GPU memory (KVD1134; without "
        "words, "
        "`writeBody failed` at the first request is mostly this). `Cannot assign requested address`: no port is free "
        "(KVD1136). `refused`, `timed out`, `no route`: the peer has ended, local_hostname is an address that this "
        "node "
        "cannot reach, or a firewall stands between. `reset`, `Broken pipe`, `End of file`: the peer ended.",
        now="the whole line, and the peer's log at this time; local_hostname of each node an address that the others "
        "reach (not localhost, not 0.0.0.0); hostNetwork: true in Kubernetes for a try; KV of GPUs: RDMA, or NIXL over "
        "TCP instead of Mooncake",
        good="what those words name: a transport that reads GPU memory, or addresses and ports that are open",
    ),
    Problem(
        code="KVD335",
        name="mooncake-ascend-transport-fails",
        general=True,
        severity=Severity.HANG,
        title="Mooncake's transport for Ascend failed.",
        shows=logged_by(
            "ascend_direct_transport.cpp",
            "ascend_transport.cpp",
            "hccl_transport.cpp",
            "hccl_transport_mem_c.cpp",
            "heterogeneous_rdma_transport.cpp",
            "heterogeneous_tcp_transport.cpp",
        ),
        sure=False,
        cause="HCCL or ADXL below it gives the status. 103900, 103902, a connect time-out: the card of the peer is not "
        "reached. Another number is CANN's: plog has its reason. `hccl_transport` in every line: a Mooncake "
        "that was built for HCCL in place of ADXL, which fails with every transfer.",
        now="`hccn_tool -i 0 -link -g` and -ping between the cards; `grep ERROR ~/ascend/log/debug/plog/*`; "
        "ASCEND_CONNECT_TIMEOUT and ASCEND_TRANSFER_TIMEOUT (milliseconds) larger for a try; always the same peer: its "
        "engine and its store worker, restarted",
        good="NPU links that hccn_tool's ping confirms; CANN and Mooncake of the image of this vllm-ascend (a Mooncake "
        "of 2025 by hand: built with USE_ASCEND_DIRECT, CANN 8.3)",
    ),
    Problem(
        code="KVD336",
        name="mooncake-engine-fails",
        general=True,
        severity=Severity.HANG,
        title="Mooncake's transfer engine failed.",
        shows=logged_by(
            "transfer_engine.cpp",
            "transfer_engine_impl.cpp",
            "transfer_engine_py.cpp",
            "multi_transport.cpp",
            "transfer_task.cpp",
            "topology.cpp",
            "nvlink_transport.cpp",
            "intranode_nvlink_transport.cpp",
            "nvmeof_transport.cpp",
            "cxl_transport.cpp",
            "common.h",
        ),
        sure=False,
        cause="No transport for the segment: this build lacks it, or its devices were not found. A transfer that "
        "failed or timed out: the peer, or the line of the transport before this one. An address that is not "
        "registered: the two ends speak of different memory.",
        now="the E lines of *_transport.cpp before this one; MC_LOG_LEVEL=TRACE at the next start shows which devices "
        "and transports it takes; MC_TRANSFER_TIMEOUT (seconds) larger for slow links",
        good="what the transport's own line says",
    ),
    Problem(
        code="KVD337",
        name="ucx-status-of-nixl",
        general=True,
        severity=Severity.HANG,
        title="UCX told NIXL that an operation failed.",
        shows=(
            Logged("Unexpected UCX error: <reason>"),
            *logged_by("ucx_enums.cpp", "ucx_utils.cpp", "ucx_backend.cpp", "ucx_mo_backend.cpp"),
        ),
        sure=False,
        cause="The status decides. `Out of memory`: the card's or the GPU's resources for queues (CQ, QP, BAR), not "
        "the host's memory. `Destination is unreachable`, `No such device`: no common transport. `Input/output "
        "error`: the link. `Unsupported operation`: this build of UCX lacks the transport.",
        now="the `UCX  ERROR` lines before it name the device; UCX_TLS=rc,cuda_copy,cuda_ipc (or "
        "tcp,cuda_copy,cuda_ipc) and UCX_NET_DEVICES=mlx5_0:1 on both engines for a try; ucx_info -d lists what there "
        "is",
        good="the transports that this shows, set on both engines",
    ),
    Problem(
        code="KVD338",
        name="nixl-agent-fails",
        general=True,
        severity=Severity.HANG,
        title="NIXL failed in a backend or in the exchange with the other agent.",
        shows=logged_by(
            "nixl_agent.cpp",
            "nixl_plugin_manager.cpp",
            "nixl_listener.cpp",
            "nixl_md_stream.cpp",
            "gds_backend.cpp",
            "posix_backend.cpp",
            "obj_backend.cpp",
            "mooncake_backend.cpp",
            "libfabric_backend.cpp",
            "libfabric_rail.cpp",
        ),
        sure=False,
        cause="The line names the step: `createBackend`: a library of the backend is missing or finds no device. "
        "`registerMem`: memory that the backend cannot take. `loadRemoteMD`, `makeConnection`: another NIXL at the "
        "peer, or no way to it. `postXferReq`, `getXferStatus`: the link or the peer.",
        now="the line before it, of UCX or libfabric; the same nixl on both engines (pip show nixl); "
        "NIXL_LOG_LEVEL=DEBUG at the next start",
        good="one release of NIXL on both engines, with its own UCX",
    ),
    Problem(
        code="KVD339",
        name="ucx-reports-error",
        general=True,
        severity=Severity.HANG,
        title="UCX reported an error of a device or of the way to the peer.",
        shows=(Logged("UCX  ERROR"),),
        sure=False,
        cause="The line names the source file and the device. `ib_*`, `mlx5*`: the RDMA card: its limits, its "
        "firmware, or the peer's port. `tcp_*`, `sock`: the address or a firewall. `cuda_*`, `gdr`: GPU memory that "
        "this UCX cannot move.",
        now="ibv_devinfo and show_gids on both nodes, ulimit -l; UCX_NET_DEVICES set to the cards that reach each "
        "other; UCX_TLS=tcp,cuda_copy,cuda_ipc shows whether it is the card",
        good="the devices and transports that this shows, set on both engines",
    ),
    Problem(
        # Before KVD229, which takes these words for a disk's.
        code="KVD158",
        name="ucx-reports-io-error",
        general=True,
        severity=Severity.HANG,
        title="UCX met an input/output error of a card or a connection.",
        shows=(
            Logged("UCX  ERROR <operation>: Input/output error"),
            Logged("UCX  ERROR <operation>: Transport endpoint is not connected"),
        ),
        sure=False,
        cause="The connection broke (the peer's engine has ended, the network cut it), or the card refused what UCX "
        "asked of it: the line says which call, and UCX's lines before it which device. It is no disk.",
        now="the peer's log at this time; ibv_devinfo (port ACTIVE) and ulimit -l on both nodes; "
        "UCX_TLS=tcp,cuda_copy,cuda_ipc on both engines shows whether it is the card; restart both",
        good="the devices and transports that this shows, set on both engines",
    ),
    Problem(
        code="KVD373",
        name="call-of-nixl-fails",
        general=True,
        severity=Severity.CRASH,
        title="A call of NIXL failed.",
        shows=(
            Logged("NIXL_ERR_"),
            *(
                Failed(kind=f"nixl{status}Error")
                for status in (
                    "Backend",
                    "Unknown",
                    "InvalidParam",
                    "NotFound",
                    "Mismatch",
                    "NotAllowed",
                    "RepostActive",
                    "NotSupported",
                    "RemoteDisconnect",
                    "Canceled",
                )
            ),
        ),
        sure=False,
        cause="The class is NIXL's status, the frame above nixl/_api.py is who called. Backend: the backend below "
        "(UCX, the file system, an object store), whose own line stands before it. NotFound, RemoteDisconnect: the "
        "peer is gone or restarted. InvalidParam, Mismatch: descriptors of memory that was not registered so, or of "
        "another size. NotSupported, NotAllowed: this backend cannot.",
        now="the last line of UCX, libfabric or the backend before it; at the start with UCX: `ucx_info -d | grep -E "
        "'cuda|mlx5|tcp'` in this container (a UCX with CUDA, the card), `ulimit -l` unlimited (IPC_LOCK); "
        "NIXL_LOG_LEVEL=DEBUG at the next start; `pip show nixl` on both sides (one release)",
        good="what the backend's own line says",
    ),
)
