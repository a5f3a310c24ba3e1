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
            Failed(kind="RuntimeError", text="Mooncake transfer failed, ret: <ret>"),
        ),
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
        code="KVD1064",
        name="mooncake-ascend-connects-too-slowly",
        severity=Severity.HANG,
        title="The link between two NPUs is not made in ASCEND_CONNECT_TIMEOUT.",
        shows=(
            Logged("Connect timeout to: <target>, you can increase the timeout"),
            Logged("Failed to connect to target: <target>, status: 103901"),
        ),
        sentence="{target} did not answer in time",
        replaces=(*_LESS, "KVD504"),
        cause="10 s are usual. The first requests after a start connect all ranks at once, which takes longer with "
        "many of them; a peer that ended or hangs, and NPUs whose network does not reach each other, time out each "
        "time.",
        now="`export ASCEND_CONNECT_TIMEOUT=60000 ASCEND_TRANSFER_TIMEOUT=60000` (milliseconds) on both sides and "
        "restart; each time: `hccn_tool -i N -ping -g address IP` for the address of the line, and is that engine "
        "alive? With a Mooncake store: mooncake_master --default_kv_lease_ttl above both",
        good="NPU links that hccn_tool's ping confirms, and that time limit",
        threads=(f"{_ASCEND}/7401",),
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
        "HCCL_INTRA_ROCE_ENABLE=1` for both; 103901: `export ASCEND_TRANSFER_TIMEOUT=60000`; 103900: the same "
        "--block-size on both; `grep ERROR ~/ascend/log/debug/plog/*` tells more",
        good="NPU links that hccn_tool's ping confirms, and engines that stay",
        threads=(f"{_ASCEND}/7401",),
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
