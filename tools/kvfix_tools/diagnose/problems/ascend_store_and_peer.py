"""vllm-ascend's Mooncake connectors: blocks that prefill, decode and the store count differently."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem, either

_ASCEND = "https://github.com/vllm-project/vllm-ascend/"

PROBLEMS = (
    Problem(
        code="KVD1071",
        name="ascend-layerwise-blocks-of-a-store-hit",
        severity=Severity.CRASH,
        title="Prefill of MooncakeLayerwiseConnector plans to send more blocks than decode has made room for.",
        shows=(Failed(kind="IndexError", text="index out of range", through="mooncake_layerwise_connector.py"),),
        cause="In a MultiConnector the first connector with a hit loads. When that is AscendStoreConnector on decode, "
        "decode makes room for the rest only, and yet offers these blocks to prefill with remote_cached_tokens 0: "
        "prefill counts the whole prompt and runs past the list. Without a store beside it the two sides have other "
        "block sizes or drafts.",
        now="take AscendStoreConnector out of decode's MultiConnector (prefill may keep it), or MooncakeConnectorV1 "
        "with its proxy instead of MooncakeLayerwiseConnector on both sides; restart both",
        good="one way into decode until vllm-ascend's issue 13474 is closed: the peer or the store",
        threads=(_ASCEND + "issues/13474",),
        sure=False,
    ),
    Problem(
        code="KVD1075",
        name="ascend-store-layers-not-found",
        severity=Severity.SLOW,
        title="AscendStoreConnector asks the store for layers of chunks that were never stored.",
        shows=(
            Logged("Failed to get key ['<model>@pcp<pcp>@dcp<dcp>@head_or_tp_rank:<rank>@<hash>@<layer>'"),
            Logged("Failed to get key ['<model>@head_or_tp_rank:<rank>@<hash>@<layer>'"),
        ),
        sentence="layer {layer} of a chunk of {model} is not in the store",
        replaces=("KVD519",),
        cause="With use_layerwise each layer of a chunk has a key of its own. Until vllm-ascend's pull request 8859 "
        "(0.13: 8860, May 2026) it asked for all tokens of the prompt instead of those that the lookup had found.",
        now='"use_layerwise": false in kv_connector_extra_config on every engine, and restart',
        good="vllm-ascend with pull request 8859 (in 0.13: 8860)",
        threads=(_ASCEND + "issues/8858", _ASCEND + "pull/8860"),
        sure=False,
    ),
    Problem(
        code="KVD1083",
        name="ascend-scheduler-of-another-vllm",
        severity=Severity.CRASH,
        title="vllm-ascend's own copy of the scheduler and this vLLM are of different releases.",
        shows=tuple(
            Failed(kind=kind, within=place)
            for kind in ("IndexError", "ValueError", "AttributeError", "TypeError")
            for place in ("vllm_ascend/core/scheduler.py:schedule", "patch_balance_schedule.py:schedule")
        ),
        cause="AscendScheduler and BalanceScheduler repeat vLLM's schedule() and call its KV cache manager as one "
        "release of vLLM has it: other values come back (two where there are three now, an empty list of groups "
        "where there was one).",
        now="vLLM's own scheduler: --additional-config without ascend_scheduler_config and without balance "
        "scheduling (VLLM_ASCEND_BALANCE_SCHEDULING=0), restart; or pip install of the vLLM that this vllm-ascend "
        "names",
        good="vLLM and vllm-ascend of one image (BalanceScheduler in 0.26.0rc: pull request 13357)",
        threads=(_ASCEND + "issues/4207", _ASCEND + "pull/13357"),
        sure=False,
    ),
    Problem(
        code="KVD1344",
        name="ascend-sizes-are-not-the-engines",
        severity=Severity.CRASH,
        title="The sizes that a connector of vllm-ascend is given are not those of the engine.",
        shows=(
            *either("KV transfer '<side>' config has a conflicting data"),
            *either("KV transfer '<side>' config has a conflicting tensor"),
        ),
        cause="vllm-ascend compares (utils.py, check_kv_extra_config): a producer's own `prefill` in "
        "kv_connector_extra_config, a consumer's own `decode`. dp_size must be its --data-parallel-size and tp_size "
        "its --tensor-parallel-size; `Expected 1` means that this process has no --data-parallel-size.",
        now="prefill: {dp_size, tp_size} as --data-parallel-size and --tensor-parallel-size of the prefill engine, "
        "decode as those of decode, the same in both configurations; pods that are engines of their own: dp_size 1",
        good="the two sizes made from one variable in the launch script",
        threads=("https://github.com/vllm-project/vllm-ascend/issues/8345",),
    ),
    Problem(
        code="KVD1346",
        name="heads-looked-for-in-the-outer-configuration",
        severity=Severity.CRASH,
        title="Code looks for the number of KV heads in a multimodal model's outer configuration, where it is not.",
        shows=either("'<model>Config' object has no attribute 'num_key_value_heads'"),
        sentence="{model}Config has no num_key_value_heads",
        cause="A multimodal model has its text model's sizes one level deeper (text_config). The connector, or the "
        "code that calls it, reads hf_config in place of hf_text_config (vllm-ascend 0.12.0rc1: its connectors).",
        now="--hf-overrides '{\"num_key_value_heads\": N}' with N of text_config in the model's config.json, if this "
        "is vllm-ascend; or a newer vllm-ascend of the same vLLM",
        good="code that reads hf_text_config: the last frame names the file",
        sure=False,
        threads=("https://github.com/vllm-project/vllm-ascend/issues/5572",),
    ),
    Problem(
        code="KVD1723",
        name="ascend-decode-has-no-prompt-weights",
        severity=Severity.CRASH,
        title="Decode had to compute a prompt itself, and vllm-ascend had freed the weights for that.",
        shows=(Failed(kind="NotImplementedError", text="Cannot access storage of UndefinedTensorImpl"),),
        sure=False,
        cause="With MLAPO (VLLM_ASCEND_ENABLE_MLAPO=1), kv_role kv_consumer and --max-num-batched-tokens of at most "
        "1024 the weights of fused_qkv_a_proj and q_proj are dropped after the start. A request that was preempted, "
        "whose KV did not come, or that the proxy passes on without remote blocks (`max_completion_tokens` not capped "
        "to 1 at prefill) needs them. Without MLAPO: another tensor that was freed; its frames tell.",
        now="on decode `export VLLM_ASCEND_ENABLE_MLAPO=0`, or where the release has it `--additional-config "
        "'{\"mlapo_keep_prefill_weights\": true}'`; fewer preemptions: a smaller --max-num-seqs; a proxy that sets "
        "max_tokens and max_completion_tokens to 1 at prefill",
        good="a vllm-ascend with that option (pull request 14216), set on decode",
        threads=(
            f"{_ASCEND}issues/11882",
            f"{_ASCEND}issues/13428",
            f"{_ASCEND}issues/6315",
            f"{_ASCEND}pull/14216",
            f"{_ASCEND}pull/17239",
        ),
    ),
    Problem(
        code="KVD1724",
        name="ascend-group-without-kernel-blocks",
        severity=Severity.CRASH,
        title="A KV group of this model has blocks smaller than the kernel's, and Mooncake cannot pair them.",
        shows=(Failed(kind="AssertionError", text="remote_block_size(<size>) not divisible by kernel_size(<kernel>)"),),
        sentence="blocks of {size} tokens on the other side, kernel blocks of {kernel}",
        sure=False,
        cause="GLM-5.3-Flash has a group of 4 tokens for each request (the tail of its compressed indexer), which is "
        "no cache of blocks. The connector of this image divides it like the others. With another model: another "
        "--block-size on the other side.",
        now="GLM-5.3-Flash: an image with vllm-ascend of 17 September 2026 or later (pull request 16755), "
        '`"kv_connector": "MooncakeConnectorV2"` on both sides, at first without AscendStoreConnector; else without '
        "prefill/decode. Other models: the same --block-size on both sides",
        good="the same; the KV pool for this model: pull request 16945, open",
        threads=(
            f"{_ASCEND}issues/17188",
            f"{_ASCEND}pull/16755",
            f"{_ASCEND}pull/16945",
        ),
    ),
    Problem(
        code="KVD1727",
        name="ascend-store-keeps-blocks",
        severity=Severity.LEAK,
        title="AscendStoreConnector keeps the blocks of requests that have ended, until no new one fits.",
        shows=(),
        said=(
            r"AscendStore",
            r"(?i)never freed|not freed|leaks?\b|delay_free|load_async|finished_recving",
            r"(?i)\bhangs?\b|hung|deadlock|stuck|leaks?\b|\u5361\u4f4f",
        ),
        sure=False,
        cause="GPU KV cache usage that stays high with no request running tells it. With `load_async: true` a request "
        "that is aborted while it loads keeps its blocks for ever (each client time-out adds one). Releases before "
        "September 2026 also wait for the report of a store that never comes, when all keys were in the pool already "
        "or the store is layerwise.",
        now='`"load_async": false` in AscendStoreConnector\'s kv_connector_extra_config, client time-outs longer than '
        "the queue; restart the prefill engine that is full",
        good="a vllm-ascend with pull request 16119 (9 September 2026); for aborts during a load 16663, open",
        threads=(
            f"{_ASCEND}issues/10098",
            f"{_ASCEND}issues/15802",
            f"{_ASCEND}issues/16662",
            f"{_ASCEND}pull/16119",
            f"{_ASCEND}pull/16663",
            f"{_ASCEND}pull/10843",
        ),
    ),
)
