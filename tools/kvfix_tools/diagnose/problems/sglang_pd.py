"""SGLang's own prefill and decode, over Mooncake or NIXL: what it says of a transfer that failed.

Its lines have no level, and name the request that ends. What failed stands before them, in the transport's own lines.
"""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem, Sign

_SGLANG, _MOONCAKE = "https://github.com/sgl-project/sglang/issues", "https://github.com/kvcache-ai/Mooncake/issues"


def _said(*texts: str) -> tuple[Sign, ...]:
    return tuple(Failed(kind="KVTransferError", text=text) for text in texts)


PROBLEMS = (
    Problem(
        code="KVD1138",
        name="sglang-request-was-aborted",
        general=True,
        severity=Severity.RISK,
        title="SGLang ended a request's transfer because the request was aborted.",
        shows=_said("Aborted by AbortReq"),
        sure=False,
        cause="The client or the router closed its connection, or asked for an abort: a time limit in front of SGLang, "
        "or the other half of the pair failed and the router gave up both. The transport is not at fault.",
        now="the router's log and the other engine's at this second; time limits of client, router and load balancer "
        "above the longest prefill; an engine that gets HTTP/2 (`PRI %2A HTTP/2.0` 404) wants http1 from its proxy",
        good="time limits that fit; what the other engine's log says, where it failed first",
        threads=(f"{_SGLANG}/12688",),
    ),
    Problem(
        code="KVD1140",
        name="sglang-transfer-failed-elsewhere",
        general=True,
        severity=Severity.HANG,
        title="SGLang ends a request whose KV transfer failed, and does not say why.",
        shows=(
            *_said(
                "Failed to get kvcache from prefill instance",
                "Decode instance could be dead, remote mooncake session",
                "Failed to send kv chunk",
                "Failed due to an unknown reason from another rank",
                "Losing connection with prefill instance",
            ),
            Logged("Failed to get kvcache from prefill instance, it might be dead"),
        ),
        sure=False,
        cause="`It might be dead` is a guess: mostly both run, and one transfer failed. Decode only hears so from "
        "prefill; prefill refuses a session for good after its first failure. The reason is in prefill's log, in the "
        "first E line of the transport (tcp_transport.cpp, rdma_*.cpp, worker_pool.cpp; UCX) before `Session ... "
        "failed`.",
        now="grep -nE '^E[0-9]{4}|UCX  ERROR|Session .* failed' PREFILL.log | head, then kvfix-diagnose BOTH; "
        "restart decode (a new session); `Found 0 HCAs` or `Installing TCP transport`: no RDMA is in use",
        good="what the transport's first line says",
        threads=(f"{_SGLANG}/15665", f"{_SGLANG}/23272", f"{_SGLANG}/6548", f"{_MOONCAKE}/851"),
    ),
    Problem(
        code="KVD1142",
        name="sglang-transfer-took-too-long",
        general=True,
        severity=Severity.HANG,
        title="A request of SGLang waited too long for the other half, and was ended.",
        shows=_said("s in KVPoll.Bootstrapping", "s in KVPoll.WaitingForInput"),
        sure=False,
        cause="Bootstrapping: prefill never heard from decode: decode is full, its request went to another prefill, or "
        "the bootstrap port is not reachable. WaitingForInput: decode waits for KV: prefill has a long queue, or its "
        "transfer failed or hangs without a word (NIXL with LIBFABRIC: nixl#1862).",
        now="the other side's log for this bootstrap_room; only slow: `export "
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT=600 SGLANG_DISAGGREGATION_WAITING_TIMEOUT=600` on both (300 s by "
        "default)",
        good="as many decode slots as prefill sends; a transport that reports its failures",
        threads=("https://github.com/ai-dynamo/nixl/issues/1862",),
    ),
)
