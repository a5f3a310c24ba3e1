"""The P2P tier of vLLM's OffloadingConnector: KV that a peer does not come for."""

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
)
