"""The Mooncake store as LMCache's remote store, or as vLLM's own connector."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem, either

_LMCACHE = "https://github.com/LMCache/LMCache/"
_MOONCAKE_ISSUES = "https://github.com/kvcache-ai/Mooncake/issues/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_CONNECTORS = "lmcache/v1/storage_backend/connector"
_MOONCAKE = f"{_CONNECTORS}/mooncakestore_connector.py"
_VLLM_WORKER = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/worker.py"

PROBLEMS = (
    Problem(
        code="KVD885",
        name="mooncake-put-too-slow",
        severity=Severity.SLOW,
        title="A put to the Mooncake store takes longer than transfer_timeout, and is given up.",
        shows=(
            Logged("Timeout when putting key <key> using", _MOONCAKE),
            Logged("Timeout during batch_put_from; some decoders may redo prefill."),
        ),
        said=(r"(?i)mooncake", r"(?i)time-?out when putting", r"(?i)restart|slow"),
        connectors=_IN_PROCESS,
        cause="transfer_timeout (1 second unless set) is over: the segment that takes the chunk is on a machine that "
        "is gone or cannot be reached (a pod that was restarted keeps its old address in the master), or the link is "
        "slow.",
        now="extra_config: {transfer_timeout: 10}; after a pod was restarted wait until the master has dropped its "
        "segment, or restart mooncake_master",
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
        threads=(_LMCACHE + "issues/2143",),
    ),
    Problem(
        code="KVD886",
        name="mooncake-put-fails",
        severity=Severity.SLOW,
        title="The Mooncake store cannot write: what stores goes on as if it could, and nothing is ever found.",
        shows=(
            Logged("Put operation failed with error"),
            Logged("Failed to end put operation"),
            Logged("Failed to put key <key> using"),
            Logged("Failed to open segment"),
        ),
        said=(r"(?i)mooncake", r"(?i)\bmaster\b", r"(?i)\brc -900\b|(?<!\d)-900\b[^\n]{0,40}\bput|invalid rpc arg"),
        cause="TRANSFER_FAIL, `Failed to open segment`: the node that the master chose is not reached: a device_name "
        "or local_hostname that it cannot reach, a proxy, or it is gone. RPC_FAIL, `client has been closed`: "
        "mooncake_master is not reached: it does not run, or is not at master_server_address (0.0.0.0 and localhost "
        "are this machine); with `invalid rpc arg`, or -900 while reads go on, it is of another Mooncake release. "
        "LMCache does not wait, and says `Stored` all the same.",
        now="TRANSFER_FAIL: for a try protocol tcp, local_hostname of this machine, metadata_server P2PHANDSHAKE, no "
        "http_proxy; for rdma a device_name that reaches the others. RPC_FAIL: `nc -zv MASTER 50051` from the engine's "
        "machine; mooncake_master of the same release, then the engines. The settings stand in extra_config of "
        "LMCache, or in the file of MOONCAKE_CONFIG_PATH (MooncakeStoreConnector)",
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
        threads=(_LMCACHE + "issues/1518", *(_MOONCAKE_ISSUES + each for each in ("809", "456", "397"))),
    ),
    Problem(
        code="KVD887",
        name="mooncake-store-full",
        severity=Severity.SLOW,
        title="The Mooncake store has no room: chunks are not stored.",
        shows=(
            Logged("NO_AVAILABLE_HANDLE"),
            Logged("Put operation failed with error: NO_AVAILABLE_HANDLE"),
            Logged("Failed to start put operation: NO_AVAILABLE_HANDLE"),
        ),
        sentence="the master has no free segment for the chunk",
        cause="All segments together (global_segment_size of every client) are full, and eviction does not keep up "
        "with the writes; or no client has mounted a segment.",
        now="a larger global_segment_size (bytes, for each worker); mooncake_master -eviction_high_watermark_ratio=0.8",
        good="keep it so: the set-up was wrong, and no release changes that",
        threads=(_MOONCAKE_ISSUES + "915",),
    ),
    Problem(
        code="KVD888",
        name="mooncake-get-fails",
        severity=Severity.SLOW,
        title="A chunk that the Mooncake master lists cannot be read: the load comes short.",
        shows=(
            Logged("batch_get_into failed for key <key> (code=<code>)", _MOONCAKE),
            Logged("batch_get_into threw exception: ", _MOONCAKE),
            Logged("batch_get_buffer failed: ", _MOONCAKE),
            Logged("is None for key"),
        ),
        connectors=_IN_PROCESS,
        replaces=("KVD1090",),
        cause="The machine with the segment is gone or was restarted, or the object was evicted after the lookup; the "
        "master still lists it until its client's lease ends.",
        now="restart mooncake_master (it forgets what it lists), or wait; all segments on machines that stay up",
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
        threads=(_LMCACHE + "issues/1690",),
    ),
    Problem(
        code="KVD1280",
        name="mooncake-without-setup-lmcache",
        severity=Severity.SLOW,
        title="This LMCache calls a method that no Mooncake package has: there is no remote store.",
        shows=(
            Logged("'mooncake.store.MooncakeDistributedStore' object has no attribute 'setup_lmcache'"),
            Failed(kind="AttributeError", text="MooncakeDistributedStore' object has no attribute 'setup_lmcache'"),
        ),
        sentence="setup_lmcache is called, and Mooncake has setup",
        releases={"lmcache": "<0.3.9"},
        replaces=("KVD889", "KVD302", "KVD1090"),
        connectors=_IN_PROCESS,
        cause="LMCache from source of June 2025 calls `setup_lmcache` in its Mooncake connector. Mooncake calls it "
        "`setup`, so that another Mooncake changes nothing.",
        now="pip install -U 'lmcache>=0.3.9', whose connector calls `setup`, with the vLLM and the "
        "mooncake-transfer-engine of its time",
        good="LMCache 0.3.9 or newer",
        threads=(_LMCACHE + "issues/839",),
    ),
    Problem(
        code="KVD889",
        name="mooncake-too-old",
        severity=Severity.SLOW,
        title="The installed Mooncake package lacks what this LMCache calls: nothing can be loaded from it.",
        shows=(
            Logged("batch_get_buffer failed: 'mooncake.store.MooncakeDistributedStore' object has no attribute"),
            Logged(
                "Failed to initialize/re-establish remote connection: 'mooncake.store.MooncakeDistributedStore' object "
                "has no attribute"
            ),
            Logged(
                "An error occurred while loading the configuration: 'mooncake.store.MooncakeDistributedStore' object "
                "has no attribute"
            ),
            Failed(kind="AttributeError", text="MooncakeDistributedStore' object has no attribute"),
        ),
        replaces=("KVD302", "KVD1090"),
        connectors=_IN_PROCESS,
        cause="mooncake-transfer-engine and LMCache are of different times: the method at the end of the line is not "
        "in the one that is installed.",
        now="extra_config: {save_chunk_meta: false} (it uses the older calls), or pip install -U "
        "mooncake-transfer-engine, and restart",
        good="releases of the same month of both",
        threads=(_LMCACHE + "issues/1514",),
    ),
    Problem(
        code="KVD890",
        name="mooncake-not-set-up",
        severity=Severity.CRASH,
        title="LMCache's Mooncake connector lacks its configuration or its package.",
        shows=(
            Failed(kind="ValueError", text="The environment variable 'MOONCAKE_CONFIG_PATH' is not set.", at=_MOONCAKE),
            Failed(kind="ValueError", text="The extra config is not set.", at=_MOONCAKE),
            Failed(
                kind="ImportError",
                text="Please install mooncake by following the instructions <page> with MooncakeConnector",
                at=_MOONCAKE,
            ),
            Logged("The environment variable 'MOONCAKE_CONFIG_PATH' is not set."),
            Logged("Please install mooncake by following the instructions"),
        ),
        connectors=("LMCacheConnectorV1", "MooncakeStoreConnector", "MultiConnector"),
        replaces=("KVD860",),
        cause="The connector takes its settings from extra_config of LMCache's file, or from the JSON file that "
        "MOONCAKE_CONFIG_PATH names; the package is mooncake-transfer-engine.",
        now='pip install mooncake-transfer-engine; extra_config: {local_hostname: "HOST", metadata_server: '
        '"P2PHANDSHAKE", master_server_address: "HOST:50051", protocol: "tcp", global_segment_size: 21474836480}',
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD638",
        name="mooncake-memory-pool-refused",
        severity=Severity.CRASH,
        title="`custom_mem_pool` of MooncakeStoreConnector cannot be used as it is set, and vLLM does not start.",
        shows=(
            Failed(
                kind="ValueError",
                text="custom_mem_pool is incompatible with enable_sleep_mode or enable_cumem_allocator",
                at=_VLLM_WORKER,
            ),
            Failed(kind="ValueError", text="Unsupported custom_mem_pool=<pool>, expected", at=_VLLM_WORKER),
            Failed(kind="ImportError", text="requires mooncake-transfer-engine>=0.3.8.", at=_VLLM_WORKER),
            Failed(
                kind="ValueError",
                text="KV cache is allocated once and can only live in one pool.",
                at="vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py",
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="The KV can lie in one pool only: Mooncake's (NVLINK or BAREX, with a Mooncake that has it) or that of "
        "sleep mode, and of one connector in MultiConnector.",
        now="remove `custom_mem_pool` from kv_connector_extra_config, or keep it in one connector, without "
        "--enable-sleep-mode and with `pip install -U mooncake-transfer-engine-cuda13`",
        good="the configuration",
    ),
    Problem(
        code="KVD639",
        name="mooncake-store-not-shared-across-tp",
        severity=Severity.SLOW,
        title="MooncakeStoreConnector cannot share KV between engines of other tensor parallel sizes as asked.",
        shows=(
            Logged(
                "Mooncake heterogeneous-TP store sharing is disabled for Store TP configuration <sizes> with KV layout "
                "<layout>;",
                at=_VLLM_WORKER,
            ),
        ),
        sentence="{sizes}, layout {layout}",
        releases={"vllm": ">=0.32"},
        cause="The size asked for (`store_tp_size`, or the least common multiple of `prefill_tp_sizes`) has to be a "
        "multiple of this engine's, to divide the KV heads, and the layout to be LBHNC or LBNHC. Else the engine "
        "stores under keys of its own, and engines of other sizes find nothing.",
        now="`export VLLM_KV_CACHE_LAYOUT=LBHNC`, a `store_tp_size` that is a multiple of every --tensor-parallel-size "
        "and divides the model's KV heads; or the same --tensor-parallel-size everywhere",
        good="the configuration",
    ),
    Problem(
        code="KVD269",
        name="mooncake-store-refuses-the-buffer",
        severity=Severity.CRASH,
        title="Mooncake's store could not be set up: its configuration or LMCache's buffer was refused.",
        shows=(
            Logged(
                "Buffer registration error: <error>", "lmcache/v1/storage_backend/connector/mooncakestore_connector.py"
            ),
            Logged(
                "Configuration loading failed: <error>",
                "lmcache/v1/storage_backend/connector/mooncakestore_connector.py",
            ),
            Logged(
                "An error occurred while loading the configuration: ",
                "lmcache/v1/storage_backend/connector/mooncakestore_connector.py",
            ),
        ),
        releases={"lmcache": ">=0.5"},
        cause="MOONCAKE_CONFIG_PATH or the extra_config of LMCache lacks a field that Mooncake wants "
        "(local_hostname, metadata_server, master_server_address, protocol), or with RDMA the buffer in host memory "
        "may not be registered (memlock, no device of that name).",
        now="protocol: tcp once: if that starts, it is RDMA: ulimit -l unlimited, device_name from ibv_devices",
        good="the configuration",
        sure=False,
    ),
    Problem(
        code="KVD496",
        name="mooncake-lease-too-short",
        severity=Severity.SLOW,
        title="Reading an object of the Mooncake store took longer than its lease: what was read is thrown away.",
        shows=either("lease_expired_before_data_transfer_completed", "LEASE_EXPIRED"),
        cause="A lookup protects an object from eviction for default_kv_lease_ttl (milliseconds, 5000 by default). A "
        "transfer that takes longer is not trusted, as the place may have been given to another object.",
        now="mooncake_master --default_kv_lease_ttl=30000, and restart it with the engines; fewer requests at once, "
        "or a faster way (protocol: rdma)",
        good="a lease longer than the slowest load",
        threads=("https://github.com/kvcache-ai/Mooncake/issues/4239",),
    ),
    Problem(
        code="KVD348",
        name="mooncake-key-is-there",
        severity=Severity.RISK,
        title="The Mooncake store was given a key that it has already: nothing is lost.",
        shows=(
            Logged("BatchPutStart failed for key[<number>] <key>: OBJECT_ALREADY_EXISTS"),
            Logged("context: OBJECT_ALREADY_EXISTS: Master failed to start put operation"),
            Logged("Failed to start put operation: OBJECT_ALREADY_EXISTS"),
        ),
        sentence="two puts of one key",
        sure=False,
        cause="Two requests, ranks or engines store the same prefix at once; the first one's copy is kept. It only "
        "costs the second call. If it comes for keys that are never found, the first put never ended: a worker died "
        "in it, and the master frees the key after put_start_discard_timeout_sec (30 s).",
        now="nothing; if lookups of these keys miss: grep the worker's log for `Failed to end put` and TRANSFER_FAIL",
        good="keep it so",
        threads=("https://github.com/sgl-project/sglang/pull/8651",),
    ),
    Problem(
        code="KVD363",
        name="mooncake-ssd-offload-fails",
        severity=Severity.SLOW,
        title="What Mooncake's master wants on SSD does not get there: it is lost when memory is full.",
        shows=(
            Logged("Offloading task expired for key: <key>"),
            Logged("BatchQuerySlices failed with error: <error>"),
            Logged("BatchQuerySegmentSlices failed with error: <error>"),
            Logged("file_storage.cpp:<line>] Key not found: <key>"),
        ),
        sentence="the copy to SSD was not made",
        sure=False,
        cause="`expired`: the worker's heartbeat, which fetches the tasks, also writes them: the SSD is slower than "
        "what is stored, and tasks wait past 600 s. INVALID_KEY, `Key not found`: the worker does not find the object "
        "in its own memory: it was evicted before its turn, or with a metadata server (http, etcd) the master knows "
        "this worker by another address than it knows itself (several network cards).",
        now='"metadata_server": "P2PHANDSHAKE" and a local_hostname that is the address of the card in device_name; '
        "iostat -x 1 while it runs: a faster SSD for ssd_offload_path, or a smaller load; a larger "
        "global_segment_size, so that objects stay until they are written",
        good="the same, and the newest Mooncake on master and workers",
        threads=(
            _MOONCAKE_ISSUES + "2632",
            _MOONCAKE_ISSUES + "1729",
            _MOONCAKE_ISSUES + "2799",
            _MOONCAKE_ISSUES + "2827",
        ),
    ),
)
