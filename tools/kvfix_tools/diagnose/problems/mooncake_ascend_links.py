"""Mooncake between NPUs (vllm-ascend): what the card's own network answers, by CANN's numbers."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_ASCEND = "https://github.com/vllm-project/vllm-ascend/issues"
#: CANN's HIXL and ADXL: their status codes.
_CODES = (
    "CANN's numbers: 103900 a parameter (an address) is refused, 103901 time-out, 103902 not connected, 103903 "
    "connected already, 103905 not supported, 203900 no stream left, 503900 any other (plog has it)"
)
_LESS = ("KVD503", "KVD519", "KVD520")

PROBLEMS = (
    Problem(
        code="KVD503",
        name="mooncake-ascend-transfer-failed",
        severity=Severity.HANG,
        title="Mooncake could not move KV between NPUs, and the request waits for ever.",
        shows=(
            Logged("Mooncake transfer failed for request <request>"),
            Logged("Failed to transfer KV cache for request <request>: Mooncake transfer failed"),
            Logged("Skipping KV cache transfer for request <request> because a previous transfer failed"),
            Failed(kind="RuntimeError", text="Mooncake transfer failed, ret: <ret>"),
        ),
        replaces=("KVD202",),
        sure=False,
        cause="The link of the NPUs or its time limit: `Failed to connect to target ... status: 103900` just before "
        "it: no connection; `Sync batch data transfer timeout` or `Transfer slice failed with status: 503900`: the "
        "transfer. vllm-ascend's receiver only logs it, so the request keeps its blocks and never runs, or (some "
        "releases) it and later ones answer garbage.",
        now='`"use_ascend_direct": true` in kv_connector_extra_config of both; both on one machine: `export '
        "HCCL_INTRA_ROCE_ENABLE=1`; `export ASCEND_CONNECT_TIMEOUT=60000 ASCEND_TRANSFER_TIMEOUT=60000`; `hccn_tool -i "
        "N -ping -g address IP` between the NPUs; CANN newer than 8.3.RC1; restart decode",
        good="NPU links that hccn_tool's ping confirms; no release of vllm-ascend is known to give such a request back",
        threads=(
            f"{_ASCEND}/7846",
            f"{_ASCEND}/5635",
            f"{_ASCEND}/7401",
            f"{_ASCEND}/13439",
            f"{_ASCEND}/5660",
            f"{_ASCEND}/8427",
        ),
    ),
    Problem(
        code="KVD504",
        name="mooncake-ascend-not-connected",
        severity=Severity.HANG,
        title="An NPU cannot connect to the NPU of the other engine.",
        shows=(Logged("Failed to connect to target: <target>, status: <status>"),),
        sentence="{target} answers {status}",
        replaces=_LESS,
        cause=f"The NPUs' own network (not the hosts') gives no link. {_CODES}. 103900 is seen where the NPUs' "
        "addresses are not known (no /etc/hccn.conf in the container), where Mooncake is not told to go to the card "
        "directly, and between two engines of one machine.",
        now='`"use_ascend_direct": true` in kv_connector_extra_config of both; both on one machine: `export '
        "HCCL_INTRA_ROCE_ENABLE=1` for both; docker with -v /etc/hccn.conf:/etc/hccn.conf; `hccn_tool -i N -ping -g "
        "address IP` between the NPUs; CANN newer than 8.3.RC1; restart both",
        good="the same, on every node; no release checks it at start",
        threads=(
            f"{_ASCEND}/5635",
            f"{_ASCEND}/7401",
            f"{_ASCEND}/4866",
            f"{_ASCEND}/13175",
        ),
    ),
    Problem(
        code="KVD1880",
        name="mooncake-ascend-link-refused-by-hccl",
        severity=Severity.HANG,
        title="HCCL could not make the link from this NPU to the other engine's.",
        shows=(Logged("Failed to connect to target: <target>, status: 503900"),),
        sentence="{target}",
        replaces=(*_LESS, "KVD504"),
        sure=False,
        cause="503900 is whatever CANN has no number of its own for. The text after `errmsg`, or plog of both ends, "
        "says it: `EI0020` a port of the NPU is taken; `ret: 0x13` of HcclCommPrepare is the NPUs' network, or more "
        "memory than the driver registers for one link (a report: a segment of 40 GB with HDK 25.2.3); `0x9` time-out.",
        now="`grep ERROR ~/ascend/log/debug/plog/*` on both machines; with a Mooncake store `global_segment_size` "
        "below 20 GB for each rank; both on one machine: `export HCCL_INTRA_ROCE_ENABLE=1`; `hccn_tool -i N -ping -g "
        "address IP` between the NPUs; restart both",
        good="what errmsg or plog names",
        threads=("https://github.com/kvcache-ai/Mooncake/issues/3267",),
    ),
    Problem(
        code="KVD1881",
        name="npu-socket-port-taken",
        severity=Severity.HANG,
        title="Two processes want the same port of one NPU's own network, and the second one gets no link.",
        shows=(
            Logged("Failed to enable listening for the NPU network adapter socket"),
            Logged("Communication_Error_Bind_IP_Port(EI0020)"),
            Logged("The IP address <address> and port <port> have already been bound"),
        ),
        replaces=(*_LESS, "KVD504", "KVD1880"),
        cause="HCCL listens on one fixed port of the card. A second process with the same card (Mooncake's client "
        "beside the worker, prefill and decode on one card, a leftover of before the restart) cannot take it too.",
        now="`export HCCL_NPU_SOCKET_PORT_RANGE=auto` for every process that uses the card, Mooncake's client too, and "
        "restart them all; `npu-smi info` shows a leftover",
        good="the variable in each start script, or a card for each process",
        threads=("https://github.com/kvcache-ai/Mooncake/issues/2121",),
    ),
    Problem(
        code="KVD1882",
        name="hccl-link-not-made",
        severity=Severity.CRASH,
        title="HCCL could not make a link between two NPUs.",
        shows=(
            Logged("Transport init error. Reason: [Create][DestLink]Create Dest error! <link>"),
            Logged("[Creat][Qp]creat qp failed, localDeviceId[<device>]"),
        ),
        sure=False,
        cause="The NPUs' own network: addresses (`hccn_tool -i N -ip -g`), a card that is down, TLS on at one of the "
        "two. `this package does not support` in plog: the driver is older than this CANN (KVD1883). Else the other "
        "rank ended first, and its log has the cause.",
        now="`grep ERROR ~/ascend/log/debug/plog/*` on both machines; `hccn_tool -i N -ping -g address IP` between the "
        "cards of the line, `hccn_tool -i N -tls -g` (the same on both); `export HCCL_CONNECT_TIMEOUT=600`; restart "
        "both engines",
        good="what plog names",
        threads=(f"{_ASCEND}/2406", f"{_ASCEND}/3162"),
    ),
    Problem(
        code="KVD1883",
        name="npu-driver-older-than-cann",
        severity=Severity.CRASH,
        title="The NPU's driver lacks a call that this CANN makes, so the NPUs get no link.",
        shows=(Logged("this package does not support <call> for device, please change new package"),),
        sentence="{call}",
        replaces=("KVD1882",),
        cause="HCCL's part on the card (HCCP) comes with driver and firmware (HDK), not with CANN. A newer CANN in the "
        "container asks an older driver of the host for queues that it does not know.",
        now="`cat /usr/local/Ascend/driver/version.info` on the host; install the HDK (driver and firmware) that the "
        "installation page of this vllm-ascend names for its CANN; restart the host",
        good="HDK and CANN of one table",
        threads=(f"{_ASCEND}/2406",),
    ),
    Problem(
        code="KVD1064",
        name="mooncake-ascend-connects-too-slowly",
        severity=Severity.HANG,
        title="A link or a transfer between two NPUs takes longer than its time limit.",
        shows=(
            Logged("Connect timeout to: <target>, you can increase the timeout"),
            Logged("Transfer timeout to: <target>, you can increase the timeout"),
            Logged("Failed to connect to target: <target>, status: 103901"),
        ),
        sentence="{target} did not answer in time",
        replaces=(*_LESS, "KVD504", "KVD335"),
        sure=False,
        cause="10 s are usual for either (ASCEND_CONNECT_TIMEOUT, ASCEND_TRANSFER_TIMEOUT). The first requests after a "
        "start connect all ranks at once, which takes longer with many of them; a peer that ended or hangs, and NPUs "
        "whose network does not reach each other, time out each time.",
        now="`export ASCEND_CONNECT_TIMEOUT=60000 ASCEND_TRANSFER_TIMEOUT=60000` (milliseconds) on both sides and "
        "restart; each time: `hccn_tool -i N -ping -g address IP` for the address of the line, and is that engine "
        "alive? With a Mooncake store: mooncake_master --default_kv_lease_ttl above both",
        good="NPU links that hccn_tool's ping confirms, and that time limit",
        threads=(f"{_ASCEND}/7401", f"{_ASCEND}/10532"),
    ),
    Problem(
        code="KVD1066",
        name="mooncake-ascend-slice-failed",
        severity=Severity.HANG,
        title="A part of a transfer between two NPUs failed.",
        shows=(Logged("Transfer slice failed with status: <status>"),),
        sentence="CANN answers {status}",
        replaces=_LESS,
        sure=False,
        cause=f"{_CODES}. 103902 after a transfer that worked: the peer restarted, or the link was closed after an "
        "earlier failure. 103901, 503900: the transfer began and did not end in ASCEND_TRANSFER_TIMEOUT.",
        now="103902: restart decode, after a prefill engine that went away; 503900 within one machine: `export "
        "HCCL_INTRA_ROCE_ENABLE=1` for both, between two: `hccn_tool -i N -ping -g address IP`; 103901, 503900: "
        "`export ASCEND_TRANSFER_TIMEOUT=60000`; 103900: the same --block-size on both; `grep ERROR "
        "~/ascend/log/debug/plog/*` tells more. A put of a Mooncake store is given back: only its chunk is missing",
        good="NPU links that hccn_tool's ping confirms, and engines that stay",
        threads=(f"{_ASCEND}/7401", f"{_ASCEND}/7792"),
    ),
    Problem(
        code="KVD1068",
        name="mooncake-ascend-hccl-transfer-failed",
        severity=Severity.HANG,
        title="HCCL refuses a transfer between NPUs, often because one machine's cards talk by PCIe or HCCS.",
        shows=(
            Logged("Failed to invoke HcclBatchPut, <what> = <result>"),
            Logged("Failed to invoke HcclBatchGet, <what> = <result>"),
            Logged("Can't find remoteBuffer by key"),
        ),
        replaces=(*_LESS, "KVD1066"),
        sure=False,
        cause="CANN moves KV with HCCL's one-sided calls. 4 with `Can't find remoteBuffer by key` in plog: the memory "
        "was registered for RoCE, and cards of one machine do not use RoCE among themselves unless a setting says so. "
        "Others: 1 parameter, 3 memory, 5 not supported, 9 time-out, 11 and 12 no TCP or RoCE connection, 14 RoCE "
        "transfer, 21 the peer's error.",
        now="`export HCCL_INTRA_ROCE_ENABLE=1` for prefill, decode and every worker of the Mooncake store (before the "
        "start: CANN reads it once), and restart all; another number: `grep ERROR ~/ascend/log/debug/plog/*`",
        good="the same in the start script",
        threads=(f"{_ASCEND}/11454",),
    ),
)
