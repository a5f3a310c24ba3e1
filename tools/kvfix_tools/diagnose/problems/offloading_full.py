"""OffloadingConnector of vLLM: a tier that is full or cannot be asked, a copy that fails."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_TIERING = "vllm/v1/kv_offload/tiering"
_PULLS = "https://github.com/vllm-project/vllm/pull"
_ILLEGAL = "an illegal memory access was encountered"

PROBLEMS = (
    Problem(
        code="KVD595",
        name="offload-tier-has-no-room",
        severity=Severity.RISK,
        title="The CPU tier has no room for new KV, and what is computed now is not kept.",
        shows=(Logged("Request <request>: cannot store ", at=f"{_V1}/offloading/scheduler.py"),),
        sentence="request {request}",
        releases={"vllm": ">=0.11.1"},
        sure=False,
        cause="All of the tier is being copied, loaded or written to a tier below, so that nothing can be evicted; or "
        "it is smaller than what one step stores. A few lines under load are normal. If they do not end, the tier is "
        "too small or the one below too slow, and each step tries again for nothing.",
        now="a larger --kv-offloading-size (`cpu_bytes_to_use`, before `num_cpu_blocks`), fewer requests at once "
        "(--max-num-seqs); a faster disk where `secondary_tiers` are set",
        good="a tier that holds the KV of several steps of all requests",
        threads=(f"{_PULLS}/50069",),
    ),
    Problem(
        code="KVD597",
        name="offload-tier-cannot-be-asked",
        severity=Severity.SLOW,
        title="A tier below the CPU cannot be asked what it has, and every lookup in it is a miss.",
        shows=(Logged("batch_lookup failed on tier <tier> for <number> keys: <error>", f"{_TIERING}/async_lookup.py"),),
        sentence="tier {tier}: {error}",
        releases={"vllm": ">=0.26"},
        quotes=True,
        cause="The end of the line is the error: a folder that is gone or not readable, an object store that does not "
        "answer or refuses the key. The engine goes on and computes.",
        now="put right what the error names: `ls` of `root_dir` as the user of the engine; the endpoint and the keys "
        "of the object store",
        good="the same; nothing has to be restarted",
    ),
    Problem(
        code="KVD598",
        name="offload-copy-sees-illegal-access",
        severity=Severity.CRASH,
        title="An illegal memory access on the GPU was noticed in a copy of the OffloadingConnector.",
        shows=(
            Failed(text=_ILLEGAL, within="gpu_worker.py:transfer_async"),
            Failed(text=_ILLEGAL, within="gpu_worker.py:get_finished"),
            Failed(text=_ILLEGAL, within="cpu_gpu.py:transfer_async"),
            Failed(text=_ILLEGAL, within="cpu_gpu.py:get_finished"),
        ),
        sure=False,
        cause="The GPU tells of it at some later call, so it may be the copy's or the model's own. One start without "
        "OffloadingConnector decides. Reported for DeepSeek V4 with vLLM 0.27.1, whose KV groups have blocks of other "
        "sizes.",
        now="without OffloadingConnector (--kv-offloading-size, --kv-transfer-config), restart; if it stays, it is not "
        "the copy: `CUDA_LAUNCH_BLOCKING=1` shows the kernel",
        good="no release is known to be right for that model",
        threads=("https://github.com/vllm-project/vllm/issues/53607",),
    ),
    Problem(
        code="KVD135",
        name="offload-layers-of-other-strides",
        severity=Severity.CRASH,
        title="Layers that share a KV tensor are seen with other strides, and OffloadingConnector does not start.",
        shows=(
            Failed(
                kind="AssertionError",
                within="offloading/worker.py:register_kv_caches",
                source="tensors_per_block[n][0].stride()",
            ),
        ),
        releases={"vllm": ">=0.21,<0.26"},
        cause="For hybrid models (attention with Mamba or GDN layers) the stride is taken from each layer's own view, "
        "not from the block's.",
        now="`SimpleCPUOffloadConnector`, or without OffloadingConnector (--kv-offloading-size); restart",
        fixed={"vllm": "0.26.0"},
        threads=(f"{_PULLS}/46888", f"{_PULLS}/44577"),
    ),
    Problem(
        code="KVD136",
        name="offload-without-mla-layers",
        severity=Severity.CRASH,
        title="OffloadingConnector looks up plain attention layers only, and a model with MLA has none.",
        shows=(
            Failed(
                kind="KeyError",
                within="offloading_connector.py:register_kv_caches",
                source="layers[layer_name].get_attn_backend()",
            ),
            Failed(kind="KeyError", within="offloading_connector.py:<dictcomp>", source="layers[layer_name]"),
        ),
        releases={"vllm": "<0.20"},
        cause="It asks for layers of the class Attention; those of DeepSeek, GLM-5 and Kimi are MLAAttention, and so "
        "are vllm-ascend's. The table that it looks in is empty.",
        now="without OffloadingConnector (--kv-offloading-size) for this model, restart; on NPUs AscendStoreConnector",
        good="vLLM 0.20.2, which takes every layer with a KV cache; on NPUs no release is known to be right",
        threads=("https://github.com/vllm-project/vllm-ascend/issues/7971",),
    ),
    Problem(
        code="KVD141",
        name="offload-group-below-a-hash",
        severity=Severity.CRASH,
        title="A KV group has blocks smaller than vLLM's hashes, and the first request kills EngineCore.",
        shows=(Failed(kind="ValueError", text="Indices for islice() must be", within="update_offload_keys"),),
        cause="An indexer's tail (KpoolTail of GLM-5.3-Flash: 4 tokens a block, 16 a hash) takes part in offloading "
        "and has 4 // 16 = 0 hashes for each chunk, the step of a loop.",
        now="without OffloadingConnector (--kv-offloading-size) for this model, restart",
        good="no release is known to be right: 0.33.0 has the loop; pull requests 55034 and 55035 were closed",
        threads=(f"{_PULLS}/55035", f"{_PULLS}/55034"),
    ),
    Problem(
        code="KVD142",
        name="offload-counts-skipped-blocks",
        severity=Severity.CRASH,
        title="A store counts blocks that have left a sliding window, and EngineCore dies of it.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert sum(group_sizes) == len(block_ids)",
                at="vllm/v1/kv_offload/mediums.py",
            ),
        ),
        releases={"vllm": ">=0.20,<0.26"},
        cause="With a `block_size` of the CPU cache that is several times the GPU's, a chunk can lie half inside the "
        "window. Its outer blocks are skipped, and were counted.",
        now="no `block_size` in kv_connector_extra_config (a chunk is then one GPU block), or without "
        "OffloadingConnector; restart",
        fixed={"vllm": "0.26.0"},
        threads=(f"{_PULLS}/42945",),
    ),
    Problem(
        code="KVD155",
        name="offload-tier-full-in-0-11-0",
        severity=Severity.RISK,
        title="The CPU tier of vLLM 0.11.0 refuses a store; EngineCore may die of it next.",
        shows=(Logged("Cannot store <number> blocks"),),
        sentence="{number} blocks",
        releases={"vllm": "<0.11.1"},
        replaces=("KVD1148",),
        sure=False,
        cause="All blocks of the tier are in use, so that nothing can be evicted. That release then goes on as if the "
        "request's blocks were stored, and a later step fails (pull 27697). The traceback after this line decides.",
        now="a larger `num_cpu_blocks` in kv_connector_extra_config, fewer requests at once (--max-num-seqs), restart",
        good="vLLM 0.26.0 or newer with --kv-offloading-size",
        threads=(f"{_PULLS}/27697",),
    ),
)
