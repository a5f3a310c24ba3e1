"""NixlConnector: prefill and decode do not fit each other."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_BASE_WORKER = f"{_V1}/nixl/base_worker.py"
_NIXL_CONNECTOR = f"{_V1}/nixl_connector.py"
_CACHING = "_apply_prefix_caching"

PROBLEMS = (
    Problem(
        code="KVD578",
        name="nixl-block-counts-differ",
        severity=Severity.CRASH,
        title="Prefill and decode, or ranks of one engine, have different numbers of KV blocks: decode refuses them.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert self.dst_num_blocks[remote_engine_id] == nixl_agent_meta.num_blocks",
                at=_BASE_WORKER,
            ),
            Failed(kind="AssertionError", source="assert self.dst_num_blocks[engine_id] == nixl_agent_meta.num_blocks"),
            Failed(kind="AssertionError", source="assert self.num_blocks >= nixl_agent_meta.num_blocks"),
        ),
        replaces=("KVD156", "KVD570"),
        cause="Ranks of one engine id say different sizes: vLLM before 0.11 sized each rank by its own free memory, or "
        "an engine with a fixed `engine_id` came back with another size. The older `self.num_blocks >=` (before "
        "0.9.2) wanted no fewer blocks on decode than on prefill, which nothing needs.",
        now="`--num-gpu-blocks-override N` on prefill and decode, no `engine_id` in --kv-transfer-config, restart "
        "decode after prefill",
        good="vLLM 0.11.2 or later, where the ranks agree and decode may have fewer, and no fixed `engine_id`",
        threads=(
            f"{_ISSUES}/23086",
            f"{_ISSUES}/19338",
        ),
    ),
    Problem(
        code="KVD579",
        name="nixl-shapes-differ",
        severity=Severity.CRASH,
        title="The KV of prefill and decode has different shapes, and the handshake asserts.",
        shows=(
            Failed(
                kind="AssertionError", text="Remote P worker KV layer cache must be of shape [2, N,", at=_NIXL_CONNECTOR
            ),
            Failed(kind="AssertionError", text="All remote layers must have the same block size", at=_NIXL_CONNECTOR),
        ),
        releases={"vllm": "<0.26"},
        replaces=("KVD156", "KVD570"),
        cause="Another dtype, block size or tensor parallel size than these releases can map: with more ranks than KV "
        "heads on one side the heads are repeated, and the size no longer follows the number of ranks.",
        now="the same --tensor-parallel-size, --block-size, --dtype and --kv-cache-dtype on both sides",
        fixed={"vllm": "0.26.0"},
        threads=(f"{_ISSUES}/45330",),
    ),
    Problem(
        code="KVD580",
        name="nixl-regions-differ",
        severity=Severity.CRASH,
        title="Prefill and decode hold different KV for the same layers.",
        shows=(
            Failed(kind="AssertionError", text="KV cache sizes must match between P and D when", at=_BASE_WORKER),
            Failed(
                kind="AssertionError", text=": remote P KV block_len <remote> must equal local <local> * remote_heads"
            ),
        ),
        releases={"vllm": ">=0.26"},
        replaces=("KVD156", "KVD570"),
        cause="One side has other layers (a draft model on one side only), another KV cache dtype, block size or "
        "layout.",
        now="the same --speculative-config, --kv-cache-dtype, --dtype and --block-size on both sides; else the same "
        "--tensor-parallel-size too",
        good="one set of options for prefill and decode; no release maps these differences",
        threads=(f"{_ISSUES}/42895",),
    ),
    Problem(
        code="KVD581",
        name="nixl-layouts-differ",
        severity=Severity.CRASH,
        title="Prefill and decode have different tensor parallel sizes and different KV layouts.",
        shows=(Failed(kind="RuntimeError", text="Heterogeneous TP expects same kv_cache_layout", at=_BASE_WORKER),),
        replaces=("KVD156", "KVD570"),
        cause="Heads are exchanged between ranks of different number, which needs one layout on both sides.",
        now='`export VLLM_KV_CACHE_LAYOUT=HND` on both sides, or `"enable_permute_local_kv": true` beside '
        "kv_connector in decode's --kv-transfer-config; or the same --tensor-parallel-size",
        good="one layout on both sides; no release changes that",
    ),
    Problem(
        code="KVD582",
        name="pd-sizes-do-not-divide",
        severity=Severity.CRASH,
        title="A size of decode is no multiple of prefill's, or the other way round.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Local tensor parallel size <local> is not divisible by remote tensor parallel size <remote>",
            ),
            Failed(
                kind="AssertionError",
                text="Remote tensor parallel size <remote> is not divisible by local tensor parallel size <local>",
            ),
        ),
        sentence="here {local}, there {remote}",
        replaces=("KVD156", "KVD570"),
        cause="KV is mapped between ranks only where one size divides the other (before vLLM 0.15 prefill's tensor "
        "parallel size must not be the larger one).",
        now="--tensor-parallel-size of prefill and decode equal, or one a multiple of the other",
        good="the set-up; no release maps other sizes",
        threads=(f"{_ISSUES}/43523",),
    ),
    Problem(
        code="KVD1251",
        name="pd-block-sizes-do-not-divide",
        severity=Severity.CRASH,
        title="Decode's KV blocks are smaller than prefill's, or no multiple of them.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Local block size <local> is not divisible by remote block size <remote> or vice versa",
            ),
        ),
        sentence="decode has blocks of {local} tokens, prefill of {remote}",
        replaces=("KVD156", "KVD570"),
        cause="Decode's block size has to be prefill's or a multiple of it; the other way round is refused, whatever "
        "the message says. These are the blocks of the attention kernel: for hybrid models they follow from the "
        "tensor parallel size, so that the same --block-size can end in two sizes.",
        now="the same --block-size on both sides (or decode's a multiple of prefill's); for a hybrid model also the "
        "same --tensor-parallel-size on both sides",
        good="the set-up; no release up to 0.33 lets decode have the smaller blocks",
        threads=(f"{_ISSUES}/42895",),
    ),
    Problem(
        code="KVD583",
        name="nixl-fewer-remote-blocks",
        severity=Severity.CRASH,
        title="Decode expects more KV blocks than prefill has for the request.",
        shows=(
            Failed(kind="AssertionError", source="assert num_local_blocks <= num_remote_blocks", at=_NIXL_CONNECTOR),
            Failed(kind="AssertionError", source="assert num_local_blocks <= len(remote_group)", within=_CACHING),
            Failed(kind="AssertionError", source="assert num_decode_blocks <= len(prefill_group)", within=_CACHING),
            Failed(kind="ValueError", text="Decode allocated more KV pages than the prefill worker supplied"),
        ),
        cause="Decode allocated blocks that prefill never had: speculative decoding on decode only, another block "
        "size, or another prompt than prefill computed (template, tokenizer, a router that appends the first token "
        "to it: then only prompts of whole blocks fail).",
        now="the same --speculative-config, --block-size and chat template on both sides; a router that hands decode "
        "the very prompt of prefill",
        good="one set of options for prefill and decode",
        threads=(f"{_ISSUES}/21583", "https://github.com/vllm-project/vllm/pull/50558"),
    ),
    Problem(
        code="KVD696",
        name="nixl-draft-tokens-take-a-block",
        severity=Severity.CRASH,
        title="Decode reserves a block for draft tokens before the KV comes, and the transfer has one too few.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert len(local_block_descs_ids) == len(remote_block_descs_ids)",
                within="nixl_connector.py:_read_blocks",
            ),
        ),
        releases={"vllm": "<0.11"},
        cause="With speculative decoding these releases allocate room for the draft tokens already when the request is "
        "to be loaded. A prompt that ends near the end of a block gets one block more than prefill has.",
        now="decode without --speculative-config until the upgrade",
        fixed={"vllm": "0.11.0"},
        threads=("https://github.com/vllm-project/vllm/pull/22317",),
    ),
    Problem(
        code="KVD585",
        name="nixl-no-pipeline-parallel",
        severity=Severity.CRASH,
        title="NixlConnector cannot do pipeline parallelism here.",
        shows=(
            Failed(kind="ValueError", text="received pp_rank > 0 handshake metadata", at=f"{_V1}/base.py"),
            Failed(kind="NotImplementedError", text="NixlConnector (pull) does not support pipeline_parallel_size"),
            Failed(kind="NotImplementedError", text="NixlPushConnector consumer (decode) does not support"),
            Failed(kind="NotImplementedError", text="NixlPushConnector does not support pipeline_parallel_size > 1"),
            Failed(kind="AssertionError", source="remote_pp_size == 1"),
        ),
        releases={"vllm": ">=0.26"},
        replaces=("KVD156", "KVD570"),
        cause="Only prefill with NixlPushConnector (vLLM 0.32) can be split into pipeline stages.",
        now="`--pipeline-parallel-size 1` with more --tensor-parallel-size; on prefill with vLLM 0.32 "
        "NixlPushConnector on both sides",
        good="no release is right for pipeline parallel decode yet",
        threads=(f"{_ISSUES}/22430",),
    ),
    Problem(
        code="KVD954",
        name="nixl-layers-differ",
        severity=Severity.HANG,
        title="Prefill and decode have different numbers of KV caches, and the NIXL handshake refuses that.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Number of KV layers must match between prefill and decode",
                at=_BASE_WORKER,
            ),
            # Builds between releases.
            Failed(kind="AssertionError", text="Number of KV layers must match between producer and consumer"),
        ),
        releases={"vllm": ">=0.21"},
        replaces=("KVD156", "KVD570"),
        cause="One side has layers of KV that the other lacks: a draft model (EAGLE, MTP, DSpark) that only one side "
        "was given, or another model. Where the two sides are of different makes (Gaudi and a GPU) or have other "
        "attention backends, one registers K and V of a layer as one region and the other as two.",
        now="the same --speculative-config on prefill and decode, or none on both; the same platform and "
        "--attention-backend on both; Gaudi as prefill of a GPU: VLLM_HPU_NIXL_JOINT_KV of vllm-gaudi, where its "
        "release has it; restart both",
        good="one set of model options for prefill and decode; no release up to 0.33.0 takes draft layers on one side",
        threads=(f"{_ISSUES}/48221", "https://github.com/vllm-project/vllm-gaudi/pull/1588"),
    ),
    Problem(
        code="KVD955",
        name="nixl-block-sizes-of-hybrid-model",
        severity=Severity.HANG,
        title="A model with several KV groups has other block sizes on prefill than on decode.",
        shows=(
            Failed(kind="AssertionError", text="HMA does not support different remote block size yet"),
            Failed(kind="AssertionError", text="Mamba 3-read transfer with block_size_ratio != <one> is not tested."),
        ),
        releases={"vllm": ">=0.20,<0.32"},
        replaces=("KVD156", "KVD570"),
        cause="NixlConnector maps blocks of one size to those of another for models with one KV group only. The size "
        "also follows from the tensor parallel size and the attention backend, where --block-size is not given.",
        now="the same --block-size, --tensor-parallel-size and attention backend on prefill and decode",
        fixed={"vllm": "0.32.0"},
        threads=(f"{_ISSUES}/42895",),
    ),
    Problem(
        code="KVD972",
        name="nixl-block-sizes-not-mapped",
        severity=Severity.HANG,
        title="Prefill and decode have different block sizes in a set-up for which NixlConnector maps none.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Different local/remote block sizes are not supported when P TP > D TP.",
                at=_BASE_WORKER,
            ),
            Failed(kind="AssertionError", text="Heterogeneous block sizes are not supported with host buffer"),
            Failed(
                text="Head-sharded attention reads with P_TP > D_TP and heterogeneous block sizes are not supported"
            ),
        ),
        releases={"vllm": ">=0.21"},
        replaces=("KVD156", "KVD570"),
        cause="Blocks of one size are mapped to those of another only where prefill's tensor parallel size is not the "
        "larger one, and where KV goes from GPU to GPU (kv_buffer_device cuda).",
        now="the same --block-size on prefill and decode, given on both; restart both",
        good="one --block-size for all; no release up to 0.33.0 maps these",
    ),
    Problem(
        code="KVD717",
        name="nixl-tp-sizes-refused",
        severity=Severity.CRASH,
        title="Prefill and decode have tensor parallel sizes between which this KV cannot be cut anew.",
        shows=(
            Failed(text="KV-head re-sharding is not supported for NVFP4 KV cache"),
            Failed(
                kind="ValueError",
                text="CSA-linear NIXL requires both endpoints on the same side of the KV-head sharding boundary",
            ),
        ),
        releases={"vllm": ">=0.32"},
        replaces=("KVD156", "KVD570"),
        cause="NVFP4 pages hold the data of all heads before the scales of all, and pages of compressed sparse "
        "attention go as whole blocks: a head's part of them is no slice.",
        now="the same --tensor-parallel-size on prefill and decode; or --kv-cache-dtype fp8 in place of nvfp4 on both",
        good="no release cuts such pages anew (0.33.0): equal sizes on both sides",
    ),
    Problem(
        code="KVD590",
        name="nixl-rows-packed-differently",
        severity=Severity.HANG,
        title="Prefill and decode put a block's layers together in other ways, and the handshake is refused.",
        shows=(
            Failed(kind="RuntimeError", text="Packed KV block rows differ between P and D.", at=_BASE_WORKER),
            Failed(
                kind="RuntimeError",
                text="Head-sharded draft KV under an MLA target needs the same block-contiguous kv_cache_layout",
                at=_BASE_WORKER,
            ),
        ),
        releases={"vllm": ">=0.33"},
        replaces=("KVD156", "KVD570"),
        cause="Whole rows are moved, so both sides need the same layout, block size and layers: another "
        "VLLM_KV_CACHE_LAYOUT, --block-size or attention backend, or a draft model on one side only or with other "
        "options.",
        now="`export VLLM_KV_CACHE_LAYOUT=LBHNC` and the same --block-size, --kv-cache-dtype, "
        "--attention-backend and --speculative-config on both sides, restart both",
        good="one configuration for both sides but for the sizes of parallelism",
    ),
)
