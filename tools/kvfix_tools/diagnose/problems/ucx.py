"""UCX below NIXL: its own errors, and crashes within its reach."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem

_ISSUES = "https://github.com/vllm-project/vllm/issues"

PROBLEMS = (
    Problem(
        code="KVD586",
        name="ucx-peer-cancels",
        severity=Severity.HANG,
        title="UCX gives up its transfers: the other engine is gone, or cannot be reached any more.",
        shows=(
            Logged("Unexpected UCX error: Request canceled"),
            Logged("Unexpected UCX error: Connection reset by remote peer"),
            Logged("Unexpected UCX error: Endpoint timeout"),
            Logged("Unexpected UCX error: Endpoint is not connected"),
        ),
        sure=False,
        cause="Transfers of an engine that died or was cut off are cancelled one by one; the other engine's log has "
        "the cause. `Endpoint timeout` and no death there: the network between the two took the connection and then "
        "carried nothing (another card or pod network, MTU, a firewall, conntrack). If the death is prefill's "
        "`KeyError` in NixlConnector: vLLM before 0.11.2 dies so of aborted requests (KVD577): upgrade.",
        now="restart the engine that died (its log tells why), then this one; if none died, the network between them: "
        "`UCX_NET_DEVICES` names the card that reaches the other node, and its firewall lets all ports pass",
        good="what the other engine's log says",
        threads=("https://github.com/llm-d/llm-d/issues/187",),
    ),
    Problem(
        code="KVD1089",
        name="ucx-older-than-nixl",
        severity=Severity.CRASH,
        title="NIXL runs with an older UCX than the one that it was built with.",
        shows=(Logged("UCP version is incompatible, required: <required>, actual: <actual>"),),
        sentence="it needs UCX {required} and has loaded {actual}",
        cause="The loader finds another UCX first, that of the system (HPC-X, apt's libucx0, /opt/ucx in "
        "LD_LIBRARY_PATH). NIXL says `Backend UCX was instantiated`, then registering or sending GPU memory fails with "
        "NIXL_ERR_BACKEND.",
        now="take that UCX out of LD_LIBRARY_PATH; `pip install --force-reinstall nixl` (its wheel brings its own, in "
        "site-packages/nixl*.libs); restart. Which one is loaded: `grep libucp /proc/PID/maps`",
        good="one UCX, that of nixl's wheel, or nixl built against the system's",
        threads=("https://github.com/sgl-project/sglang/issues/5709",),
    ),
    Problem(
        code="KVD587",
        name="ucx-crashes",
        severity=Severity.CRASH,
        title="A process died within UCX's reach: UCX caught the signal.",
        shows=(
            Died(text="Caught signal 11 (Segmentation fault"),
            Died(text="Caught signal 7 (Bus error"),
            Died(text="= backtrace (tid"),
            Died(text="backtrace (tid:"),
        ),
        sure=False,
        cause="UCX prints this for any crash of the process. Frames of libucp, libuct or libnixl in the backtrace "
        "below: two UCX in one process, GPU memory moved by a UCX without CUDA, or a peer that restarted. Other "
        "frames: not UCX. At the start, with `NIXL_ERR_BACKEND` beside it: this UCX cannot register GPU memory.",
        now="one UCX only (none of the system in LD_LIBRARY_PATH), `pip install --force-reinstall nixl`; for a try "
        "`UCX_TLS=tcp,cuda_copy,cuda_ipc`; restart both engines together",
        good="nixl and UCX of one build, for this CUDA",
        threads=(
            f"{_ISSUES}/32375",
            "https://github.com/ai-dynamo/nixl/issues/409",
        ),
    ),
    Problem(
        code="KVD1079",
        name="ucx-takes-gpu-memory-for-host-memory",
        severity=Severity.CRASH,
        title="UCX copies GPU memory as if the CPU could read it, and the process dies.",
        shows=(
            Died(text="Segmentation fault: invalid permissions for mapped object"),
            Died(text="Caught signal 11 (Segmentation fault: invalid permissions"),
        ),
        replaces=("KVD587",),
        sure=False,
        cause="The address is mapped, and the CPU may not touch it: memory of the GPU. This UCX has no cuda_copy "
        "(built without CUDA, for another CUDA, or UCX_TLS leaves it out) or does not see the allocation, so that it "
        "sends it over TCP with memcpy. A plain write to read-only memory by other code looks the same: the frames of "
        "the backtrace (uct_tcp, ucp) decide.",
        now="`UCX_TLS=tcp,cuda_copy,cuda_ipc` (with RDMA: rc,cuda_copy,cuda_ipc) and `UCX_MEMTYPE_CACHE=n` on both "
        "sides; `ucx_info -d | grep cuda_copy`; `pip install --force-reinstall nixl` of the image's CUDA (CUDA 13: "
        "nixl-cu13); restart both",
        good="nixl and UCX of one build, for this CUDA",
        threads=("https://github.com/sgl-project/sglang/issues/6694", "https://github.com/ai-dynamo/nixl/issues/380"),
    ),
    Problem(
        code="KVD146",
        name="ucx-cannot-address-peer",
        severity=Severity.HANG,
        title="The RDMA card cannot address the peer's card, and UCX does not connect.",
        shows=(Logged("ibv_create_ah(<address>) for <purpose> on <card> failed: <reason>"),),
        sentence="{card}: {reason}",
        sure=False,
        cause="The two cards are of different networks (fabric, subnet, VLAN), or the GID is one that no route leads "
        "to: `dgid=fe80:` is link-local. In a container without the host's network the card's network device is "
        "missing, which is `No such device`. `ib_write_bw -d CARD` between the two decides.",
        now="show_gids on both nodes; UCX_NET_DEVICES=mlx5_0:1 (cards that reach each other) and UCX_IB_GID_INDEX=3 "
        "(RoCE v2 with an IPv4 address) on both engines; containers: --network host (hostNetwork: true); without RDMA "
        "UCX_TLS=tcp,cuda_copy,cuda_ipc",
        good="cards of one network on both sides, and the GID index that ib_write_bw needs",
        threads=("https://github.com/ai-dynamo/dynamo/issues/814",),
    ),
    Problem(
        code="KVD147",
        name="ucx-has-no-way-for-this-memory",
        severity=Severity.HANG,
        title="The two UCX have no common way to move memory of this kind.",
        shows=(Logged("UCX  ERROR cannot find remote protocol for: <context> | <operation>"),),
        sentence="{operation}",
        sure=False,
        cause="The end of the line names the operation and the kinds of memory. One side lacks a transport for its "
        "GPU memory (UCX_TLS without cuda_copy, a UCX without CUDA, GPUs of two makers), there is no RDMA card that "
        "reads GPU memory between the nodes, or it is the UCX in nixl before October 2025 on GB300 with CUDA 13.",
        now="the same UCX_TLS on both engines (unset, or rc,cuda_copy,cuda_ipc), `pip install -U nixl` on both (CUDA "
        '13: nixl-cu13), restart; without RDMA `"kv_buffer_device": "cpu"` in --kv-transfer-config of both: KV then '
        "goes through host memory",
        good="one release of nixl of after October 2025 on both sides",
        threads=("https://github.com/ai-dynamo/nixl/pull/927",),
    ),
    Problem(
        code="KVD148",
        name="ucx-connection-broke",
        severity=Severity.HANG,
        title="A connection of UCX broke, or it was handed memory that it cannot send.",
        shows=(Logged("UCX  ERROR tcp_ep <endpoint> failed: <reason>"),),
        sure=False,
        cause="The peer's engine has ended (its log says so at this time), the network cut the connection "
        "(`Endpoint timeout` or `reset by remote peer` beside it: one of these two), or a socket was handed GPU memory "
        "because this UCX cannot copy it (driver, CUDA and UCX do not fit; `Bad address`). "
        "`ucx_perftest -t ucp_get -m cuda` between the two nodes fails in the last case.",
        now="if the peer died: restart both engines; if the network cut it: UCX_NET_DEVICES=eth0 (the card that "
        "reaches the other pod) on both, and restart both; else UCX_TLS=tcp,cuda_copy,cuda_ipc on both and `ucx_info "
        "-d | grep cuda_copy`; `pip install --force-reinstall nixl` of the image's CUDA (CUDA 13: nixl-cu13)",
        good="a UCX with CUDA that ucx_perftest confirms, and what the peer's log says",
        threads=("https://github.com/ai-dynamo/nixl/issues/135",),
    ),
    Problem(
        code="KVD157",
        name="ucx-cuda-ipc-refused",
        severity=Severity.HANG,
        title="UCX cannot open the GPU memory of the other process on this node (CUDA IPC).",
        shows=(Logged("failed to open ipc mem handle. addr:<memory>"), Logged("cuIpcOpenMemHandle() failed: <reason>")),
        sure=False,
        cause="On one node UCX reads the peer's GPU memory through CUDA IPC, and the driver refused: the engines run "
        "in containers that share no IPC or PID namespace, a memory pool that has no such handle "
        "(expandable_segments), or a GPU that this container does not see. `Element already exists`: the same memory "
        "was opened before, by another user of it.",
        now="`UCX_TLS=^cuda_ipc` on both engines (the card or host memory in its place); or containers with --ipc "
        "host --pid host and both GPUs visible, and without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; "
        "restart both",
        good="one pod with all GPUs for engines that share a node, or UCX without cuda_ipc",
        threads=("https://github.com/openucx/ucx/issues/3192", "https://github.com/openucx/ucx/pull/11603"),
    ),
    Problem(
        code="KVD062",
        name="ucx-has-no-transport",
        severity=Severity.HANG,
        title="UCX has no transport that reaches the other engine.",
        shows=(
            Logged("no active messages transport to <peer>"),
            Logged("no am bcopy transport to <peer>"),
            Logged("no auxiliary transport to <peer>"),
            Logged("no remote registered memory access transport to <peer>"),
            Logged("no put short transport to <peer>"),
            Logged("no remote memory access transport to <peer>"),
            Logged("no tag transport to <peer>"),
            Logged("failed to select lane for local device"),
        ),
        replaces=("KVD554", "KVD570", "KVD373"),
        cause="The line lists each transport with its reason. `not enabled` or a list that lacks tcp and rc: UCX_TLS "
        "leaves out what is needed for messages (cuda_ipc and cuda_copy move memory only, posix and sysv do not reach "
        "another container or node). `Destination is unreachable`: the network card of UCX_NET_DEVICES does not lead "
        "to the peer. `no peer failure handler`: shared memory cannot be taken with NIXL's error handling.",
        now="unset UCX_TLS (UCX chooses), or add tcp, with RDMA also rc: `UCX_TLS=rc,tcp,cuda_copy,cuda_ipc,sm,self`; "
        "unset UCX_NET_DEVICES or name a card that reaches the peer; the same on both sides; restart both",
        good="the set-up; `UCX_PROTO_INFO=y` shows what is taken",
        threads=("https://github.com/ai-dynamo/nixl/issues/1846",),
    ),
    Problem(
        code="KVD1053",
        name="ucx-card-without-network",
        severity=Severity.CRASH,
        title="UCX takes a network card that leads nowhere in this container.",
        shows=(Logged("failed to modify to RTR"), Logged("failed to modify QP to RTR")),
        replaces=("KVD555", "KVD373"),
        cause="The line names the card. RoCE needs the card's interface, with its address, in the container's network "
        "namespace, and InfiniBand a port that is ACTIVE; with /dev/infiniband all cards of the host are seen, also "
        "those whose interface the container does not have.",
        now="`show_gids` (or `ibv_devinfo`) in the container names the cards with an address and an active port: "
        "`export UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1` with these only, on both sides; or hostNetwork: true; restart",
        good="a card with its interface for each pod (SR-IOV, Multus) or hostNetwork; UCX_NET_DEVICES in the image",
        sure=False,
        threads=("https://github.com/vllm-project/aibrix/issues/1433",),
    ),
    Problem(
        code="KVD1063",
        name="ucx-card-without-datagrams",
        severity=Severity.CRASH,
        title="A network card cannot do what UCX's datagram transport asks of it, and UCX does not start.",
        shows=(Logged("failed to create UD QP"), Logged("uct_iface_open(ud_verbs/<card>) failed")),
        sure=False,
        replaces=("KVD555", "KVD587"),
        cause="UCX connects over UD (datagrams) first. Cards of clouds (erdma of Alibaba, irdma, bnxt_re) offer fewer "
        "work requests or no inline data there, and old releases of nixl crash on it.",
        now="`export UCX_TLS=^ud` (all but that), or without RDMA `UCX_TLS=tcp,cuda_copy,cuda_ipc`, the same "
        "on both sides; restart",
        good="the card's vendor names the transports for UCX; a UCX_TLS in the image",
        threads=("https://github.com/ai-dynamo/dynamo/issues/285",),
    ),
    Problem(
        code="KVD069",
        name="ucx-peer-refuses",
        severity=Severity.HANG,
        title="The other engine's UCX does not accept a TCP connection.",
        shows=(
            Logged("connect(fd=<fd>, dest_addr=<peer>) failed: <reason>"),
            Logged("tcp_ep <ep> (state=CONNECTING"),
        ),
        sure=False,
        replaces=("KVD373", "KVD554", "KVD570"),
        cause="`Connection refused`: nothing listens there: the peer has ended or was restarted and its old metadata "
        "is still handed out (etcd, router), or the address is of an interface that leads elsewhere (docker0, a CNI's "
        "10.244.x.0, a second host with the same address). `timed out`, `No route`: a firewall between the two.",
        now="UCX_NET_DEVICES=<the interface that the other node reaches, eth0 or mlx5_0:1> on both sides; clear "
        "etcd's old entries (etcdctl del --prefix '') or restart it; all TCP ports open between the nodes; restart "
        "both",
        good="an interface that both sides reach, named in UCX_NET_DEVICES",
        threads=("https://github.com/ai-dynamo/dynamo/issues/741",),
    ),
    Problem(
        code="KVD1884",
        name="ucx-gdrcopy-does-not-work",
        severity=Severity.CRASH,
        title="UCX copies small messages with GDRCopy, which does not work on this machine.",
        shows=(
            Logged("gdr_copy_from_mapping failed. ret:<ret>"),
            Logged("gdr_copy_to_mapping failed. ret:<ret>"),
            Logged("GPU memory pin failed. length <length> ret <ret>"),
            Logged("gdr_pin_buffer failed. length :<length> ret:<ret>"),
            Logged("gdr_map failed. length :<length> ret:<ret>"),
        ),
        sentence="it answers {ret}",
        replaces=("KVD554", "KVD570", "KVD571"),
        cause="UCX was built with GDRCopy and takes it where it finds it. The kernel module gdrdrv is of another "
        "release than the library in the image, or this kind of GPU memory cannot be mapped so (GB200: 22, EINVAL). "
        "UCX ends the process, or NIXL says NIXL_ERR_BACKEND.",
        now="`export UCX_TLS=^gdr_copy` on both sides (where UCX_TLS is set already: take gdr_copy out of the list), "
        "restart both. If transfers then time out, the way between the nodes is at fault too: `UCX_PROTO_INFO=y`",
        good="gdrdrv on the host of the release of libgdrapi in the image, or gdr_copy left out",
        threads=(
            "https://github.com/ai-dynamo/nixl/issues/149",
            "https://github.com/openucx/ucx/pull/11885",
            "https://github.com/NVIDIA/TensorRT-LLM/pull/16619",
        ),
    ),
    Problem(
        code="KVD1384",
        name="ucx-cannot-copy-into-gpu-memory",
        severity=Severity.CRASH,
        title="UCX could not copy what it had received into GPU memory, and ended the process.",
        shows=(
            Logged("mem type unpack failed to uct_ep_put_short()"),
            Died("mem type unpack failed to uct_ep_put_short()"),
        ),
        sentence="a message could not be unpacked into GPU memory",
        sure=False,
        cause="The KV came into host memory, and CUDA refused the copy: `No such device`, the thread that receives has "
        "no CUDA device. UCX copies so only where no transport writes into GPU memory itself: no RDMA card with "
        "GPUDirect, and no cuda_ipc, between the two engines.",
        now="`pip install -U nixl` on both sides, without another UCX in LD_LIBRARY_PATH; unset UCX_TLS; for RDMA "
        "--device /dev/infiniband in the container and `modprobe nvidia_peermem` on the node; UCX_PROTO_INFO=y at the "
        "next start shows which transport is taken",
        good="a transport that writes into GPU memory",
        threads=("https://github.com/ai-dynamo/nixl/issues/774",),
    ),
    Problem(
        code="KVD1762",
        name="two-ucx-in-one-process",
        severity=Severity.CRASH,
        title="A library of UCX, or one that needs it, finds a UCX of another release.",
        shows=tuple(Failed(kind="ImportError", text=f"undefined symbol: uc{part}_<symbol>") for part in "stpm"),
        sentence="uc.._{symbol} is not in the UCX that is found first",
        sure=False,
        cause="NVIDIA's images have HPC-X (/opt/hpcx) with a UCX and UCC of its own, nixl's wheel brings another, and "
        "the system may have a third. What LD_LIBRARY_PATH names first is taken for all of them.",
        now="env -u LD_LIBRARY_PATH python -c 'import torch, nixl' tells; if that is silent, start the engine so; with "
        "HPC-X's own MPI: LD_LIBRARY_PATH=/opt/hpcx/ucx/lib:/opt/hpcx/ucc/lib first; no libucx0 of the distribution",
        good="one UCX: nixl's wheel in an image without HPC-X in LD_LIBRARY_PATH, or nixl built against HPC-X's "
        "(/opt/hpcx/ucx/mt)",
        threads=("https://github.com/ai-dynamo/nixl/pull/2123", "https://github.com/coreweave/ml-containers/pull/173"),
    ),
)
