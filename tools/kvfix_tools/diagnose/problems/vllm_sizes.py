"""Block sizes, pages and options of a KV cache that vLLM cannot bring together: it does not start."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem, Sign

_CONFIG = "vllm/config/vllm.py"
_UTILS = "vllm/v1/core/kv_cache_utils.py"
_COORDINATOR = "vllm/v1/core/kv_cache_coordinator.py"
_MANAGER = "vllm/v1/core/single_type_kv_cache_manager.py"
_ISSUES = "https://github.com/vllm-project/vllm/issues"


def _refused(*texts: str, at: str) -> tuple[Sign, ...]:
    """These texts, whatever the class: pydantic names another one where the check stands in a configuration."""
    return tuple(Failed(text=text, at=at) for text in texts)


PROBLEMS = (
    Problem(
        code="KVD070",
        name="pages-not-brought-together",
        severity=Severity.CRASH,
        title="Layers of this model have KV pages of sizes that vLLM cannot make equal, and the engine does not start.",
        shows=(
            Failed(kind="AssertionError", source="new_spec.page_size_bytes == max_page_size"),
            Failed(kind="NotImplementedError", text="page size is not divisible by the maximum page size"),
            Failed(kind="NotImplementedError", text="The page size of the layer is not divisible by the"),
            Failed(text="TurboQuant KV cache is not supported for hybrid"),
            Failed(kind="AssertionError", source="raw_tensor.numel() % kv_cache_spec.page_size_bytes == 0"),
            Failed(kind="AssertionError", source="assert attn_page_size >= mamba_page_size"),
            Failed(kind="AssertionError", source="max(sm_page_sizes) <= max(all_page_sizes)"),
        ),
        releases={"vllm": ">=0.15"},
        cause="All layers share one pool of pages. A smaller page is brought to the largest by a larger block, which "
        "works only where the largest is a multiple of it; Mamba and plain attention pages may be padded, MLA and "
        "quantized ones (turboquant, a draft model with other heads or another dtype) not. No connector has part in "
        "it.",
        now="--kv-cache-dtype auto (or the one of the model's card); without --speculative-config, if the page is the "
        "draft model's; no --block-size of your own, then restart",
        good="a --kv-cache-dtype, draft model and attention backend whose pages divide one another",
        threads=(f"{_ISSUES}/41560",),
    ),
    Problem(
        code="KVD071",
        name="layout-cannot-mix-pages",
        severity=Severity.CRASH,
        title="The KV cache layout that is set cannot hold this model's pages of several sizes.",
        shows=(
            Failed(
                kind="ValueError",
                text="KV cache layout <layout> cannot express this model's mixed page sizes (<sizes>)",
            ),
        ),
        sentence="layout {layout} for pages of {sizes} bytes",
        releases={"vllm": ">=0.32"},
        cause="Pages of several sizes lie side by side within a block, which needs the block's dimension outside and "
        "each page in one piece. VLLM_KV_CACHE_LAYOUT, or the layout that a connector demands, has it otherwise.",
        now="VLLM_KV_CACHE_LAYOUT=BLHNC in the engine's environment, and restart; in P/D the same on both sides",
        good="the environment",
    ),
    Problem(
        code="KVD072",
        name="one-kind-of-layer-needed",
        severity=Severity.CRASH,
        title="A model with several kinds of KV cannot start: vLLM's hybrid KV cache manager is switched off.",
        shows=(Failed(kind="ValueError", text="Failed to promote local KV cache specs to one unified type."),),
        releases={"vllm": ">=0.32"},
        cause="Without the manager all layers must be of one kind. Sliding windows can be treated as full attention, "
        "state (Mamba, GDN) and layers of other page sizes cannot. --disable-hybrid-kv-cache-manager was given, or a "
        "connector is used that knows one KV group only.",
        now="take --disable-hybrid-kv-cache-manager out; LMCacheMPConnector in place of LMCacheConnectorV1, or "
        "OffloadingConnector (--kv-offloading-size); else no --kv-transfer-config for this model",
        good="a connector that supports several KV groups (SupportsHMA)",
        threads=(f"{_ISSUES}/42911",),
    ),
    Problem(
        code="KVD073",
        name="prefix-match-unit-refused",
        severity=Severity.CRASH,
        title="--prefix-match-unit does not fit this model's KV groups, and vLLM does not start.",
        shows=(
            Failed(kind="ValueError", text="Invalid prefix_match_unit=<unit>; <rule>"),
            Failed(kind="ValueError", text="Invalid hash_block_size=<unit>; <rule>"),
        ),
        sentence="prefix_match_unit {unit}: {rule}",
        cause="With one KV group hits end at block boundaries: it must be the block size (times decode context "
        "parallelism). With several groups it must divide the block size of each that can be cached, and be a multiple "
        "of what compressed layers keep together.",
        now="take --prefix-match-unit out: vLLM then takes the greatest common divisor; restart",
        good="the setting",
    ),
    Problem(
        code="KVD074",
        name="retention-interval-refused",
        severity=Severity.CRASH,
        title="--prefix-cache-retention-interval does not fit this model, and vLLM does not start.",
        shows=(
            Failed(kind="ValueError", text="is set but this model has no sliding-window or Mamba KV cache group"),
            Failed(kind="ValueError", text="must be non-negative and a multiple of scheduler_block_size (<block>)"),
        ),
        cause="It thins out what is cached of sliding windows and of Mamba state; a model without such layers takes 0 "
        "only, others a multiple of the scheduler's block size (the least common multiple of the groups' block sizes, "
        "which the log prints as `kv lcm block sizes`).",
        now="--prefix-cache-retention-interval 0, or without it; else a multiple of the number in the message; restart",
        good="the setting",
    ),
    Problem(
        code="KVD075",
        name="draft-longer-than-a-block",
        severity=Severity.CRASH,
        title="Speculative decoding looks further ahead than a block, and vLLM does not start with prefix caching.",
        shows=(
            Failed(
                kind="ValueError",
                text="Multi-module MTP with prefix caching requires scheduler_block_size (=<block>) >= "
                "num_speculative_tokens (=<tokens>)",
                at=_COORDINATOR,
            ),
        ),
        sentence="blocks of {block} tokens, {tokens} draft tokens",
        releases={"vllm": ">=0.32"},
        cause="The last block of a hit is dropped, as draft layers have written beyond it: it must be at least as long "
        "as the draft.",
        now="a --block-size of at least num_speculative_tokens, or fewer num_speculative_tokens, or "
        "--no-enable-prefix-caching; restart",
        good="the settings",
    ),
    Problem(
        code="KVD076",
        name="group-sizes-without-common-block",
        severity=Severity.CRASH,
        title="The block sizes of this model's KV groups do not divide the scheduler's, and vLLM does not start.",
        shows=(Failed(kind="AssertionError", source="assert scheduler_block_size % hash_block_size == 0"),),
        cause="The scheduler counts in the least common multiple of the groups' block sizes, and hashes in a size that "
        "divides it. A patched vLLM or a plugin of a platform has changed a group's block size after they were set.",
        now="no --block-size of your own, and no --prefix-match-unit; then without the plugin or the patch; restart",
        good="a release of the plugin for this very vLLM",
        sure=False,
    ),
    Problem(
        code="KVD077",
        name="chunked-attention-with-drafts",
        severity=Severity.CRASH,
        title="A model with chunked local attention (Llama 4) is refused together with drafts or other block sizes.",
        shows=(
            Failed(kind="AssertionError", text="Hybrid KV cache is not supported for", at=_MANAGER),
            Failed(
                kind="AssertionError",
                text="KV cache groups with different block sizes are not compatible with chunked local attention now",
                at=_MANAGER,
            ),
        ),
        releases={"vllm": ">=0.26"},
        cause="The search for a hit in chunked local attention knows one block size and no dropped last block. The "
        "first request with prefix caching asserts it.",
        now="without --speculative-config, or --no-enable-prefix-caching, or --disable-hybrid-kv-cache-manager; "
        "restart",
        good="vLLM 0.33.0 has the same lines: keep the setting",
    ),
    Problem(
        code="KVD078",
        name="coordinator-of-one-group",
        severity=Severity.CRASH,
        title="vLLM's manager for one KV group was given a model or sizes that it cannot hold.",
        shows=(
            Failed(kind="AssertionError", text="HybridKVCacheCoordinator requires at least two attention groups"),
            Failed(
                kind="AssertionError", text="UnitaryKVCacheCoordinator assumes only one kv cache group", at=_COORDINATOR
            ),
            Failed(
                kind="AssertionError",
                text="UnitaryKVCacheCoordinator assumes hash_block_size == block_size",
                at=_COORDINATOR,
            ),
        ),
        releases={"vllm": ">=0.15"},
        cause="One KV group is hashed in whole blocks. Another hash size comes of --prefix-match-unit, of context "
        "parallelism, which multiplies the block, or of a plugin that sets the block size late.",
        now="take --prefix-match-unit and --block-size out; then --decode-context-parallel-size 1; restart",
        good="the settings",
        sure=False,
    ),
    Problem(
        code="KVD079",
        name="context-length-not-fitted",
        severity=Severity.CRASH,
        title="There is GPU memory for not even one token of KV, and --max-model-len auto cannot find a length.",
        shows=(Failed(kind="ValueError", text="Cannot auto-fit max_model_len"),),
        releases={"vllm": ">=0.26"},
        cause="Weights, CUDA graphs and buffers of connectors on the GPU take all of what --gpu-memory-utilization "
        "allows.",
        now="--gpu-memory-utilization 0.95, a larger --tensor-parallel-size, or --max-num-batched-tokens lower; end "
        "other processes on the GPU (nvidia-smi); restart",
        good="the settings",
    ),
    Problem(
        code="KVD1564",
        name="mamba-kernel-settings-refused",
        severity=Severity.CRASH,
        title="--use-replayssm, or another option of the Mamba cache, does not go with the rest of the settings.",
        shows=(
            *_refused(
                "--use-replayssm is not supported for architecture <model>",
                "--use-replayssm requires --mamba-backend",
                "FlashInfer ReplaySSM requires --replayssm-buffer-len <=",
                "FlashInfer ReplaySSM speculative decoding requires --replayssm-buffer-len >=",
                "Mamba2 ReplaySSM speculative decoding requires --mamba-backend flashinfer",
                "RecoverSSM currently requires pipeline_parallel_size=1",
                "RecoverSSM requires --mamba-backend triton",
                "RecoverSSM supports bfloat16/float32 SSM state caches",
                "Triton ReplaySSM requires Model Runner V1",
                at=_CONFIG,
            ),
            # 0.32, not 0.33.
            *_refused(
                "FlashInfer ReplaySSM does not support --mamba-cache-mode align",
                "FlashInfer ReplaySSM speculative decoding requires --mamba-cache-mode none",
                "RecoverSSM with align mode requires VLLM_USE_V2_MODEL_RUNNER=1",
                at="",
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="These kernels compute the state again from a short buffer of tokens instead of storing it. Each is made "
        "for some backends, cache types and drafts only; prefix caching and connectors want --mamba-cache-mode align.",
        now="without --use-replayssm, --replayssm-buffer-len and --enable-mamba-cache-stochastic-rounding; restart. "
        "To keep it: what the message names, with --mamba-cache-mode none and without a connector",
        good="the options as the message wants them",
    ),
    Problem(
        code="KVD1566",
        name="stochastic-rounding-needs-float16",
        severity=Severity.CRASH,
        title="--enable-mamba-cache-stochastic-rounding is set for a Mamba cache that is not float16.",
        shows=_refused("Stochastic rounding for Mamba cache requires the SSM cache to be float16.", at=_CONFIG),
        releases={"vllm": ">=0.20"},
        cause="Only states in float16 are rounded so. Both sides of a transfer, and all that share a store, need the "
        "same type.",
        now="--mamba-ssm-cache-dtype float16, or without --enable-mamba-cache-stochastic-rounding; on every engine; "
        "restart",
        good="the options",
    ),
)
