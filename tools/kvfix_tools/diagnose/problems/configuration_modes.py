"""Settings of one mode that contradict each other: P2P, PD, several servers, context parallelism, the server."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_CONFIG = "lmcache/v1/config.py"
_NEEDS = (
    "assert self.enable_controller",
    "assert self.controller_pull_url is not None",
    "assert self.controller_reply_url is not None",
    "assert self.lmcache_worker_ports is not None",
    "assert self.transfer_channel is not None",
)

PROBLEMS = (
    Problem(
        code="KVD749",
        name="p2p-settings-missing",
        severity=Severity.CRASH,
        title="P2P sharing lacks settings that it cannot do without.",
        shows=(
            *(Failed(kind="AssertionError", source=each, at=_CONFIG) for each in _NEEDS),
            Failed(text="lmcache_instance_id is required when enable_controller=True"),
            Failed(text="controller_pull_url is required when enable_controller=True"),
            Failed(text="controller_reply_url is required when enable_controller=True"),
            Failed(text="lmcache_worker_ports is required and cannot be empty when enable_controller=True"),
        ),
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        cause="enable_p2p needs a controller, addresses and one port for each rank of tensor parallelism.",
        now="enable_p2p: true, enable_controller: true, controller_pull_url: host:8300, controller_reply_url: "
        "host:8400, lmcache_instance_id, lmcache_worker_ports: [8500], p2p_host, p2p_init_ports: [8200], "
        "p2p_lookup_ports: [8201] (N ports each with TP=N), transfer_channel: nixl, enable_async_loading: true",
        good="all of these, in each instance with ports of its own",
        threads=("https://github.com/LMCache/LMCache/issues/1966",),
    ),
    Problem(
        code="KVD751",
        name="pd-settings-contradict",
        severity=Severity.CRASH,
        title="Settings for prefill and decode by LMCache (enable_pd) are missing or contradict each other.",
        shows=(
            Failed(text="PD only supports enable_p2p=False", at=_CONFIG),
            Failed(text="store_location cannot be PDBackend for receiver"),
            Failed(text="for pd receiver, retrieve_locations are expected"),
            Failed(text="pd_backend_mode must be 'sync' or 'async'"),
        ),
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        cause="enable_pd needs pd_role (sender on the prefill side, receiver on the decode side), pd_buffer_size and "
        "pd_buffer_device, and excludes enable_p2p.",
        now="enable_pd: true, pd_role: sender or receiver, pd_buffer_size: 2147483648, pd_buffer_device: cuda, "
        "enable_p2p: false; on the receiver no store_location, on the sender pd_proxy_host and pd_proxy_port",
        good="the configuration of LMCache's example for 1p1d of the installed release",
    ),
    Problem(
        code="KVD752",
        name="port-in-use",
        severity=Severity.CRASH,
        title="A port that the process wants to listen on is taken.",
        shows=(
            Failed(
                kind="OSError", text="[Errno 98] error while attempting to bind on address <address>: address already"
            ),
            Logged(text="[Errno 98] error while attempting to bind on address <address>: address already in use"),
            Failed(kind="RuntimeError", text="Failed to bind gRPC multiprocess server: <address>"),
        ),
        sentence="{address} is taken",
        cause="Another process listens there, mostly a second instance on the same machine with the same defaults, or "
        "one that has not ended. Defaults: 5600 VLLM_NIXL_SIDE_CHANNEL_PORT, 8998 VLLM_MOONCAKE_BOOTSTRAP_PORT, 5555 "
        "and 8080 lmcache server (--port, --http-port), 6999 internal_api_server_port_start, 8000 vllm serve --port. "
        "8998 with data parallel: each instance of an external or hybrid load balancer starts one (vLLM 51531, open).",
        now="ss -ltnp | grep <the port> says who has it; end it, or give each instance on the machine ports of its own",
        good="for each instance its own of: vllm --port, VLLM_NIXL_SIDE_CHANNEL_PORT (TP and DP ranks take the next "
        "ones), lmcache server --port and --http-port, the ports of PD and P2P",
        threads=(
            "https://github.com/LMCache/LMCache/issues/961",
            "https://github.com/vllm-project/vllm/pull/51532",
        ),
    ),
    Problem(
        code="KVD754",
        name="servers-of-different-chunk-size",
        severity=Severity.CRASH,
        title="The LMCache servers of one engine have different chunk sizes.",
        shows=(
            Failed(
                text="All LMCache servers must share the same chunk_size, got <sizes>",
                at="lmcache/integration/vllm/vllm_multi_process_adapter.py",
            ),
        ),
        sentence="the servers' chunk sizes: {sizes}",
        releases={"lmcache": ">=0.5.0"},
        cause="Each server was started with a --chunk-size of its own.",
        now="the same --chunk-size for each lmcache server",
        good="one start script for all servers",
    ),
    Problem(
        code="KVD755",
        name="several-servers-do-not-fit",
        severity=Severity.CRASH,
        title="Several LMCache servers for one engine do not fit its parallelism.",
        shows=(
            Failed(text="must be divisible by n_servers"),
            Failed(text="LMCacheMPConnector multi-server mode (n_servers > 1) does not support data parallelism"),
            Failed(text="LMCacheMPConnector multi-server mode only supports tensor parallelism"),
            Failed(text="LMCache MP auto-start only supports a single server"),
            Failed(text="Each LMCache server needs at least decode_context_parallel_size"),
        ),
        connectors=("LMCacheMPConnector", "MultiConnector"),
        cause="The ranks of tensor parallelism are dealt out evenly over the servers of lmcache.mp.server_urls; data "
        "and pipeline parallelism are not supported with more than one.",
        now="one server in lmcache.mp.server_urls (or lmcache.mp.host and lmcache.mp.port), or a number of servers "
        "that divides tensor parallelism, with data and pipeline parallelism 1",
        good="one lmcache server for each node",
    ),
    Problem(
        code="KVD756",
        name="context-parallelism-does-not-fit",
        severity=Severity.CRASH,
        title="LMCache's multi-process connector cannot serve this context parallelism.",
        shows=(
            Failed(text="LMCacheMPConnector does not support prefill-context parallelism together with DCP"),
            Failed(text="must be no greater than and evenly divide every resolved attention block size"),
        ),
        connectors=("LMCacheMPConnector", "MultiConnector"),
        cause="From 0.5.5 on it serves decode context parallelism if the interleave size divides every block size, and "
        "no prefill context parallelism beside it.",
        now="--prefill-context-parallel-size 1, and --cp-kv-cache-interleave-size a divisor of the block sizes in the "
        "line",
        good="LMCache 0.5.6 with decode context parallelism alone",
    ),
    Problem(
        code="KVD757",
        name="expandable-segments-with-connector",
        severity=Severity.CRASH,
        title="PyTorch's expandable segments and a KV connector do not go together.",
        shows=(
            Failed(text="incompatible with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", at="vllm/config/vllm.py"),
        ),
        releases={"vllm": ">=0.26.0"},
        cause="Expandable segments may give the KV cache other physical pages while transports have registered the old "
        "ones.",
        now="unset PYTORCH_CUDA_ALLOC_CONF",
        good="keep it so; or the cumem allocator (--enable-sleep-mode), which vLLM accepts beside it",
    ),
    Problem(
        code="KVD758",
        name="ranks-over-several-nodes",
        severity=Severity.CRASH,
        title="Tensor parallelism spans several nodes, which this LMCache does not expect.",
        shows=(
            Failed(
                text="LMCache is operating under the assumption that the local world size is equal",
                at="lmcache/integration/vllm/utils.py",
            ),
        ),
        releases={"lmcache": ">=0.3.14"},
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        cause="With several nodes LMCache takes one node for one group of tensor parallelism.",
        now="--tensor-parallel-size = the GPUs of a node, --pipeline-parallel-size = the nodes",
        good="no release of LMCacheConnectorV1 allows more yet (0.5.6 has the check)",
    ),
    Problem(
        code="KVD759",
        name="bypass-lookup-not-allowed",
        severity=Severity.CRASH,
        title="enable_scheduler_bypass_lookup is set for a model that it does not support.",
        shows=(Failed(text="enable_scheduler_bypass_lookup is only supported with"),),
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        cause="The scheduler may look up by itself only where one rank holds everything: MLA with "
        "save_only_first_rank, or remote_enable_mla_worker_id_as0.",
        now="enable_scheduler_bypass_lookup: false",
        good="keep it so, but for MLA models",
    ),
    Problem(
        code="KVD760",
        name="feature-not-for-device",
        severity=Severity.CRASH,
        title="LMCache does not have a feature on this kind of device.",
        shows=(
            Failed(text="=True is only supported on <devices>; the active device is '<device>'"),
            Failed(text="config.use_layerwise=True is not supported on <device>; LMCache <devices> no layerwise"),
        ),
        sentence="the device is {device}, and the feature is for others",
        cause="use_layerwise, enable_blending and their like exist for CUDA and ROCm first, for others in part.",
        now="set the setting that the line names to false",
        good="LMCacheMPConnector, or a CUDA build",
    ),
    Problem(
        code="KVD761",
        name="lazy-offload-needs-prefix-cache",
        severity=Severity.CRASH,
        title="lmcache.mp.lazy_offload needs vLLM's prefix cache.",
        shows=(Failed(text="lmcache.mp.lazy_offload requires vLLM prefix caching"),),
        releases={"lmcache": ">=0.5.6"},
        cause="Lazy offload stores blocks when vLLM's prefix cache evicts them; without that cache nothing is evicted.",
        now='--enable-prefix-caching, or "lmcache.mp.lazy_offload": false',
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD762",
        name="server-arguments-contradict",
        severity=Severity.CRASH,
        title="Arguments of `lmcache server` contradict each other, and it does not start.",
        shows=(
            Failed(text="worker reap timeout must be 0 (disabled) or >= 30s"),
            Failed(text="worker registration grace must be >= the worker reap timeout"),
            Failed(text="l1-devdax-path requires lazy allocation to be disabled"),
            Failed(text="l1-devdax-path requires SHM to be disabled"),
            Failed(text="l1-use-hugepages is incompatible with shared memory"),
            Failed(text="l1-use-hugepages requires eager pre-allocation"),
            Failed(text="Legacy L1 configuration requires --l1-size-gb and --eviction-policy"),
            Failed(text="Use either --l1-manager or legacy L1 flags"),
            Logged(text="error: the following arguments are required: --l1-size-gb"),
            Logged(text="error: the following arguments are required: --eviction-policy"),
        ),
        cause="The line names both. Huge pages and Device-DAX exclude shared memory and lazy allocation.",
        now='as the line says: --shm-name "" and --no-l1-use-lazy with --l1-use-hugepages or --l1-devdax-path; '
        "--l1-size-gb "
        "N --eviction-policy LRU always; a reap timeout of 0 or at least three heartbeats",
        good="lmcache server --l1-size-gb N --eviction-policy LRU, and one thing more at a time",
    ),
    Problem(
        code="KVD763",
        name="multi-connector-without-children",
        severity=Severity.CRASH,
        title="MultiConnector was given no connectors.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert ktcs is not None",
                at="vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py",
            ),
        ),
        cause='Its connectors stand in kv_connector_extra_config, below "connectors".',
        now='{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":'
        '[{"kv_connector":"NixlConnector","kv_role":"kv_both"},{"kv_connector":"OffloadingConnector","kv_role":'
        '"kv_both"}]}}',
        good="each of them with its own kv_role and kv_connector_extra_config",
    ),
    Problem(
        code="KVD140",
        name="kv-transfer-never-begun",
        severity=Severity.CRASH,
        title="A worker is asked for its connector and has none.",
        shows=(
            Failed(kind="AssertionError", text="disaggregated KV cache transfer parallel group is not initialized"),
        ),
        sure=False,
        cause="vLLM before 0.8 begins the transfer only with `kv_parallel_size` above 1, and asks for it at the first "
        "request all the same. Later ones: a plugin or a patched worker that does not call "
        "ensure_kv_transfer_initialized.",
        now='vLLM 0.8 or later with `"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"`; with the old one '
        "without --kv-transfer-config (`--cpu-offload-gb` moves weights, not KV)",
        good="vLLM 0.11.2 or newer with a connector of its own list",
        threads=(
            "https://github.com/vllm-project/vllm/issues/14636",
            "https://github.com/vllm-project/vllm/pull/14746",
        ),
    ),
)
