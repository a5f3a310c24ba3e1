"""Parallel sizes of prefill, decode and caches that a connector of some release cannot map."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_VLLM = "https://github.com/vllm-project/vllm/"
_ASCEND = "https://github.com/vllm-project/vllm-ascend/"

PROBLEMS = (
    Problem(
        code="KVD588",
        name="nixl-prefill-has-more-ranks",
        severity=Severity.CRASH,
        title="Prefill has a larger tensor parallel size than decode, which this release's handshake cannot map.",
        shows=(
            Failed(kind="ZeroDivisionError", within="nixl_connector.py:_nixl_handshake"),
            Failed(kind="ZeroDivisionError", within="nixl_connector.py:add_remote_agent"),
        ),
        sentence="decode's tensor parallel size divided by prefill's is 0",
        releases={"vllm": "<0.15"},
        replaces=("KVD156", "KVD570"),
        cause="Decode divides its own tensor parallel size by prefill's, which must be the smaller one: for decode "
        "with data parallel and tensor parallel 1 that is never so.",
        now="prefill with a --tensor-parallel-size that is not above decode's (more prefill instances or "
        "--data-parallel-size instead), restart both",
        fixed={"vllm": "0.15.1"},
        threads=(f"{_VLLM}issues/21576", "https://github.com/llm-d/llm-d/issues/394", f"{_VLLM}pull/27274"),
    ),
    Problem(
        code="KVD615",
        name="offload-with-context-parallel",
        severity=Severity.CRASH,
        title="The OffloadingConnector counts more blocks than there are hashes: context parallel is not reckoned "
        "with.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert len(offload_keys) >= num_blocks",
                within="offloading/scheduler.py:get_num_new_matched_tokens",
            ),
            Failed(
                kind="AssertionError",
                source="assert len(offload_keys) >= num_blocks",
                within="offloading/scheduler.py:update_state_after_alloc",
            ),
            Failed(
                kind="AssertionError",
                source="assert len(offload_keys) >= num_blocks",
                within="offloading/scheduler.py:_get_reqs_to_store",
            ),
        ),
        connectors=("OffloadingConnector", "MultiConnector"),
        releases={"vllm": "<0.26"},
        sure=False,
        cause="With --decode-context-parallel-size (or --prefill-context-parallel-size) above 1 a block of a rank "
        "holds that many times its tokens, and these releases divide by the plain block size: the first request kills "
        "EngineCore. Without either option it is something else.",
        now="`--decode-context-parallel-size 1`, or without OffloadingConnector (--kv-offloading-size); restart",
        fixed={"vllm": "0.26.0"},
        threads=(f"{_VLLM}issues/40992", f"{_VLLM}pull/41549"),
    ),
    Problem(
        code="KVD545",
        name="ascend-mooncake-groups-mixed-up",
        severity=Severity.CRASH,
        title="vllm-ascend's MooncakeConnector takes the number of a transfer group for that of a KV group.",
        shows=(Failed(kind="IndexError", within="mooncake_connector.py:_get_kv_split_metadata"),),
        cause="It splits a KV group into several transfer groups (hybrid models, MLA with an indexer, MTP), and looks "
        "up block numbers, which it has for each KV group, by the number of the transfer group. Where that does not "
        "raise, blocks of another layout are read.",
        now="decode without --decode-context-parallel-size and without --speculative-config to go on; or vllm-ascend "
        "of after 2026-08-11",
        good="a vllm-ascend with pull request 13965 (releases/v0.26.0rc: 13968; without context parallel: 11439)",
        threads=(f"{_ASCEND}issues/13934", f"{_ASCEND}pull/13965", f"{_ASCEND}pull/11439"),
    ),
    Problem(
        code="KVD1854",
        name="ascend-load-looks-past-a-list",
        severity=Severity.CRASH,
        title="vllm-ascend's MooncakeConnector looks past the end of a list where a load begins.",
        shows=(
            Failed(
                kind="IndexError",
                text="list index out of range",
                source="kv_connector.start_load_kv(",
                through="/vllm_ascend/",
            ),
        ),
        sure=False,
        cause="The frames below start_load_kv decide. `_get_kv_split_metadata`: with --decode-context-parallel-size "
        "(`_DCP` in the worker's name) and MTP it takes a transfer group for a KV group (KVD545). `_get_remote_rank`: "
        "prefill loads from prefill (KVD546). `start_load_kv` itself: one side has a KV group more (KVD005).",
        now="the same --speculative-config and --block-size on prefill and decode; with DCP: decode without "
        "--decode-context-parallel-size or without --speculative-config; restart both",
        good="a vllm-ascend of after 2026-08-11 on both sides (pull request 13965)",
        threads=(f"{_ASCEND}issues/13934",),
    ),
    Problem(
        code="KVD546",
        name="ascend-mooncake-rank-not-mapped",
        severity=Severity.CRASH,
        title="vllm-ascend's MooncakeConnector has fewer remote ranks in its table than this engine has ranks.",
        shows=(Failed(kind="IndexError", within="mooncake_connector.py:_get_remote_rank"),),
        cause="The table is made for decode's tensor parallel size. A prefill engine that loads from another prefill "
        "engine (external load balancing: --data-parallel-rank is given) asks with its own, larger size.",
        now="no --data-parallel-rank on prefill (the load balancer of vLLM itself), or the same --tensor-parallel-size "
        'on prefill and decode, with both sizes so in "prefill" and "decode" of kv_connector_extra_config; restart',
        good="no release of vllm-ascend is known to be right: its master of September 2026 has it too",
        threads=(f"{_ASCEND}issues/16723",),
    ),
    Problem(
        code="KVD137",
        name="pipeline-ray-layers-of-another-rank",
        severity=Severity.CRASH,
        title="A worker gets the KV layers of another pipeline rank, and the engine does not start.",
        shows=(
            Failed(kind="KeyError", within="gpu_model_runner.py:get_attn_backends_for_group"),
            Failed(kind="KeyError", within="model_runner_v1.py:get_attn_backends_for_group"),
            Failed(kind="KeyError", within="attn_utils.py:init_attn_backend"),
        ),
        releases={"vllm": "<0.33"},
        sure=False,
        cause="With Ray on several nodes ranks are dealt anew after the workers have started, and the number by which "
        "a worker takes its list of layers (global_rank) is not. Without Ray: a hybrid model with pipeline parallel, "
        "whose groups name layers of all ranks.",
        now="vLLM 0.20 or later `export VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1`; else no Ray: "
        "`--distributed-executor-backend mp --nnodes 2 --node-rank 0 --master-addr HEAD` on each node; or "
        "`--pipeline-parallel-size 1`",
        good="vLLM 0.26.0, whose default is the other executor (0.33.0 has no other)",
        threads=(f"{_VLLM}issues/41287", f"{_VLLM}issues/40649", f"{_VLLM}issues/37974", f"{_ASCEND}issues/8440"),
    ),
    Problem(
        code="KVD138",
        name="data-parallel-rank-of-another-server",
        severity=Severity.CRASH,
        title="A router names a data parallel rank that this server does not hold, and the request fails.",
        shows=(
            Failed(kind="IndexError", within="core_client.py:get_core_engine_for_request"),
            Failed(kind="ValueError", text="data_parallel_rank <rank> is out of range [0, <ranks>)."),
        ),
        cause="The rank counts over all nodes; a server with --data-parallel-start-rank or external load balancing has "
        "only its own, counted from 0.",
        now="let the router send without a rank, or take it modulo --data-parallel-size-local; one server for all "
        "ranks (--headless on the other nodes) takes the number as it is",
        good="a router that knows which ranks a server holds (Dynamo 5001 is open)",
        threads=("https://github.com/ai-dynamo/dynamo/issues/5001",),
    ),
    Problem(
        code="KVD1128",
        name="ports-for-fewer-ranks",
        severity=Severity.CRASH,
        title="A list of ports in LMCache's configuration has fewer entries than the engine has ranks.",
        shows=tuple(
            Failed(kind=kind, text=text, source=f"{name}[{rank}]")
            for kind, text in (("IndexError", "list index out of range"), ("TypeError", "object is not subscriptable"))
            for name, rank in (
                ("port", "tp_rank"),
                ("port", "self.tp_rank"),
                ("ports", "self.tp_rank"),
                ("ports", "self.worker_id"),
                ("port", "pd_backend.tp_rank"),
                ("ports", "pd_backend.tp_rank"),
            )
        ),
        said=(r"(?:peer|p2p)_\w*ports?\b|lmcache_worker_ports", r"(?i)index out of range|IndexError|not subscriptable"),
        sentence="this rank has no port of its own",
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        cause="With --tensor-parallel-size above 1 each rank listens on its own port and takes the entry of its rank. "
        "`receiver_...`: the prefiller took it from the request, so the proxy hands fewer ports of the decoder than "
        "the prefiller has ranks.",
        now="one port for each rank: pd_peer_init_port: [7300, 7301], pd_peer_alloc_port: [7400, 7401], "
        "p2p_init_ports, p2p_lookup_ports and lmcache_worker_ports likewise (before 0.3.9 nixl_peer_init_port, "
        "nixl_peer_alloc_port); the same lists for the proxy, as the decoder's ports; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
        threads=("https://github.com/LMCache/LMCache/issues/1381", "https://github.com/LMCache/LMCache/issues/1966"),
    ),
    Problem(
        code="KVD1578",
        name="data-parallel-rank-without-gpus",
        severity=Severity.CRASH,
        title="There are fewer GPUs on this node than its data parallel ranks take.",
        shows=(Failed(text='local range: [<first>, <last>) base value: "<value>"'),),
        sentence="GPUs {first} to {last} (not included) of {value}",
        releases={"vllm": ">=0.11"},
        cause="Local rank r takes the devices from r times the size of an engine (tensor times pipeline parallel size) "
        "on. The list of devices, which stands last in the message (None: all that the machine has), ends before the "
        "second number.",
        now="CUDA_VISIBLE_DEVICES (ROCm: HIP_VISIBLE_DEVICES) with as many GPUs as the second number, or unset; or a "
        "smaller --data-parallel-size-local or --tensor-parallel-size; in a pod nvidia.com/gpu of that number; restart",
        good="the sizes",
    ),
)
