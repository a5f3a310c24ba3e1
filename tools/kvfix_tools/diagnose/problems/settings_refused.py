"""Settings that LMCache or vLLM refuses at the start: the message says which, and what they exclude."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_OFFLOADING = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/config.py"
_FS = "lmcache/v1/storage_backend/connector/fs_connector.py"
_VALKEY = "lmcache/v1/storage_backend/connector/valkey_adapter.py"
_LAZY = "lmcache/integration/vllm/lazy_offload_policy"

PROBLEMS = (
    Problem(
        code="KVD799",
        name="lmcache-settings-refused",
        severity=Severity.CRASH,
        title="LMCache refuses its settings: the message names those that are wrong or exclude each other.",
        shows=(
            Failed(kind="ValueError", within="v1/config.py:_validate_config"),
            Failed(kind="ValueError", within="distributed/config.py:parse_args_to_config"),
            Failed(kind="ValueError", within="distributed/config.py:_parse_l1_common"),
            Failed(kind="ValueError", within="mp_server_launcher.py:_build_autostart_config_from_url"),
            Failed(kind="ValueError", within="mp_server_launcher.py:_parse_server_args"),
            Failed(kind="ValueError", within="mp_server_launcher.py:_normalize_local_host"),
            Failed(kind="ValueError", text="P2P requires a coordinator for peer discovery"),
            Failed(kind="ValueError", within="multiprocess/config.py:parse_args_to_coordinator_config"),
            Failed(kind="ValueError", within="worker_transfer.py:_resolve_mode"),
            Failed(kind="ValueError", within="transport/factory.py:_normalize_server_url"),
            Failed(kind="AssertionError", within="nixl_storage_backend.py:from_cache_engine_config"),
            Failed(kind="ValueError", within="nixl_storage_backend.py:from_cache_engine_config"),
        ),
        cause="What the message says. Settings come from the file in LMCACHE_CONFIG_FILE and from LMCACHE_ variables, "
        "which win; the server's from its command line; the connector's from kv_connector_extra_config.",
        now="change the setting that the message names, and restart; env | grep LMCACHE_ shows variables that were "
        "forgotten",
        good="a configuration that the installed release takes; its documentation is that of another release, mostly",
    ),
    Problem(
        code="KVD789",
        name="offloading-settings-refused",
        severity=Severity.CRASH,
        title="vLLM refuses the settings of its OffloadingConnector.",
        shows=(
            Failed(kind="ValueError", text="Specify only one of 'block_size' or 'blocks_per_chunk'", at=_OFFLOADING),
            Failed(kind="ValueError", text="'blocks_per_chunk' must be greater than 0.", at=_OFFLOADING),
            Failed(kind="ValueError", text="Secondary tier configuration must include 'type'"),
        ),
        releases={"vllm": ">=0.26"},
        cause="What the message says: keys of kv_connector_extra_config exclude each other, or one is missing.",
        now="leave block_size and blocks_per_chunk out of kv_connector_extra_config; give each of secondary_tiers its "
        '"type" ("fs", "obj" or "p2p"); restart',
        good="--kv-offloading-size alone, unless a tier is needed",
    ),
    Problem(
        code="KVD967",
        name="option-excludes-connectors",
        severity=Severity.CRASH,
        title="vLLM refuses an option or a model together with a KV connector.",
        shows=(
            Failed(kind="AssertionError", text="Encoder-decoder models are not currently supported with KV connectors"),
            Failed(kind="ValueError", text="--enable-return-routed-experts is incompatible with KV connectors"),
            # From 0.32 on only of the connectors between prefill and decode.
            Failed(text="--enable-return-routed-experts is incompatible with <connector>; PD auxiliary output"),
            Failed(kind="ValueError", text="--use-replayssm is incompatible with KV connectors"),
            Failed(kind="ValueError", text="Bidirectional KV transfer is not supported for NIXL push connector."),
        ),
        cause="What the message says: blocks that come from elsewhere break what the option counts on; models with "
        "cross attention (Whisper and such) have KV that no connector moves.",
        now="leave out the option that the message names, or --kv-transfer-config and --kv-offloading-size; for an "
        "encoder-decoder model the latter; for NixlPushConnector enable_bidirectional_kv",
        good="no release up to 0.33.0 has both",
    ),
    Problem(
        code="KVD968",
        name="mamba-block-exceeds-batch",
        severity=Severity.CRASH,
        title="The blocks of a Mamba model in the mode that connectors need are larger than a step may be.",
        shows=(
            Failed(
                kind="AssertionError",
                text="In Mamba cache align mode, block_size (<block>) must be <= max_num_batched_tokens (<batch>)",
                at="vllm/config/vllm.py",
            ),
        ),
        sentence="{block} tokens in a block, {batch} in a step",
        releases={"vllm": ">=0.16,<0.32"},
        cause="With `--mamba-cache-mode align` a state is kept at the end of each block, so a step has to hold a whole "
        "block.",
        now="--max-num-batched-tokens of at least the block_size that the message names",
        good="the same option",
    ),
    Problem(
        code="KVD971",
        name="kv-memory-short-with-connector",
        severity=Severity.CRASH,
        title="There is too little GPU memory for one request of the greatest length.",
        shows=(
            Failed(kind="ValueError", text="cache is needed, which is larger than the available KV cache memory"),
            Failed(kind="ValueError", text="To serve at least one request with the model"),  # broken after it
        ),
        connectors=(
            "LMCacheConnectorV1",
            "LMCacheConnectorV1Dynamic",
            "LMCacheMPConnector",
            "MooncakeStoreConnector",
            "MooncakeConnector",
            "MultiConnector",
            "NixlConnector",
            "OffloadingConnector",
            "SimpleCPUOffloadConnector",
        ),
        sure=False,
        cause="Without the connector it starts: then the connector has switched the hybrid KV cache manager off "
        "(a warning before it says so), and layers with a sliding window or compressed KV count in full. Without the "
        "connector it does not start either: --max-model-len is too large for this GPU.",
        now="--max-model-len of what the message says at most; the first case also a connector with several KV groups "
        "(LMCacheMPConnector of LMCache 0.4.7 or later with vLLM 0.26 or later, OffloadingConnector) and "
        "`--no-disable-hybrid-kv-cache-manager`",
        good="a connector that supports several KV groups",
        threads=(
            "https://github.com/vllm-project/vllm/issues/44376",
            "https://github.com/vllm-project/vllm/issues/41830",
        ),
    ),
    Problem(
        code="KVD422",
        name="settings-exclude-each-other",
        severity=Severity.CRASH,
        title="Two settings of LMCache exclude each other, and it does not start.",
        shows=(
            Failed(kind="ValueError", text="Hugepages are not supported with P2P mode"),
            Failed(kind="ValueError", text="Asynchronous loading is not supported for external lookup clients."),
            Failed(kind="AssertionError", text="LMCache v1 blending is not supported in MooncakeLookupClient yet."),
            Failed(kind="ValueError", text="Unsupported external lookup client scheme: <scheme>"),
            Failed(kind="ValueError", text="Invalid external lookup client URI format"),
            Failed(kind="ValueError", text="Unsupported gds_backend '<backend>'"),
            Failed(kind="ValueError", text="Hugepages are not supported with shared memory (shm)"),
            Failed(kind="AssertionError", text="Invalid role: <role>, must be"),
            Failed(kind="ValueError", text="Invalid PD role."),
            Failed(kind="RuntimeError", text="Invalid value `<value>` for `<name>` in extra_config"),
        ),
        cause="What the message says: enable_p2p and shared memory take no huge pages; pd_role is sender or receiver; "
        "external_lookup_client (only mooncakestore://HOST:PORT is one) goes neither with enable_async_loading nor "
        "with enable_blending; gds_backend is cufile or hipfile.",
        now="huge pages: local_cpu_use_hugepages: false; external_lookup_client: take it out, or "
        "enable_async_loading: false and enable_blending: false; gds_backend: cufile or hipfile; restart",
        good="keep it so: no release takes both (0.5.6)",
    ),
    Problem(
        code="KVD423",
        name="lazy-pool-pinned-at-once",
        severity=Severity.RISK,
        title="The CPU pool is not made lazily as asked: all of it is pinned at the start.",
        shows=(
            Logged(
                "LazyMixedMemoryAllocator is temporarily unavailable", "lmcache/v1/storage_backend/local_cpu_backend.py"
            ),
            Failed(kind="RuntimeError", text="LazyMixedMemoryAllocator being refactored."),
        ),
        sentence="enable_lazy_memory_allocator has no effect here",
        releases={"lmcache": ">=0.3.13"},
        cause="These releases have switched the lazy allocator off and take the plain one: each worker pins "
        "max_local_cpu_size at its start, which takes about a minute for some hundred GB and all of that memory. "
        "Builds of the days before 0.3.13 raise RuntimeError there instead.",
        now="enable_lazy_memory_allocator: false, and a max_local_cpu_size that fits once for each worker",
        good="no release of LMCache has it again yet (0.5.6)",
        threads=("https://github.com/LMCache/LMCache/issues/2448",),
    ),
    Problem(
        code="KVD454",
        name="server-settings-exclude-each-other",
        severity=Severity.CRASH,
        title="The LMCache server refuses its options: the message names those that are wrong or exclude each other.",
        shows=(
            Failed(kind="ValueError", within="distributed/config.py:validate_storage_manager_config"),
            Failed(kind="ValueError", within="distributed/config.py:_l1_number"),
            Failed(kind="ValueError", within="distributed/config.py:_l1_bool"),
            Failed(kind="ValueError", within="distributed/config.py:_l1_path"),
            Failed(kind="ValueError", within="multiprocess/config.py:parse_args_to_mp_server_config"),
            Failed(kind="ValueError", text="P2P requires a single L1 memory region the transfer channel"),
            Failed(kind="ValueError", text="--coordinator-event-reporting rides the observability event bus"),
            Failed(kind="ValueError", text="--trace-level events records the cache-event stream"),
        ),
        releases={"lmcache": ">=0.3.13"},
        cause="What the message says. P2P and an L2 over RDMA register one L1 in host memory, so they exclude "
        "--gds-l1-path and --l1-devdax-path; events need the bus that --disable-observability turns off.",
        now="leave out the option that the message names last, and restart the server; `lmcache server --help` has "
        "those of the installed release",
        good="options that the installed release takes; vLLM can be started as soon as the server answers",
    ),
    Problem(
        code="KVD1632",
        name="fs-store-settings-refused",
        severity=Severity.CRASH,
        title="The remote store on files (fs://) has no folder, or a temporary folder that is absolute.",
        shows=(
            Failed(kind="ValueError", text="FS connector requires base_path via URL or extra_config"),
            Failed(kind="AssertionError", source="assert not self.relative_tmp_dir.is_absolute()", at=_FS),
        ),
        sentence="base_path or fs_connector_relative_tmp_dir is wrong",
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        cause="fs_connector_relative_tmp_dir is below the store's folder, so that a finished file is renamed within "
        "one file system; a path that begins with `/` is refused. As a plugin the folder is "
        "remote_storage_plugin.NAME.base_path in extra_config.",
        now="remote_url: fs://host:0/mnt/nvme/kv with extra_config: {fs_connector_relative_tmp_dir: tmp}; as a plugin "
        "extra_config: {remote_storage_plugin.fs.base_path: /mnt/nvme/kv}; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1634",
        name="valkey-store-settings-refused",
        severity=Severity.CRASH,
        title="The remote store in Valkey refuses a setting.",
        shows=(
            Failed(kind="ValueError", text="save_chunk_meta must be False for Valkey glide connector", at=_VALKEY),
            Failed(kind="ValueError", text="valkey_ttl_sec must be a positive", at=_VALKEY),
        ),
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        releases={"lmcache": ">=0.5.1"},
        cause="Each chunk is one value of one size, without metadata: save_chunk_meta and save_unfull_chunk are off. "
        "valkey_ttl_sec is a whole number of seconds above 0, read with valkey_enable_ttl: true only.",
        now="save_unfull_chunk: false, extra_config: {save_chunk_meta: false, valkey_enable_ttl: true, valkey_ttl_sec: "
        "86400}; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1636",
        name="remote-store-without-serde",
        severity=Severity.CRASH,
        title="A remote store is configured, and remote_serde is empty.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert config.remote_serde is not None",
                at="lmcache/v1/storage_backend/remote_backend.py",
            ),
        ),
        sentence="remote_serde is null",
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        cause="The default is naive; `remote_serde: null` in the file takes it away.",
        now="remote_serde: naive (or leave the line out), env | grep LMCACHE_REMOTE_SERDE; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1638",
        name="infinistore-link-type-not-known",
        severity=Severity.CRASH,
        title="infinistore_link_type is none that Infinistore knows.",
        shows=(
            Failed(
                kind="ValueError",
                text="Invalid link_type: <name>",
                at="lmcache/v1/storage_backend/connector/infinistore_adapter.py",
            ),
        ),
        sentence="{name} is no link type",
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        cause="It is the name of a constant of the package infinistore: LINK_ETHERNET (RoCE, the default) or LINK_IB.",
        now="extra_config: {infinistore_link_type: LINK_ETHERNET} with RoCE, LINK_IB with InfiniBand (ibv_devinfo "
        "shows link_layer); restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1640",
        name="lazy-offload-settings-refused",
        severity=Severity.CRASH,
        title="LMCacheMPConnector refuses a setting of its lazy offload.",
        shows=(
            Failed(kind="ValueError", text="Unknown offload policy: <name>", at=f"{_LAZY}/__init__.py"),
            Failed(kind="ValueError", text="horizon_steps must be > 0, got <got>", at=f"{_LAZY}/eviction_aware.py"),
            Failed(kind="ValueError", text="max_drain_per_step must be >= 1, got", at=f"{_LAZY}/eviction_aware.py"),
            Failed(kind="ValueError", text="max_deferral_seconds must be >= 0.0, got", at=f"{_LAZY}/eviction_aware.py"),
        ),
        connectors=("LMCacheMPConnector", "MultiConnector"),
        releases={"lmcache": ">=0.5.6"},
        cause="The keys are lmcache.mp.lazy_offload_policy (FIFO or EVICTION_AWARE, as the release writes them), "
        "lmcache.mp.lazy_offload_horizon_steps (above 0), lmcache.mp.lazy_offload_max_drain_per_step (1 or more, 64 by "
        "default) and lmcache.mp.lazy_offload_max_deferral_seconds (0 or more).",
        now="leave all but lmcache.mp.lazy_offload: true out of kv_connector_extra_config: the defaults are in range; "
        "restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
)
