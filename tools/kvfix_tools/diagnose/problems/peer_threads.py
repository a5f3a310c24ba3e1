"""Threads that give chunks to other instances, and fail: prefill, decode and P2P."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

_P2P = "lmcache/v1/storage_backend/p2p_backend.py"
_PD = "lmcache/v1/storage_backend/pd_backend.py"
_MOONCAKE = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"

PROBLEMS = (
    Problem(
        code="KVD259",
        name="prefiller-asks-in-vain",
        severity=Severity.HANG,
        title="The decoder of LMCache's PD mode could not answer a prefiller that asks for memory or for cached keys.",
        shows=(
            Logged("Failed to process mem alloc loop: <error>", _PD),
            Logged("Cache query recv failed: <error>", _PD),
            Logged("Failed to process cache query: <error>", _PD),
        ),
        releases={"lmcache": ">=0.5.2"},
        sentence="{error}",
        cause="The decoder's thread logs the error and sends no answer. The prefiller waits in its REQ socket for it: "
        "its transfers stand still from then on (pd_backend.py 0.5.6:978, :1035).",
        now="restart this prefiller and decoder together; the same LMCache release on both; the error names the rest",
        good="no release up to 0.5.6 answers with the error",
    ),
    Problem(
        code="KVD260",
        name="peer-load-fails",
        severity=Severity.SLOW,
        title="KV could not be fetched from another instance (P2P): the request computes it itself.",
        shows=(
            Logged("Error during P2P batched lookup and get operation for lookup_id <id>: <error>", _P2P),
            Logged("Error during P2P batched lookup and put operation: <error>", _P2P),
            Logged("Error during P2P get operation for lookup_id <id>: <error>", _P2P),
        ),
        releases={"lmcache": ">=0.5.2"},
        cause="The peer has ended or was restarted with other memory, its port cannot be reached from here, or it has "
        "evicted the chunks meanwhile. The controller goes on naming it until its heartbeat is missed.",
        now="p2p_host of each instance an address that the others reach; p2p_init_ports and p2p_lookup_ports open; "
        "the same LMCache release everywhere",
        good="the configuration; nothing, if it stops after a restart of a peer",
        sure=False,
    ),
    Problem(
        code="KVD261",
        name="mooncake-prefill-cannot-send",
        severity=Severity.HANG,
        title="The prefill engine could not send a request's KV to the decode engine with Mooncake.",
        shows=(
            Logged("Error processing Mooncake xfer request: <error>", _MOONCAKE),
            Logged("Error in _sender_worker: <error>", _MOONCAKE),
            Logged("Error in Mooncake sender thread: <error>. Exiting thread.", _MOONCAKE),
            Logged("pulling kv_caches for <requests> failed: <error>", _MOONCAKE),
        ),
        connectors=("MooncakeConnector", "MultiConnector"),
        sentence="{error}",
        cause="The decode engine gets the error for this request and its load fails. After `Exiting thread` the "
        "prefill engine answers no decode engine any more: all wait for it (mooncake_connector.py 0.32.0:1467, :1484).",
        now="after `Exiting thread`: restart the prefill engine. Else what the error names: the same "
        "--tensor-parallel-size, --block-size and model on both sides, ports open both ways",
        good='"kv_load_failure_policy":"recompute" in --kv-transfer-config of decode, and what the error names',
        sure=False,
    ),
)
