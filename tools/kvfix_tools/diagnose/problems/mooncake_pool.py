"""The Mooncake store as a pool of KV: vLLM's MooncakeStoreConnector, and vllm-ascend's AscendStoreConnector."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_WORKER = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/worker.py"
_STORE = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/connector.py"
_COORDINATOR = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/coordinator.py"
_DATA = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/data.py"
_ISSUES = "https://github.com/vllm-project/vllm/issues/"
_ASCEND = "https://github.com/vllm-project/vllm-ascend/issues/"
_MOONCAKE = "https://github.com/kvcache-ai/Mooncake/issues/"
_KEPT = "keep it so: the set-up was wrong, and no release changes that"

PROBLEMS = (
    Problem(
        code="KVD519",
        name="mooncake-pool-get-fails",
        severity=Severity.SLOW,
        title="Blocks that a lookup found in the store (Mooncake; in vllm-ascend memcache too) could not be loaded.",
        shows=(
            Logged("Failed to get <number> Mooncake keys from sub-batch", _WORKER),
            Logged("Failed to get Mooncake sub-batch", _WORKER),
            # vllm-ascend's mooncake_backend.py and memcache_backend.py.
            Logged("Failed to get key ["),
            Logged("Failed to get key <key>@head_or_tp_rank:"),
            Logged("Failed to get <number> keys out of <all>"),
            Logged("Check key existence and memory state."),
        ),
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="The code decides. -704: evicted between lookup and load. -707: the lease of the lookup "
        "(default_kv_lease_ttl, 5000 ms) was over before the copy ended. -800: the transfer failed, the link or the "
        "other client. -900: the master does not answer. -101, -103: the client with the segment is gone.",
        now="-704: a larger global_segment_size; -707: mooncake_master --default_kv_lease_ttl=60000 (ms); -800: as the "
        "E lines of Mooncake before it say; and answer requests meanwhile: "
        '"kv_load_failure_policy": "recompute" in --kv-transfer-config, but "fail" within MultiConnector and with a '
        "hybrid model (Qwen3.5, DeepSeek V4), where vllm-ascend's answers were garbled",
        good="a pool larger than what is in use, and a lease longer than the longest wait; no release keeps what a "
        "lookup found for ever",
        threads=(f"{_ASCEND}9168", f"{_ASCEND}15060", f"{_ASCEND}12522", f"{_ASCEND}12390", f"{_MOONCAKE}3076"),
    ),
    Problem(
        code="KVD520",
        name="mooncake-pool-put-fails",
        severity=Severity.SLOW,
        title="Blocks could not be written to the Mooncake store: later requests will not find them.",
        shows=(
            Logged("batch_put failed: <failed>/<all> keys failed (codes=<codes>,", _WORKER),
            Logged("Failed to put key ["),
            Logged("Failed to put <number> keys out of <all>"),
        ),
        sure=False,
        cause="The code decides. -200: the store is full (all global_segment_size together), or no client has mounted "
        "a segment. -800: the transfer to the client with the segment failed. -900: the master does not answer. "
        "-705: it is there already, which is harmless.",
        now="-200: a larger global_segment_size, mooncake_master --eviction_high_watermark_ratio=0.8; -800: as the E "
        "lines of Mooncake before it say, and look whether all clients still run; -900: look at mooncake_master",
        good=_KEPT,
        threads=(f"{_ASCEND}10532", f"{_MOONCAKE}915"),
    ),
    Problem(
        code="KVD521",
        name="mooncake-pool-counts-drafts",
        severity=Severity.HANG,
        title="MooncakeStoreConnector counts draft tokens that have no block hash yet, and its thread fails.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert token_len // self.hash_block_size <= len(block_hashes)",
                at=_DATA,
            ),
        ),
        releases={"vllm": ">=0.27"},
        cause="With speculative decoding (MTP, EAGLE) the scheduled tokens include drafts: the store is told of more "
        "tokens than are hashed.",
        now="no --speculative-config on that instance, or take MooncakeStoreConnector out there; restart",
        good="no release of vLLM is known to be right yet (0.33.0 has the same assertion)",
        threads=(f"{_ISSUES}51805", "https://github.com/vllm-project/vllm/pull/44304"),
    ),
    Problem(
        code="KVD522",
        name="mooncake-pool-lookup-fails",
        severity=Severity.SLOW,
        title="Lookups in the Mooncake store fail: every one counts as a miss.",
        shows=(
            Logged("Remote connection failed in lookup: <error>", _WORKER),
            Logged("Async Mooncake lookup failed for <request>: <error>", _WORKER),
        ),
        releases={"vllm": ">=0.26"},
        cause="The client does not reach mooncake_master (it was restarted, or master_server_address is wrong), or "
        "rank 0's lookup server, which answers the scheduler, does not answer.",
        now="look whether mooncake_master runs at master_server_address of the file in MOONCAKE_CONFIG_PATH; restart "
        "it, then vLLM",
        good=_KEPT,
    ),
    Problem(
        code="KVD523",
        name="mooncake-pool-memory-not-registered",
        severity=Severity.CRASH,
        title="MooncakeStoreConnector cannot register the KV cache with the transport.",
        shows=(Logged("register_buffer failed for addr", _WORKER),),
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="The NIC cannot reach GPU memory (no nvidia_peermem or dma-buf), the memory lock limit is small, or the "
        "device_name is no RDMA device of this machine.",
        now='"protocol": "tcp" in the file of MOONCAKE_CONFIG_PATH to try; rdma: modprobe nvidia_peermem, containers '
        "with --ulimit memlock=-1 --device /dev/infiniband, device_name as ibv_devices says",
        good=_KEPT,
    ),
    Problem(
        code="KVD524",
        name="mooncake-pool-load-too-large",
        severity=Severity.SLOW,
        title="A block in the Mooncake store is larger than the buffer through which it is read from disk.",
        shows=(Logged("Skipping Mooncake load for request <request> because key <key> requires <size>", _WORKER),),
        releases={"vllm": ">=0.26"},
        cause="With enable_offload what lies on disk is read through a staging buffer of a fixed size; a larger block "
        "is never loaded, and the request waits for what does not come or computes it again.",
        now="enable_offload: false in the file of MOONCAKE_CONFIG_PATH, or a smaller --block-size; restart",
        good="no release up to vLLM 0.32.0 reads it in parts",
    ),
    Problem(
        code="KVD956",
        name="mooncake-store-hash-blocks",
        severity=Severity.CRASH,
        title="MooncakeStoreConnector refuses a model whose KV groups have blocks of sizes without a common part.",
        shows=(
            Failed(kind="AssertionError", text="block_size must be divisible by hash_block_size", at=_COORDINATOR),
            Failed(
                kind="RuntimeError",
                text="Worker failed with error 'block_size must be divisible by hash_block_size'",
            ),
        ),
        connectors=("MooncakeStoreConnector", "MultiConnector"),
        named=True,
        releases={"vllm": ">=0.26"},
        cause="Blocks are hashed in units of hash_block_size, and the block size of every KV group has to be a "
        "multiple of it. Hybrid models (Mamba, GDN, indexers) have groups of sizes of their own.",
        now="`--prefix-match-unit 8` (any number that divides the block sizes of all groups); MambaSpec refused after "
        "that: `--mamba-cache-mode align` (vLLM before 0.33)",
        good="--prefix-match-unit given for this model",
        threads=(_ISSUES + "54726",),
    ),
    Problem(
        code="KVD957",
        name="mooncake-store-model-refused",
        severity=Severity.CRASH,
        title="MooncakeStoreConnector does not serve this kind of KV cache: the engine does not start.",
        shows=(
            Failed(kind="ValueError", text="MooncakeStoreConnector does not support: <what>", at=_STORE),
            Failed(kind="ValueError", text="MooncakeStore requires at least one prefix-cacheable KV cache group"),
        ),
        releases={"vllm": ">=0.26"},
        cause="What the message names. Mamba and GDN layers can be stored in the mode `align` only; encoder-decoder "
        "models (CrossAttentionSpec) and context parallelism with several KV groups not at all (0.33 takes DCP).",
        now="MambaSpec: `--enable-prefix-caching --mamba-cache-mode align` (vLLM 0.33: the first alone); PCP: without "
        "--prefill-context-parallel-size; else without MooncakeStoreConnector",
        good="a model and options that this connector takes",
        threads=(_ISSUES + "54726",),
    ),
    Problem(
        code="KVD958",
        name="mooncake-store-settings-refused",
        severity=Severity.CRASH,
        title="vLLM refuses the file in MOONCAKE_CONFIG_PATH.",
        shows=(
            Failed(kind="ValueError", text="unknown Mooncake mode: <mode>"),
            Failed(kind="ValueError", text="embedded mode requires global_segment_size > 0"),
            Failed(kind="ValueError", text="standalone-store mode requires global_segment_size == 0"),
            Failed(kind="ValueError", text="local_buffer_size must be > 0"),
            Failed(kind="ValueError", within="mooncake/store/worker.py:_parse_size"),
            Failed(kind="ValueError", within="mooncake_store.py:_parse_size"),
        ),
        releases={"vllm": ">=0.26"},
        cause="What the message says. `embedded`: each worker gives global_segment_size of its memory to the store; "
        "`standalone-store`: a Mooncake store process owns the memory, and the workers give none.",
        now='in that file "mode": "embedded" with "global_segment_size": "100GB", or "mode": "standalone-store" with '
        '"global_segment_size": 0; "local_buffer_size": "4GB"',
        good="a file that fits the mode",
    ),
    Problem(
        code="KVD139",
        name="mooncake-store-after-failed-load",
        severity=Severity.CRASH,
        title="MooncakeStoreConnector wants to store for a request that this step does not compute.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Missing current block table for store request <request>",
                at="vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/scheduler.py",
            ),
            Failed(kind="AssertionError", within="mooncake/store/scheduler.py:_apply_current_save_block_ids"),
        ),
        releases={"vllm": ">=0.27"},
        cause="A load failed (an error of Mooncake before it), and the request was put back to be computed again; the "
        "connector still has a store noted for it, and asserts.",
        now='`"kv_load_failure_policy": "fail"` (the default): then the requests fail, and the engine lives; put right '
        "what failed the load (KVD519); restart",
        good="no release is right yet (0.33.0 has the assertion; vllm#54870 is open)",
        threads=(_ISSUES + "54870",),
    ),
    Problem(
        code="KVD143",
        name="mooncake-store-finish-after-preemption",
        severity=Severity.CRASH,
        title="A request that was preempted ends, and MooncakeStoreConnector asserts that it still tracks it.",
        shows=(
            Failed(
                kind="AssertionError",
                within="mooncake/store/scheduler.py:request_finished",
                source="assert tracker is not None",
            ),
        ),
        releases={"vllm": "<0.26"},
        cause="Preemption takes the request's tracker away. Where it is aborted before it is computed again, the end "
        "finds none.",
        now="so much KV cache that nothing is preempted (`--max-num-seqs` smaller, `--gpu-memory-utilization` larger), "
        "restart",
        fixed={"vllm": "0.26.0"},
        threads=("https://github.com/vllm-project/vllm/pull/43281",),
    ),
    Problem(
        code="KVD1254",
        name="mooncake-miss-logged-as-error",
        severity=Severity.RISK,
        title="Mooncake's store client of early 2025 logs a key that is not there as an error.",
        shows=(Logged(" store_py.cpp:<line>] Query failed for key: <key> with error: UNKNOWN_ERROR"),),
        sentence="a lookup found nothing",
        sure=False,
        cause="That client has no word of its own for an object that is not there. Each lookup of a new prefix then "
        "logs it: a miss, and no failure. It is one if keys that were stored before are not found either: then the "
        "log of mooncake_master tells (evicted, no segment), or the client does not reach it.",
        now="nothing; to know it for sure send one prompt of several chunks twice: the second one has no such line",
        good="a newer mooncake-transfer-engine: from pull 308 (spring of 2025) on a miss is no error",
        threads=("https://github.com/kvcache-ai/Mooncake/pull/308",),
    ),
)
