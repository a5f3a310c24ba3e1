"""Configurations, models and platforms that OffloadingConnector refuses at its start."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_OFFLOAD = "vllm/v1/kv_offload"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_ASCEND = "https://github.com/vllm-project/vllm-ascend/issues"

PROBLEMS = (
    Problem(
        code="KVD608",
        name="offload-blocks-not-aligned-to-hash",
        severity=Severity.CRASH,
        title="A KV group of this model has blocks that do not fit vLLM's hash size, and offloading does not start.",
        shows=(
            Failed(kind="AssertionError", text="gpu_block_size=<block> not divisible by hash_block_size=<hash>"),
            Failed(
                kind="AssertionError",
                text="tokens_per_block=<block> not divisible by tokens_per_hash=<hash>",
                at=f"{_V1}/offloading/config.py",
            ),
        ),
        sentence="blocks of {block} tokens, hashes of {hash}",
        releases={"vllm": ">=0.20"},
        cause="Hybrid models have groups of different block sizes, and one (an indexer's tail, a small window) is not "
        "a multiple of the hash size. --enable-prefix-caching, which the message names, helps only if it was off.",
        now="no --block-size and no `block_size` in kv_connector_extra_config; if prefix caching is on already: "
        "without OffloadingConnector for this model",
        good="vLLM 0.32.0 leaves groups out that cannot be cached; not the 4-token group of GLM-5.3-Flash's indexer, "
        "for which pull 54743 is open",
        threads=(
            f"{_ISSUES}/43093",
            f"{_ISSUES}/54831",
            f"{_ISSUES}/54413",
            "https://github.com/vllm-project/vllm/pull/54743",
        ),
    ),
    Problem(
        code="KVD1279",
        name="offload-without-chunked-local-attention",
        severity=Severity.CRASH,
        title="OffloadingConnector does not know chunked local attention (Llama 4), and vLLM does not start.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert isinstance(kv_cache_spec, FullAttentionSpec)",
                within="offloading/scheduler.py:get_sliding_window_size_in_chunks",
            ),
            Failed(
                kind="AssertionError",
                source="assert isinstance(kv_cache_spec, FullAttentionSpec)",
                within="offloading/scheduler.py:get_sliding_window_size_in_blocks",
            ),
        ),
        said=(
            r"OffloadingConnector|kv[-_]offloading",
            r"ChunkedLocalAttention|(?i:llama-?4|chunked local attention)",
            r"(?i)assert|crash",
        ),
        releases={"vllm": ">=0.26,<0.32"},
        cause="Its scheduler knows full attention, sliding windows and Mamba, and asserts that there is no other kind.",
        now="SimpleCPUOffloadConnector, LMCacheMPConnector or no --kv-transfer-config for this model",
        fixed={"vllm": "0.32.0"},
        threads=(f"{_ISSUES}/51150", "https://github.com/vllm-project/vllm/pull/51161"),
    ),
    Problem(
        code="KVD609",
        name="offload-block-size-of-many-groups",
        severity=Severity.CRASH,
        title="`block_size` is given for offloading, and this model has KV groups of different block sizes.",
        shows=(
            Failed(
                kind="AssertionError",
                text="If 'block_size' is specified in kv_connector_extra_config",
                at=f"{_V1}/offloading/config.py",
            ),
            Failed(
                kind="AssertionError",
                text="If 'block_size' is specified in kv_connector_extra_config",
                at=f"{_OFFLOAD}/spec.py",
            ),
        ),
        releases={"vllm": ">=0.20"},
        cause="One size in tokens cannot hold for all groups of a hybrid model.",
        now='take `block_size` out of kv_connector_extra_config; vLLM 0.26 or later: `"blocks_per_chunk": 4` in '
        "its place",
        good="the configuration; `blocks_per_chunk` from vLLM 0.26.0 on",
        threads=(f"{_ISSUES}/43093",),
    ),
    Problem(
        code="KVD610",
        name="offload-block-size-no-multiple",
        severity=Severity.CRASH,
        title="The offloading block size is no multiple of the GPU's.",
        shows=(
            Failed(
                kind="ValueError", text="in kv_connector_extra_config must be a multiple of the GPU KV cache block size"
            ),
            Failed(kind="AssertionError", source="assert self.offloaded_block_size % self.gpu_block_size == 0"),
            Failed(kind="AssertionError", source="assert offloaded_block_size_int % gpu_block_size == 0"),
            Failed(kind="AssertionError", source="assert tokens_per_chunk_int % tokens_per_block == 0"),
        ),
        cause="A chunk on the CPU holds whole GPU blocks. For hybrid models vLLM raises the GPU's block size at the "
        "start, also above the one that was asked for.",
        now="take `block_size` out of kv_connector_extra_config, or set it to a multiple of the block size that "
        'the log prints; vLLM 0.26 or later: `"blocks_per_chunk": 4`',
        good="the configuration",
    ),
    Problem(
        code="KVD611",
        name="offload-size-missing",
        severity=Severity.CRASH,
        title="OffloadingConnector is not told how much memory it may take.",
        shows=(
            Failed(kind="Exception", text="cpu_bytes_to_use must be specified in kv_connector_extra_config"),
            Failed(kind="Exception", text="num_cpu_blocks must be specified in kv_connector_extra_config"),
        ),
        cause="It has no default, and `num_cpu_blocks` is a setting of vLLM before 0.15.",
        now='`--kv-offloading-size 64` (GiB, instead of a --kv-transfer-config), or `"kv_connector_extra_config":'
        ' {"cpu_bytes_to_use": 68719476736}`',
        good="the configuration",
    ),
    Problem(
        code="KVD612",
        name="offload-hybrid-not-in-this-release",
        severity=Severity.CRASH,
        title="This vLLM's OffloadingConnector cannot hold a model with pages of different sizes.",
        shows=(Failed(kind="AssertionError", source="assert len(page_sizes) == 1"),),
        releases={"vllm": "<0.20"},
        cause="KV groups of a hybrid model have pages of different sizes; the CPU cache has one size.",
        now="without OffloadingConnector for this model, restart",
        fixed={"vllm": "0.20.2"},
    ),
    Problem(
        code="KVD613",
        name="offload-tier-unknown",
        severity=Severity.CRASH,
        title="A tier, spec or policy of the offloading configuration is not known to this vLLM.",
        shows=(
            Failed(kind="ValueError", text="Unknown secondary tier type: <name>"),
            Failed(kind="ValueError", text="Unsupported spec type: <name>"),
            Failed(kind="ValueError", text="Unknown cache policy: <name>"),
            Failed(kind="ValueError", text="Unknown eviction policy: <name>"),
        ),
        sentence="{name}",
        cause="Names differ between releases: the file tier was `fs_python` and is `fs` (with `obj`, `p2p`) now; specs "
        "are CPUOffloadingSpec and TieringOffloadingSpec.",
        now='`"secondary_tiers": [{"type": "fs", "root_dir": "/kvcache"}]` with `"spec_name": '
        '"TieringOffloadingSpec"`; the message lists what this release has',
        good="the configuration",
    ),
    Problem(
        code="KVD614",
        name="offload-platform-unsupported",
        severity=Severity.CRASH,
        title="CPU offloading does not run on this platform.",
        shows=(Failed(kind="Exception", text="CPU Offloading is currently only supported on CUDA-alike"),),
        cause="The copies between GPU and CPU exist for CUDA and ROCm (from 0.26 on also XPU).",
        now='remove OffloadingConnector (--kv-offloading-size); on Ascend vllm-ascend\'s own spec: `"spec_name": '
        '"NPUOffloadingSpec", "spec_module_path": "vllm_ascend.kv_offload.npu"`',
        good="a platform that has the copies",
        threads=(f"{_ASCEND}/6791",),
    ),
    Problem(
        code="KVD1358",
        name="flashinfer-wants-whole-caches",
        severity=Severity.CRASH,
        title="FlashInfer's TRTLLM kernels refuse the caches that vLLM makes for OffloadingConnector.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert is_strictly_contiguous(kv_cache_permute)",
                at="vllm/v1/attention/backends/flashinfer.py",
            ),
        ),
        said=(r"(?i)offload", r"(?i)flashinfer", r"TRITON_ATTN|(?i:gpt-oss)"),
        releases={"vllm": ">=0.15,<0.20"},
        cause="OffloadingConnector asks for the layers of a block side by side (prefer_cross_layer_blocks), so that "
        "one layer's cache has gaps. FlashInfer with TRTLLM attention (Blackwell, gpt-oss) asserts that it has none.",
        now="--attention-backend TRITON_ATTN (or FLASH_ATTN), or no --kv-offloading-size",
        fixed={"vllm": "0.20.2"},
        sure=False,
        threads=("https://github.com/vllm-project/vllm/issues/33572",),
    ),
)
