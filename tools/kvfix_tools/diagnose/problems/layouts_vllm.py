"""Layouts of KV that vLLM itself, or its transfer, refuses with a bare assertion."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_UTILS = "vllm/distributed/kv_transfer/kv_connector/utils.py"
_ISSUES = "https://github.com/vllm-project/vllm/issues"

PROBLEMS = (
    Problem(
        code="KVD566",
        name="nixl-layout-of-another-backend",
        severity=Severity.CRASH,
        title="The attention backend's KV is not laid out by blocks first, and NixlConnector does not start with it.",
        shows=(
            Failed(kind="AssertionError", text="KV cache layout must be blocks-first", at=_UTILS),
            Failed(
                kind="AssertionError",
                text="Attention KV cache layout must be standardized as [num_blocks, num_kv_heads, block_size, "
                "content_size]",
                at=_UTILS,
            ),
        ),
        releases={"vllm": ">=0.26,<0.32"},
        cause="These releases ask the backend for the shape of its KV and take [blocks, heads, tokens, content] only. "
        "A platform's plugin (Gaudi: vllm-gaudi) or a backend of one's own has another one.",
        now="the plugin's release that is made for this vLLM (vllm-gaudi with pull 1616); on a GPU one of vLLM's own: "
        "`--attention-backend FLASH_ATTN`",
        good="a plugin that fits: check it at each change of vLLM's release",
        threads=("https://github.com/vllm-project/vllm-gaudi/pull/1616",),
    ),
    Problem(
        code="KVD567",
        name="sparse-mla-among-all-layers",
        severity=Severity.CRASH,
        title="Sparse MLA cannot have all layers in one block (VLLM_KV_CACHE_LAYOUT=BLHNC), and vLLM does not start.",
        shows=(
            Failed(
                kind="AssertionError",
                within="bind_kv_cache",
                source="assert self.kv_cache.stride(0) % row_width == 0",
                at="vllm/model_executor/layers/attention/mla_attention.py",
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="The layout puts the KV of all layers side by side. The indexer's rows are narrower than MLA's, so that "
        "a block is no whole number of rows, which the sparse kernels need. vLLM accepts the setting and asserts late.",
        now="`unset VLLM_KV_CACHE_LAYOUT`, restart",
        good="the layout that vLLM takes by itself; no release is known to refuse the setting with a plain word",
        threads=(f"{_ISSUES}/55431",),
    ),
    Problem(
        code="KVD594",
        name="two-blocks-look-like-keys-and-values",
        severity=Severity.CRASH,
        title="A hybrid model's KV has two blocks, and vLLM cannot tell them from keys and values.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Fail to determine whether the layout is (2, num_blocks, ...) or (num_blocks, 2, ...)",
                at="vllm/v1/worker/gpu_model_runner.py",
            ),
        ),
        releases={"vllm": "<0.20"},
        cause="With attention and state (Mamba, GDN) vLLM turns the KV of attention round, and asserts that it has not "
        "just 2 blocks. It has when the memory of CUDA graphs is measured with a smallest KV, or when there is hardly "
        "any memory left for KV.",
        now="`--enforce-eager`; if it stays, more memory for KV: a larger --gpu-memory-utilization, a smaller "
        "--max-model-len",
        fixed={"vllm": "0.20.2"},
        threads=("https://github.com/vllm-project/vllm/pull/37679",),
    ),
    Problem(
        code="KVD154",
        name="kvcached-refuses-hybrid-models",
        severity=Severity.CRASH,
        title="kvcached does not take this model's KV cache, or the layout of this attention backend.",
        shows=(
            Failed(
                kind="NotImplementedError",
                text="Hybrid models with more than one KV cache type are not supported yet",
            ),
            Failed(kind="ValueError", text="Unsupported kv cache shape: <shape>", through="kvcached/"),
        ),
        cause="The text is kvcached's, not vLLM's: sliding window or state layers beside full attention (Gemma 3, "
        "gpt-oss) are more than one kind; FlashInfer's caches have another shape than FlashAttention's.",
        now="of a shape: --attention-backend FLASH_ATTN; else `unset ENABLE_KVCACHED KVCACHED_AUTOPATCH` (or pip "
        "uninstall -y kvcached) for this model, restart",
        good="a kvcached that has them: its issues 187 and 215",
        threads=("https://github.com/ovg-project/kvcached/issues/187",),
    ),
    Problem(
        code="KVD1568",
        name="compressed-cache-by-layers",
        severity=Severity.CRASH,
        title="The KV cache of a model with compressed layers is laid out layer by layer, and the connector cannot "
        "move it so.",
        shows=(Failed(kind="AssertionError", text="Compressed caches must be packed", at=_UTILS),),
        releases={"vllm": ">=0.32"},
        cause="Layers that keep one state for several tokens (DeepSeek V4) have pages of their own size. "
        "NixlConnector and MooncakeConnector want all layers of a block side by side: a layout whose name begins with "
        "B. VLLM_KV_CACHE_LAYOUT (HND and NHD are LBHNC and LBNHC), or an attention backend that offers nothing else, "
        "chose one that begins with L.",
        now="`unset VLLM_KV_CACHE_LAYOUT`; if it was not set `export VLLM_KV_CACHE_LAYOUT=BLHNC`, and without "
        "--attention-backend; on prefill and decode; restart both",
        good="the layout that vLLM takes by itself for the model",
    ),
    Problem(
        code="KVD1258",
        name="indexer-with-several-heads",
        severity=Severity.CRASH,
        title="The connector asks DeepSeek V3.2's indexer for a KV cache of several heads, and it has one.",
        shows=(
            Failed(
                kind="AssertionError",
                within="indexer.py:get_kv_cache_shape",
                source="assert num_kv_heads == 1",
                through="/kv_connector/",
            ),
            Failed(kind="AssertionError", text="num_kv_heads == 1", through="/kv_connector/"),
            Failed(
                kind="AssertionError",
                within="indexer.py:get_kv_cache_shape",
                source="assert num_kv_heads == 1",
                through="/kv_offload/",
            ),
        ),
        sentence="the shape of the indexer's cache is asked for with another number of heads than 1",
        sure=False,
        releases={"vllm": "<0.20"},
        cause="To see how blocks are laid out a connector asks the attention backend, here the indexer's, with a "
        "made-up number of heads. The frame below decides: `kv_offload` (--kv-offloading-size, OffloadingConnector) "
        "asks for 8 in every release before 0.20.2 (pull 37536); NixlConnector (kv_connector/utils.py) in builds of "
        "2026-01 between 0.14 and 0.15 alone (pull 33090).",
        now="vLLM 0.20.2; until then without --kv-offloading-size and OffloadingConnector for this model; "
        "NixlConnector: vLLM 0.15.1 on prefill and decode",
        fixed={"vllm": "0.20.2"},
        threads=(
            "https://github.com/vllm-project/vllm/issues/33074",
            "https://github.com/vllm-project/vllm/pull/33090",
            "https://github.com/vllm-project/vllm/pull/37536",
        ),
    ),
)
