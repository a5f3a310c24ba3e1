"""RDMA below Mooncake's transfers: queue pairs that do not come up, and transfers that a card gives up."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

_PULLS = "https://github.com/vllm-project/vllm/pull"
_ISSUES = "https://github.com/kvcache-ai/Mooncake/issues/"
_LESS = ("KVD020", "KVD886", "KVD520", "KVD519")

PROBLEMS = (
    Problem(
        code="KVD505",
        name="mooncake-rdma-fails",
        severity=Severity.HANG,
        title="Mooncake's queue pair to the peer's card does not come up.",
        shows=(
            Logged("Failed to modify QP to RTR, check mtu, gid, peer lid, peer qp num"),
            Logged("Failed to modity QP to RTR, check mtu, gid, peer lid, peer qp num"),
        ),
        replaces=_LESS,
        cause="The two cards do not go together as they are set: a GID that is no RoCE v2 address of the common "
        "network (link-local fe80, another VLAN), an MTU that the port does not have, or InfiniBand on one side and "
        "Ethernet on the other. The side that prints it without `rejected by peer` is the one that refuses.",
        now="show_gids on both: `MC_GID_INDEX=N`, N the line `v2` with the address of the common network (often 3); "
        "`MC_MTU=1024` on both (ibv_devinfo: active_mtu); link_layer the same; then restart. Without RDMA "
        "`MC_FORCE_TCP=1` in every process",
        good="RDMA that `ib_write_bw -d CARD -x N` confirms between these two cards",
        threads=(f"{_PULLS}/10884",),
    ),
    Problem(
        code="KVD1056",
        name="mooncake-cards-do-not-reach",
        severity=Severity.HANG,
        title="An RDMA card of this node gets no answer from a card of the peer.",
        shows=(
            Logged(
                "Process failed for slice (<slice>, local_nic: <local>, peer_nic: <peer>, dest_rkey: <key>): transport "
                "retry counter exceeded"
            ),
        ),
        sentence="{local} here gets no answer from {peer}",
        replaces=(*_LESS, "KVD1058"),
        cause="The names in the line decide. Cards of other names, in a network by rails: only the same rail is "
        "connected. Always one card: its cable, subnet or GID. Every card of one peer: that process has ended. "
        "A report had these lines with `protocol: tcp` in the file: the cards were found all the same.",
        now="`MC_ENABLE_DEST_DEVICE_AFFINITY=1` on both sides (each card goes to the peer's of the same name), "
        "`MC_GID_INDEX=N` of show_gids' RoCE v2 line; or one card that reaches: device_name in "
        "kv_connector_extra_config (stores: in MOONCAKE_CONFIG_PATH's file); without RDMA `MC_FORCE_TCP=1`; restart "
        "both",
        good="`ib_write_bw -d CARD -x N` between the two cards of the line; Mooncake 0.3.5 or newer for the affinity",
        threads=(f"{_ISSUES}82", f"{_ISSUES}35", f"{_ISSUES}1055", f"{_PULLS}/10884"),
    ),
    Problem(
        code="KVD1058",
        name="mooncake-slice-given-up",
        severity=Severity.HANG,
        title="An RDMA card gave up a part of Mooncake's transfer.",
        shows=(
            Logged("Process failed for slice (<slice>): transport retry counter exceeded"),
            Logged("Process failed for slice (<slice>): Work Request Flushed Error"),
            Logged("Process failed for slice (<slice>): RNR retry counter exceeded"),
            Logged("Process failed for slice (<slice>): remote operation error"),
        ),
        replaces=_LESS,
        sure=False,
        cause="`transport retry counter exceeded`: no answer (network, GID, or the peer has ended). `Flushed`: only "
        "the echo of the first failure on that connection: find the first `Process failed for slice` of another kind. "
        "`RNR`, `remote operation error`: the peer's card had nothing ready; that process is gone or stuck.",
        now="grep -m1 'Process failed for slice' in the logs of both sides: that line's words decide; is the peer's "
        "process alive? `MC_GID_INDEX=N` of show_gids' RoCE v2 line; without RDMA `MC_FORCE_TCP=1` in every process; "
        "restart both",
        good="RDMA that `ib_write_bw -d CARD -x N` confirms between the nodes",
    ),
    Problem(
        code="KVD1060",
        name="mooncake-own-card-not-ready",
        severity=Severity.HANG,
        title="Mooncake cannot set up a queue pair on this node's own card.",
        shows=(Logged("Failed to modify QP to INIT"),),
        replaces=_LESS,
        cause="The port that Mooncake takes is not the card's (1 unless MC_IB_PORT says otherwise), is not ACTIVE, or "
        "the driver does not take the access flags (irdma, a virtual function without rights).",
        now="ibv_devinfo: take a card whose port says PORT_ACTIVE into device_name, `MC_IB_PORT=2` where it is the "
        "second port; without RDMA `MC_FORCE_TCP=1`; restart",
        good="a card that `ib_write_bw -d CARD` runs on",
    ),
    Problem(
        code="KVD1062",
        name="mooncake-queue-pairs-exhausted",
        severity=Severity.HANG,
        title="The RDMA card has no room for another of Mooncake's queue pairs.",
        shows=(Logged("Failed to create QP: Cannot allocate memory"), Logged("Failed to create QP: Resource temp")),
        replaces=_LESS,
        cause="Without affinity each card of this node connects with each card of every peer, with two queue pairs "
        "for a connection: cards x cards x peers x 2, up to the driver's limit. Or the container's locked memory is "
        "the limit (`ulimit -l`).",
        now="`MC_ENABLE_DEST_DEVICE_AFFINITY=1` (one card to one card), `MC_NUM_QP_PER_EP=1`, container with --ulimit "
        "memlock=-1; `rdma resource show` counts them; restart",
        good="Mooncake 0.3.5 or newer with MC_ENABLE_DEST_DEVICE_AFFINITY=1",
    ),
    Problem(
        code="KVD375",
        name="mooncake-rdma-key-refused",
        severity=Severity.HANG,
        title="The RDMA card refuses the memory of a transfer.",
        shows=(
            Logged("Process failed for slice (<slice>): local protection error"),
            Logged("Process failed for slice (<slice>): remote access error"),
            Logged("Process failed for slice (<slice>): local length error"),
            Logged("Process failed for slice (<slice>): remote invalid request error"),
            Logged("local access violation work queue error"),
        ),
        replaces=("KVD1058",),
        sure=False,
        cause="The card does not know the memory: it was registered with another card than the one that moves it "
        "(several cards, bonds, a GPU behind another switch), registered for less than is moved, or freed and "
        "allocated anew (sleep mode, expandable segments). `local`: this side's memory, `remote`: the peer's. What "
        "was fetched is wrong.",
        now="one card that is next to the GPU (nvidia-smi topo -m) in device_name on each side; lsmod | grep peermem; "
        'no PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; without RDMA "mooncake_protocol": "tcp" on both sides',
        good="a card for each GPU that both sides name, and the newest mooncake-transfer-engine on both",
        threads=(
            "https://github.com/sgl-project/sglang/issues/8324",
            "https://github.com/sgl-project/sglang/issues/10560",
            "https://github.com/kvcache-ai/Mooncake/issues/3299",
            f"{_ISSUES}277",
        ),
    ),
)
