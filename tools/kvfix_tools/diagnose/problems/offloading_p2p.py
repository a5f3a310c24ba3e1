"""The P2P tier of vLLM's OffloadingConnector: engines that do not connect, KV that is not fetched."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

_P2P = "vllm/v1/kv_offload/tiering/p2p"

PROBLEMS = (
    Problem(
        code="KVD618",
        name="offload-peer-never-fetched",
        severity=Severity.SLOW,
        title="Prefill kept KV for a decode engine that did not fetch it, and gave it up.",
        shows=(
            Logged(
                "unbound store kv_request_id=<request> timed out after <seconds>s without a fetch",
                at=f"{_P2P}/manager.py",
            ),
        ),
        said=(r"(?i)tier|offload", r"(?i)\bunbound\b|parked", r"(?i)\b60 ?s\b|fetch", r"(?i)recompute|discard|reap"),
        sentence="request {request}, after {seconds} s",
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="Decode is down, cannot reach prefill, got another `kv_request_id` from the router, or waits longer than "
        "that. Decode then computes the prompt itself.",
        now="look for the id in decode's log; `VLLM_P2P_SIDE_CHANNEL_HOST` an address that decode reaches (its default "
        'is localhost), `VLLM_P2P_SIDE_CHANNEL_PORT` open; if decode is only late: `"unbound_store_timeout_s": 300` in '
        "that tier's configuration",
        good="a router that hands the same id to both, and an address that is reachable",
    ),
    Problem(
        code="KVD600",
        name="offload-peers-have-one-name",
        severity=Severity.SLOW,
        title="Two engines of the P2P tier go by the same address, and neither can connect to the other.",
        shows=(
            Logged("loadRemoteMD: remote agent name same as local agent"),
            Logged("error handling message 'connect' (count=<count>): NIXL_ERR_INVALID_PARAM"),
        ),
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="An engine's name is the tier's host and port. With `0.0.0.0`, or with localhost, which is the default, "
        "every engine has the same one. It is this if both lines stand there.",
        now='`"host": "POD_IP"` in the p2p tier of secondary_tiers, or `export VLLM_P2P_SIDE_CHANNEL_HOST=POD_IP`: the '
        "address at which others reach this engine; restart",
        good="the configuration",
        threads=("https://github.com/vllm-project/vllm/pull/47636",),
    ),
)
