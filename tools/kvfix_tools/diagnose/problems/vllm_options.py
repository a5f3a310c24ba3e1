"""Options, sizes of parallelism and platforms that vLLM itself refuses, with or without a connector."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem, Sign

_CONFIG = "vllm/config/vllm.py"
_MODEL = "vllm/config/model.py"


def _refused(*texts: str, at: str) -> tuple[Sign, ...]:
    """These texts, as the check raises them; pydantic names another class where it stands in a configuration."""
    return tuple(Failed(text=text, at=at) for text in texts)


PROBLEMS = (
    Problem(
        code="KVD312",
        name="fewer-mamba-blocks-than-requests",
        severity=Severity.CRASH,
        title="There is memory for fewer Mamba states than --max-num-seqs requests, and vLLM does not start.",
        shows=_refused(
            "max_num_seqs (<requests>) exceeds available Mamba cache blocks (<blocks>)", at="vllm/config/compilation.py"
        ),
        sentence="{requests} requests, {blocks} blocks",
        releases={"vllm": ">=0.20"},
        cause="Each running request of a model with Mamba or GDN layers holds at least one state block, and CUDA "
        "graphs are made for --max-num-seqs of them. Drafts and the mode that connectors need (`align`) take more per "
        "request.",
        now="--max-num-seqs of at most the number of blocks in the message, or a larger --gpu-memory-utilization; "
        "restart",
        good="the settings",
    ),
    Problem(
        code="KVD313",
        name="context-parallel-size-refused",
        severity=Severity.CRASH,
        title="--decode-context-parallel-size (or prefill's) does not fit this model's heads or the other sizes.",
        shows=(
            *_refused(
                "decode context parallel size must less than or equal to (tensor parallel size <tensor> // total",
                "must be greater than total num kv heads <heads> when enable decode context parallel",
                "must be divisible by dcp world size when enable decode context parallel for GQA",
                at="",
            ),
            *_refused(
                "Decode context parallelism for GQA/MQA requires",
                "exceeds the maximum supported value (<most>) for",
                "must be divisible by `--decode-context-parallel-size`",
                at="",
            ),
            *_refused("must be divisible by dcp_size=<size>", "When PCP is enabled, DCP must be disabled", at=""),
        ),
        releases={"vllm": ">=0.11"},
        cause="Decode context parallelism splits what tensor parallelism would keep twice: with GQA it is at most "
        "--tensor-parallel-size divided by the model's KV heads, and it divides --tensor-parallel-size; with MLA (one "
        "KV head) up to --tensor-parallel-size.",
        now="--decode-context-parallel-size of at most tensor parallel size / KV heads (`num_key_value_heads` in the "
        "model's config.json), a divisor of the tensor parallel size; or 1; restart",
        good="the sizes",
    ),
    Problem(
        code="KVD314",
        name="nixl-with-context-parallel",
        severity=Severity.CRASH,
        title="NixlConnector cannot split KV as this decode context parallelism does, and vLLM does not start.",
        shows=_refused(
            "to the NIXL transfer parallel size=<size>",
            "PD with decode_context_parallel_size > 1 is only supported for MLA models",
            at=_CONFIG,
        ),
        releases={"vllm": ">=0.32"},
        cause="The connector maps tensor parallel ranks onto each other. With context parallelism it does so only if "
        "each rank has a part of its own (--decode-context-parallel-size equal to the tensor or prefill context "
        "parallel size), and only for MLA.",
        now="--decode-context-parallel-size 1; with an MLA model also the --tensor-parallel-size itself; on both "
        "sides; restart",
        good="the sizes",
    ),
    Problem(
        code="KVD315",
        name="pipeline-not-for-this-model",
        severity=Severity.CRASH,
        title="This model cannot be split into pipeline stages.",
        shows=_refused("Pipeline parallelism is not supported for this model.", at=_MODEL),
        releases={"vllm": ">=0.15"},
        cause="The model's class in this vLLM does not implement SupportsPP. No connector has part in it.",
        now="--pipeline-parallel-size 1 and a larger --tensor-parallel-size; restart",
        good="a release of vLLM whose model class supports it",
    ),
    Problem(
        code="KVD316",
        name="block-size-without-kernel",
        severity=Severity.CRASH,
        title="No attention backend takes this block size, dtype or layout of the KV cache, and vLLM does not start.",
        shows=(
            Failed(text="kernel blocks, which packed <block>-token KV cache"),
            Failed(text="No common block size for <block>"),
            Failed(kind="ValueError", text="No valid attention backend found for"),
            Failed(kind="AttributeError", text="module 'torch' has no attribute", within="canonicalize_torch_dtype"),
        ),
        releases={"vllm": ">=0.11"},
        cause="`Reasons` in the message says for each backend what it refuses: --kv-cache-dtype (nvfp4 and some fp8 "
        "have kernels for a few GPUs only), head size, block size. Block sizes: all backends of a KV group need a "
        "common divisor, and a layout with layers side by side (BLHNC, which connectors ask for) cannot be split.",
        now="--kv-cache-dtype auto; no --block-size of your own, or the one in the message; without "
        "--attention-backend; a block that cannot be split: VLLM_KV_CACHE_LAYOUT=LBNHC; restart",
        good="the settings",
    ),
    Problem(
        code="KVD317",
        name="connector-cache-not-reset",
        severity=Severity.CRASH,
        title="vLLM was to clear its caches (a pause, sleep or new weights), and the blocks or the connector refused.",
        shows=(
            Failed(kind="RuntimeError", text="Failed to reset the KV connector cache.", at="vllm/v1/engine/core.py"),
        ),
        releases={"vllm": ">=0.32"},
        cause="Blocks are in use: requests run, or transfers of ended requests are in flight; or the connector's "
        "reset_cache answered no (the base class does, and a connector that does not implement it).",
        now="pause with mode=wait, until no request runs, then reset; with clear_cache=False where the connector has "
        "no reset_cache (its KV of the old weights must then be removed by hand, or the store's model name changed)",
        good="a connector with reset_cache",
        sure=False,
    ),
    Problem(
        code="KVD318",
        name="block-sizes-changed-after-start",
        severity=Severity.CRASH,
        title="The KV groups have other block sizes than the worker was made for.",
        shows=(
            Failed(kind="AssertionError", text="block_sizes <made> != kv_cache", within="may_reinitialize_input_batch"),
            Failed(kind="AssertionError", text="Cannot re-initialize the input batch when CPU weight offloading"),
        ),
        cause="A hybrid model (or a draft model) gets block sizes of its own after the worker was set up, which then "
        "is set up again. That is refused with weights on the CPU (--cpu-offload-gb), and where a plugin has its own "
        "worker.",
        now="without --cpu-offload-gb; without --block-size; without the plugin or --speculative-config; restart",
        good="a smaller or quantized model in place of --cpu-offload-gb",
    ),
    Problem(
        code="KVD319",
        name="backend-without-context-parallel",
        severity=Severity.CRASH,
        title="The attention backend cannot do decode context parallelism.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Decode Context Parallelism (DCP) requires attention",
                at="vllm/v1/worker/cp_utils.py",
            ),
            Failed(
                kind="AssertionError",
                text="MTP with cp_kv_cache_interleave_size > 1 is not",
                at="vllm/v1/worker/cp_utils.py",
            ),
        ),
        releases={"vllm": ">=0.20"},
        cause="Partial results of the ranks are merged by their softmax sums, which this backend does not return, or "
        "not for several tokens at once (drafts).",
        now="another --attention-backend (FLASH_ATTN, FLASHMLA, FLASHINFER), or --decode-context-parallel-size 1; with "
        "drafts no --cp-kv-cache-interleave-size; restart",
        good="the settings",
    ),
    Problem(
        code="KVD1544",
        name="cache-memory-released-too-soon",
        severity=Severity.CRASH,
        title="The memory of the KV cache was to be given back while the engine has work or sleeps.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="release_kv_cache_memory() requires a completed pause first",
                at="vllm/v1/engine/core.py",
            ),
            Failed(
                kind="RuntimeError",
                text="release_kv_cache_memory() requires all executor memory to be resident",
                at="vllm/v1/engine/core.py",
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="The first: requests run, or a pause has not ended yet; mode keep leaves them in the queue. The second: "
        "the engine sleeps already, in part or in full.",
        now="in this order: `POST /pause?mode=wait`, wait for its answer, `POST /release_kv_cache_memory`, later "
        "`POST /wake_up`, `POST /resume`; after a sleep `POST /wake_up` first",
        good="the order",
    ),
    Problem(
        code="KVD1546",
        name="pause-waits-in-one-process",
        severity=Severity.CRASH,
        title="An engine in the caller's own process cannot pause with mode wait.",
        shows=(
            Failed(
                kind="ValueError",
                text="'wait' mode can't be used in inproc-engine mode",
                at="vllm/v1/engine/core.py",
            ),
        ),
        releases={"vllm": ">=0.20"},
        cause="VLLM_ENABLE_V1_MULTIPROCESSING is 0: the engine steps only when it is called, so a wait would not end.",
        now="`unset VLLM_ENABLE_V1_MULTIPROCESSING` and restart; or call it when no request is left, with mode abort "
        "or keep",
        good="an engine process of its own",
    ),
    Problem(
        code="KVD1558",
        name="async-scheduling-refused",
        severity=Severity.CRASH,
        title="--async-scheduling is set, and something else of this engine cannot do it.",
        # Not all of them in every release of the range.
        shows=(
            *_refused("Async scheduling is not compatible with ROCm DeepEP high-throughput DBO", at=""),
            *_refused("Async scheduling is not compatible with disable_padded_drafter_batch=True.", at=""),
            *_refused("async scheduling is only supported with EAGLE/MTP/Draft Model", at=""),
            *_refused("does not support async scheduling yet.", at=""),
        ),
        releases={"vllm": ">=0.15"},
        cause="Set by hand it is an error, while by default vLLM turns it off with a warning: for drafts other than "
        "EAGLE, MTP, a draft model or the GPU's n-grams, for some executors, and for a drafter without padded batches. "
        "The message names which.",
        now="take --async-scheduling out (or --no-async-scheduling); restart",
        good="the option left to vLLM",
    ),
    Problem(
        code="KVD1560",
        name="no-room-for-drafts-in-a-step",
        severity=Severity.CRASH,
        title="--max-num-batched-tokens is too small for the slots that the drafts take.",
        shows=_refused(
            "VllmConfig does not have enough slots to schedule a token",
            "VllmConfig received max_num_scheduled_tokens but it does not have enough slots",
            "based on the speculative decoding settings, which does not allow any tokens to be scheduled",
            at="",
        ),
        releases={"vllm": ">=0.20"},
        cause="Some drafters take slots of the step: with parallel drafting num_speculative_tokens - 1, with a draft "
        "model one more; up to 0.26 times --max-num-seqs. They come off --max-num-batched-tokens, and nothing is left.",
        now="--max-num-batched-tokens above --max-num-seqs times (1 + num_speculative_tokens), for instance 8192 more; "
        "or a smaller --max-num-seqs; no --max-num-scheduled-tokens of your own; restart",
        good="the sizes",
    ),
    Problem(
        code="KVD1562",
        name="model-runner-without-this",
        severity=Severity.CRASH,
        title="VLLM_USE_V2_MODEL_RUNNER chooses a model runner that cannot do what the other options ask.",
        shows=_refused(
            "Model Runner V1 does not support: <what>",
            "Model Runner V2 does not yet support: <what>",
            at="",
        ),
        sentence="{what}",
        releases={"vllm": ">=0.26"},
        cause="vLLM picks the runner by the model and the options unless the variable is set. The message names the "
        "option that this runner lacks.",
        now="`unset VLLM_USE_V2_MODEL_RUNNER`; with `V2 does not yet support` and no such variable "
        "`export VLLM_USE_V2_MODEL_RUNNER=0`; or without the option of the message; restart",
        good="the runner that vLLM picks",
    ),
    Problem(
        code="KVD1574",
        name="resume-before-the-pause-ended",
        severity=Severity.RISK,
        title="An engine was to resume while its pause had not ended, and refused.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="resume_scheduler called while pause is still in flight",
                at="vllm/v1/engine/core.py",
            ),
        ),
        releases={"vllm": ">=0.26"},
        cause="With data parallel ranks a pause ends when all of them have come to it; until then a resume would let "
        "one of them run alone. The caller did not wait for the answer of /pause, or has a time limit below it.",
        now="wait for the answer of `POST /pause` (mode=abort is the quickest), then `POST /resume` once more",
        good="the order",
    ),
)
