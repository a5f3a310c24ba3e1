"""LMCache's own P/D disaggregation and P2P sharing."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_STORE = "lmcache/v1/storage_backend"
_LMCACHE = "https://github.com/LMCache/LMCache/issues"
_PD_BACKEND_ASYNC = f"{_STORE}/pd_backend_async.py"
_P2P_BACKEND = f"{_STORE}/p2p_backend.py"

PROBLEMS = (
    Problem(
        code="KVD525",
        name="pd-receiver-buffer-full",
        severity=Severity.HANG,
        title="The decoder's PD buffer is full, and its receiver tries for ever to find room.",
        shows=(Logged("Failed to allocate memory object, retrying...", at=f"{_STORE}/pd_backend.py"),),
        said=(
            r"(?i)lmcache",
            r"(?i)(?:nixl|pd)[ _]buffer\b",
            r"(?i)overflow|\bretry|\bretries|for ?ever|\bfull\b|not (?:be able to )?(?:fit|store)",
        ),
        sure=False,
        cause="Chunks in the decoder's PD buffer are not freed: a shared prefix is pinned once more for each request, "
        "and chunks that the decoder's own prefix cache covers are received and never loaded. A few such lines that "
        "end again are only a small buffer; a flood without end is this.",
        now="restart the decoder; larger `pd_buffer_size` (before 0.3.9 `nixl_buffer_size`) on both sides; decoder "
        "with `--no-enable-prefix-caching`; fewer requests at once through the proxy; LMCache 0.4.5 or later: remove "
        "`pd_backend_mode: sync`",
        good="LMCache 0.4.5 or later with its default `pd_backend_mode: async`, which gives up after "
        "`pd_allocation_timeout_sec`; the sync backend is right in no release yet",
        threads=(
            f"{_LMCACHE}/1990",
            f"{_LMCACHE}/1337",
            f"{_LMCACHE}/1030",
        ),
    ),
    Problem(
        code="KVD526",
        name="pd-one-port-for-many-ranks",
        severity=Severity.CRASH,
        title="Fewer ports are configured than the engine has ranks.",
        shows=(
            Failed(kind="IndexError", text="list index out of range", within="pd_backend.py:from_cache_engine_config"),
            Failed(
                kind="IndexError", text="list index out of range", within="pd_backend_async.py:from_cache_engine_config"
            ),
            Failed(
                kind="IndexError",
                text="list index out of range",
                within="nixl_connector_v3.py:from_cache_engine_config",
            ),
            Failed(kind="IndexError", text="list index out of range", within="p2p_backend.py:__init__"),
            Failed(kind="IndexError", text="list index out of range", within="cache_controller/worker.py:__init__"),
        ),
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        cause="pd_peer_init_port, pd_peer_alloc_port (nixl_peer_init_port, nixl_peer_alloc_port in 0.3.4 and its "
        "like), p2p_init_ports, p2p_lookup_ports and lmcache_worker_ports are lists with one port for each tensor "
        "parallel rank; rank 0 comes up, the others do not.",
        now="as many ports as ranks: `pd_peer_init_port: [7300, 7301, 7302, 7303]`, `pd_peer_alloc_port: [7400, 7401, "
        "7402, 7403]` (P2P: `p2p_init_ports`, `p2p_lookup_ports`, `lmcache_worker_ports`), restart",
        good="the configuration; no release checks it at the start",
        threads=(
            f"{_LMCACHE}/2854",
            f"{_LMCACHE}/1966",
            f"{_LMCACHE}/1381",
        ),
    ),
    Problem(
        code="KVD527",
        name="pd-ports-and-ranks-differ",
        severity=Severity.SLOW,
        title="LMCache did not start on a rank because a list of its configuration is too short.",
        shows=(Logged("LMCacheEngine marked as init failed: list index out of range"),),
        sure=False,
        cause="With `enable_pd` or `enable_p2p`: a list of ports has one entry, and this rank has none (rank 0 runs). "
        "The engine computes everything itself. Another list is at fault if neither is on.",
        now="one port for each rank: `pd_peer_init_port: [7300, 7301, ...]`, `pd_peer_alloc_port: [7400, 7401, ...]`, "
        "for P2P `p2p_init_ports`, `p2p_lookup_ports`, `lmcache_worker_ports`; restart",
        good="the configuration; no release checks it at the start",
        threads=(f"{_LMCACHE}/2854",),
    ),
    Problem(
        code="KVD528",
        name="pd-buffer-below-one-chunk",
        severity=Severity.CRASH,
        title="pd_buffer_size is smaller than one chunk of this model.",
        shows=(
            Failed(
                kind="ValueError",
                text="pd_buffer_size (<size>) is smaller than a single chunk (<chunk>)",
                at=f"{_STORE}/pd_backend.py",
            ),
            Logged("pd_buffer_size (<size>) is smaller than a single chunk (<chunk>)"),
        ),
        sentence="{size} bytes, a chunk has {chunk}",
        releases={"lmcache": ">=0.4.3"},
        cause="The buffer holds whole chunks (chunk_size tokens in all layers of this rank); none fits.",
        now="`pd_buffer_size: 2147483648` (2 GB) or more on both sides, or a smaller `chunk_size` on both",
        good="the configuration; a buffer for the longest prompt: its chunks times the size of one",
    ),
    Problem(
        code="KVD529",
        name="pd-buffer-below-longest-prompt",
        severity=Severity.CRASH,
        title="The PD buffer cannot hold the longest prompt that is allowed.",
        shows=(
            Failed(kind="ValueError", text="capacity_tokens=<have> < pd_max_prefill_len=<need>"),
            Failed(kind="RuntimeError", text="needs <need> chunks but the buffer holds only <have> chunks"),
            Logged("needs <need> chunks but the buffer holds only <have> chunks"),
        ),
        sentence="needed {need}, room for {have}",
        releases={"lmcache": ">=0.4.5"},
        cause="A request must fit into the decoder's buffer as a whole.",
        now="`pd_buffer_size` on both sides times the factor of the two numbers, and `pd_max_prefill_len` or vLLM's "
        "--max-model-len no larger than it holds",
        good="the configuration: pd_buffer_size for --max-model-len tokens",
    ),
    Problem(
        code="KVD530",
        name="pd-receiver-oversubscribed",
        severity=Severity.SLOW,
        title="The decoder had no room for a request's KV in time, and the transfer was given up.",
        shows=(
            Logged("Receiver reservation admission timed out or was aborted", at=_PD_BACKEND_ASYNC),
            Logged("[ADMIT] req=<req> async admission timed out", at=_PD_BACKEND_ASYNC),
            Logged("Failed to allocate memory for key <key> after timeout"),
            Logged("Sender staging allocation failed after timeout", at=_PD_BACKEND_ASYNC),
        ),
        releases={"lmcache": ">=0.4.5"},
        cause="More requests are on their way than the decoder's PD buffer holds, and what is in it is not loaded "
        "within `pd_allocation_timeout_sec`; decode computes the prompt itself. Before 0.5.3 also one prompt that "
        "alone has more chunks (`total_chunks`) than the whole buffer: it waits in vain, whatever the timeout is.",
        now="larger `pd_buffer_size` on both sides, above the KV of the longest prompt; then longer "
        "`pd_allocation_timeout_sec`, fewer requests at once on prefill (--max-num-seqs)",
        good="a decoder as fast as its prefillers, and a buffer for the requests that it may have waiting",
        threads=(f"{_LMCACHE}/4209",),
    ),
    Problem(
        code="KVD531",
        name="pd-sides-of-different-releases",
        severity=Severity.HANG,
        title="Prefill and decode run LMCache releases whose PD protocols differ.",
        shows=(
            Logged("Legacy senders (total_chunks=0) are no longer supported", at=_PD_BACKEND_ASYNC),
            Failed(kind="RuntimeError", text="Legacy senders (total_chunks=0) are no longer supported"),
            Failed(kind="RuntimeError", text="AllocResponse inconsistency: total_keys="),
        ),
        releases={"lmcache": ">=0.4.5"},
        cause="From 0.4.5 on the sender says first how many chunks come; the other side is older, or has "
        "`pd_backend_mode: sync`.",
        now="the same LMCache release and the same `pd_backend_mode` on prefill and decode",
        good="one image for prefill and decode",
    ),
    Problem(
        code="KVD532",
        name="pd-nixl-write-failed",
        severity=Severity.HANG,
        title="LMCache's NIXL channel could not move chunks to the other engine.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="Failed to send objects to remote peer",
                at="lmcache/v1/transfer_channel/nixl_channel.py",
            ),
            Failed(kind="RuntimeError", text="Failed to read objects from remote peer"),
            Logged("Error in send operation", at="lmcache/v1/transfer_channel/nixl_channel.py"),
            Failed(kind="nixlBackendError", within="_commit_write"),  # 0.2 and 0.3, before 0.3.9
            Logged("NIXL write failed in worker thread: <reason>"),
            Logged("NIXL read failed in worker thread: <reason>"),
        ),
        sure=False,
        cause="The peer died or was restarted, or UCX lost it (see `UCX  ERROR` just before); the connection is not "
        "made anew.",
        now="restart the decoder, then the prefillers; for a try without RDMA `UCX_TLS=tcp,cuda_copy,cuda_ipc` on both",
        good="a stable link; no release of LMCache connects again by itself in PD mode",
    ),
    Problem(
        code="KVD533",
        name="pd-settings-missing",
        severity=Severity.CRASH,
        title="A setting that LMCache's PD or P2P mode needs is missing.",
        shows=(
            Failed(kind="AssertionError", source="assert config.pd_peer_host is not None"),
            Failed(kind="AssertionError", source="assert config.pd_peer_init_port is not None"),
            Failed(kind="AssertionError", source="assert config.pd_peer_alloc_port is not None"),
            Failed(kind="AssertionError", source="assert config.pd_proxy_host is not None"),
            Failed(kind="AssertionError", source="assert config.pd_proxy_port is not None"),
            Failed(kind="AssertionError", source="assert self.pd_role is not None"),
            Failed(kind="AssertionError", source="assert self.pd_buffer_size is not None"),
            Failed(kind="AssertionError", source="assert self.pd_buffer_device is not None"),
            Failed(kind="AssertionError", source="assert self.p2p_host is not None"),
            Failed(kind="AssertionError", source="assert self.p2p_init_ports is not None"),
            Failed(kind="AssertionError", source="assert self.p2p_lookup_ports is not None"),
            Failed(kind="AssertionError", text="p2p_host must be specified", at=_P2P_BACKEND),
            Failed(kind="AssertionError", text="p2p_init_ports must be specified", at=_P2P_BACKEND),
            Failed(kind="AssertionError", text="p2p_lookup_ports must be specified", at=_P2P_BACKEND),
        ),
        cause="The assertion names the setting. A receiver needs pd_peer_host, pd_peer_init_port and "
        "pd_peer_alloc_port, a sender pd_proxy_host and pd_proxy_port, both pd_role, pd_buffer_size and "
        "pd_buffer_device; P2P needs p2p_host, p2p_init_ports and p2p_lookup_ports. Or the YAML was not read: "
        "LMCACHE_CONFIG_FILE of this process.",
        now="set it in the file that LMCACHE_CONFIG_FILE names (the log prints `Loading LMCache config file`), restart",
        good="the configuration",
    ),
    Problem(
        code="KVD534",
        name="pd-channel-unknown",
        severity=Severity.CRASH,
        title="transfer_channel is missing or not one that LMCache has.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Unsupported channel type: <channel>",
                at="lmcache/v1/transfer_channel/__init__.py",
            ),
        ),
        sentence="transfer_channel is {channel}",
        cause="PD and P2P move chunks over the channel that `transfer_channel` names; it is not set (None), or is "
        "another name than `nixl`.",
        now="`transfer_channel: nixl` on both sides (and nixl installed), restart",
        good="the configuration",
        threads=(f"{_LMCACHE}/1998",),
    ),
    Problem(
        code="KVD535",
        name="p2p-peer-unreachable",
        severity=Severity.SLOW,
        title="A peer that has the chunks does not answer, so they are computed again.",
        shows=(
            Logged("Max retry count reached for lookup_id <lookup>", at=_P2P_BACKEND),
            Logged("Failed to ensure peer connection for lookup_id <lookup>", at=_P2P_BACKEND),
            Logged("ZMQ error occurred for lookup_id <lookup>. Error: <error>"),
        ),
        sentence="lookup {lookup}",
        releases={"lmcache": ">=0.3.11"},
        cause="The peer is down or restarted, or its `p2p_host` with `p2p_init_ports` and `p2p_lookup_ports` cannot be "
        "reached from here (`localhost`, closed ports, another pod network).",
        now="`p2p_host` = an address of each node that the others reach, ports open; restart the peer; a slow one: "
        "`extra_config: {p2p_socket_recv_timeout_ms: 60000}`",
        good="the set-up; from LMCache 0.3.11 on a restarted peer is connected anew",
        threads=(
            "https://github.com/LMCache/LMCache/pull/2088",
            f"{_LMCACHE}/1966",
        ),
    ),
    Problem(
        code="KVD536",
        name="p2p-controller-refuses",
        severity=Severity.SLOW,
        title="LMCache's controller answers a P2P lookup with an error, so nothing is shared.",
        shows=(Logged("Controller returned error for batched P2P lookup: <error>", at=_P2P_BACKEND),),
        sentence="{error}",
        releases={"lmcache": ">=0.3.12"},
        sure=False,
        cause="The controller does not know this instance or its workers (it was restarted, or `lmcache_instance_id` "
        "is not unique), or is of another release.",
        now="the same LMCache release for controller and engines, another `lmcache_instance_id` for each engine, "
        "restart the engines after the controller",
        good="the set-up",
        threads=(f"{_LMCACHE}/3387",),
    ),
    Problem(
        code="KVD537",
        name="p2p-async-loading-of-old-release",
        severity=Severity.CRASH,
        title="P2P with asynchronous loading asserts another memory allocator than it has.",
        shows=(
            Failed(
                kind="AssertionError",
                within="calculate_chunk_budget",
                source="assert isinstance(self.memory_allocator, MixedMemoryAllocator)",
            ),
        ),
        releases={"lmcache": "<0.3.9"},
        cause="With P2P the CPU buffer is paged memory; the chunk budget of asynchronous loading took the other kind "
        "for granted. Without asynchronous loading it starts, and P2P never hits.",
        now="`pip install lmcache==0.3.9.post2` with `enable_async_loading: true`; `enable_p2p: false` until then",
        fixed={"lmcache": "0.3.9"},
        threads=(f"{_LMCACHE}/1791",),
    ),
    Problem(
        code="KVD538",
        name="pd-request-without-decoder",
        severity=Severity.CRASH,
        title="A request reached the prefiller without the address of its decoder.",
        shows=(Failed(kind="AttributeError", text="'NoneType' object has no attribute 'num_transferred_tokens'"),),
        releases={"lmcache": "<0.3.11"},
        cause="With kv_role kv_producer each request needs `disagg_spec` in kv_transfer_params, which LMCache's proxy "
        "adds. This one came past the proxy (health check, warm-up, a client), through a proxy of another release, or "
        "there is no proxy of LMCache's at all: prefill and decode share a store (Mooncake, Redis).",
        now="with a shared store kv_role: kv_both on both sides; else send requests through the proxy only (its "
        "example belongs to the LMCache release), and health checks to /health, not to /v1/completions",
        fixed={"lmcache": "0.3.11"},
        threads=(f"{_LMCACHE}/1342", "https://github.com/kvcache-ai/Mooncake/issues/868"),
    ),
)
