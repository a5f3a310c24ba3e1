"""LMCache's PD up to 0.3.6 (`enable_nixl`), and what its later peers say when a transfer is taken back."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_PD = (
    "`enable_pd: true`, `transfer_channel: nixl`, `pd_role: sender` or `receiver`, `pd_buffer_size`, `pd_buffer_device`"
)

PROBLEMS = (
    Problem(
        code="KVD064",
        name="legacy-pd-is-no-allocator",
        severity=Severity.CRASH,
        title="`enable_nixl` without `enable_xpyd` does not start in LMCache 0.3.4 and 0.3.5.",
        shows=(
            Failed(
                kind="AssertionError",
                within="storage_manager.py:_get_allocator_backend",
                source="assert isinstance(allocator_backend, AllocatorBackendInterface)",
            ),
            # A report may have the line without its frame, or the frame without its line.
            Failed(kind="AssertionError", source="assert isinstance(allocator_backend, AllocatorBackendInterface)"),
            Failed(kind="AssertionError", within="storage_manager.py:_get_allocator_backend"),
        ),
        releases={"lmcache": "<0.3.7"},
        cause="The storage manager takes its memory from the NIXL backend, and the one for a single pair of engines "
        "(without enable_xpyd) cannot give any.",
        now="`enable_xpyd: true` with the settings of that mode (receiver: nixl_peer_host, nixl_peer_init_port, "
        "nixl_peer_alloc_port; sender: nixl_proxy_host, nixl_proxy_port), `nixl_backends: [UCX]`; restart",
        good=f"LMCache 0.3.9 or newer with its PD mode: {_PD}",
        threads=(_LMCACHE + "issues/1551", _LMCACHE + "issues/1478"),
    ),
    Problem(
        code="KVD065",
        name="legacy-pd-transfer-out-of-step",
        severity=Severity.CRASH,
        title="A transfer of LMCache's first PD mode (`enable_nixl`) is out of step.",
        shows=(
            Failed(text="Another send transaction is already in progress"),
            Failed(text="No send transaction is prepared"),
            Failed(text="Cannot add more payloads than prepared objects"),
            Failed(text="Not all payloads are added to the send transaction"),
            Failed(text="The backend has already registered put tasks"),
            Failed(text="The backend has not registered put tasks"),
            Failed(text="The number of payloads added is not equal to the number of"),
            Failed(text="Failed to allocate zero-copy buffer from nixl_channel"),
            Failed(text="Batched allocation is not supported in NIXL buffer allocator"),
            Failed(kind="AssertionError", source="assert sender_id in self._sender_pipes"),
            Logged("Cannot prepare a new send transaction while another is in progress"),
            Logged("Failed to process receiver loop: <reason>"),
            Logged("Transfer failed with status: <status>, handle: <handle>"),
            Logged("Received message for wrong sender: <sender>"),
        ),
        releases={"lmcache": "<0.3.7"},
        sure=False,
        cause="That mode sends one request after the other through one buffer for one pair. A request that failed "
        "in between (buffer too small, peer restarted, request aborted), a second prefill or decode of the same "
        "ports, or `save_decode_cache` leaves a transaction open, and all later ones fail.",
        now="restart both sides; until the upgrade one prefill and one decode, nixl_buffer_size larger than the "
        "longest prompt (tokens x 2 x layers x KV heads x head size x 2 bytes), and no aborts",
        good=f"LMCache 0.3.9 or newer with its PD mode: {_PD}",
    ),
    Problem(
        code="KVD066",
        name="legacy-pd-setting-missing",
        severity=Severity.CRASH,
        title="A setting of `enable_nixl` is missing.",
        shows=(
            Failed(kind="AssertionError", source="assert config.nixl_"),
            Failed(kind="AssertionError", source="assert self.nixl_"),
            Failed(kind="AssertionError", source="assert config.pd_buffer_"),
            Failed(kind="AssertionError", text="NIXL is not enabled in the LMCacheEngineConfig"),
            Failed(kind="AssertionError", text="Nixl role must be either SENDER or RECEIVER"),
            Failed(kind="ValueError", text="Invalid Nixl device"),
        ),
        cause="The assertion names it. Up to 0.3.6: nixl_role, nixl_receiver_host, nixl_receiver_port, "
        "nixl_buffer_size, nixl_buffer_device, nixl_enable_gc, with enable_xpyd also nixl_peer_host, its ports and "
        "nixl_proxy_host. From 0.3.7 on they have other names: pd_role, pd_peer_host, pd_peer_init_port, "
        "pd_peer_alloc_port, pd_proxy_host, pd_buffer_size, pd_buffer_device.",
        now="the setting of this name in the file of LMCACHE_CONFIG_FILE (or LMCACHE_<NAME> in capitals), on the side "
        "that says it; restart",
        good=f"LMCache 0.3.9 or newer with {_PD}",
    ),
    Problem(
        code="KVD067",
        name="mp-transfer-channel-refused",
        severity=Severity.SLOW,
        title="LMCache's servers cannot read one another's memory: their transfer channel does not come up.",
        shows=(
            Failed(text="waiting for a transfer-channel handshake reply from <peer>."),
            Logged("waiting for a transfer-channel handshake reply from <peer>."),
            Failed(kind="ValueError", text="Unsupported transfer_channel_type: <type>"),
            Failed(kind="ValueError", text="Invalid transfer channel url: <url> (expected host:port)"),
            Failed(kind="ValueError", text="is outside the registered L1 region"),
            Failed(kind="ValueError", text="Unexpected handshake message: <message>"),
            Failed(kind="RuntimeError", text="Failed to initialize mooncake_te engine, ret=<ret>"),
            Failed(kind="RuntimeError", text="unexpected mooncake transfer engine status: <status>"),
            Logged("Error in transfer channel server loop"),
        ),
        sure=False,
        cause="`Timed out after 60s`: the advertised address of the peer (host:port) does not lead to it from here, "
        "its port is closed, or it has died. `Unexpected handshake message`: a server of another LMCache release. "
        "`outside the registered L1 region`: memory that was added after the start. `mooncake_te engine, ret`: the "
        "protocol or device of Mooncake (its own E lines come before).",
        now="nc -vz HOST PORT of the peer's advertised address from this server; the pod's or node's own address "
        "there, not localhost or 0.0.0.0; the same LMCache on all servers; restart the one that cannot be reached",
        good="addresses that every server reaches",
    ),
    Problem(
        code="KVD068",
        name="pd-transfer-taken-back",
        severity=Severity.SLOW,
        title="A transfer of LMCache's PD or P2P failed on its way, and its chunks were taken back.",
        shows=(
            Logged("[PD-ALLOC] req=<request> batch failed, rolling back"),
            Logged("batched_submit_put_task failed, ref counts rolled back: <reason>"),
            Logged("Peer connection not initialized for lookup_id <lookup>"),
            Failed(kind="AssertionError", text="Expected BatchedP2PLookupRetMsg, got"),
            Failed(kind="AssertionError", within="batched_async_contains", source="BatchedP2PLookupRetMsg"),
        ),
        sure=False,
        cause="The line before it or the reason in it decides: no room in the receiver's buffer (pd_buffer_size), a "
        "peer that was restarted and does not know this engine (`not initialized`: it connects anew, once for each "
        "peer), or a controller of another LMCache release. Decode computes the tokens itself.",
        now="pd_buffer_size of the receiver for the longest prompts times the number at once; one LMCache release for "
        "engines and controller; nothing where `not initialized` comes once after a restart",
        good="a buffer that fits the load, and one release",
    ),
    Problem(
        code="KVD1092",
        name="legacy-pd-without-request-spec",
        severity=Severity.CRASH,
        title="The prefiller of LMCache's first PD mode (`enable_nixl`, one pair) dies at its first prompt.",
        shows=(Failed(kind="AttributeError", text="'NoneType' object has no attribute 'is_last_prefill'"),),
        releases={"lmcache": "<0.3.9"},
        cause="Without enable_xpyd a request carries no `disagg_spec`; LMCache 0.3.3 notes the last part of a prompt "
        "in it all the same (pull 1162 brought that, pull 1388 asks for it first).",
        now="`enable_xpyd: true` with its ports, and LMCache's proxy, which adds the spec; or pip install "
        "lmcache==0.3.2",
        good=f"LMCache 0.3.9 or newer, which asks whether there is a spec, with its PD mode: {_PD}",
        threads=(_LMCACHE + "pull/1388", _LMCACHE + "issues/1251"),
    ),
    Problem(
        code="KVD1094",
        name="peer-lookup-deletes-nothing",
        severity=Severity.CRASH,
        title="LMCache's first P2P mode tells Redis to delete a list of keys that is empty, and vLLM dies.",
        shows=(Failed(kind="ResponseError", text="wrong number of arguments for 'del' command"),),
        releases={"lmcache": "<0.3.9"},
        cause="A store that has to evict first reports what it evicted to the Redis of `lookup_url`. Where it evicted "
        "nothing (disk alone, local_cpu: false) the DEL has no key, and Redis refuses it.",
        now="`enable_p2p: false` (LMCACHE_ENABLE_P2P=False), or local_cpu: true with a larger max_local_cpu_size; "
        "restart",
        good="LMCache 0.3.9.post2 or newer, whose P2P asks its controller instead of a lookup_url",
        threads=(_LMCACHE + "issues/1228", _LMCACHE + "pull/527"),
    ),
)
