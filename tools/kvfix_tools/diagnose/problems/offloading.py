"""OffloadingConnector of vLLM: assertions of its scheduler and of its worker."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_PULLS = "https://github.com/vllm-project/vllm/pull"
_SCHEDULER = f"{_V1}/offloading/scheduler.py"

PROBLEMS = (
    Problem(
        code="KVD601",
        name="offload-keys-not-hashed-yet",
        severity=Severity.CRASH,
        title="A store of the OffloadingConnector has more or fewer blocks than block hashes, and EngineCore dies.",
        shows=(
            Failed(kind="AssertionError", source="assert len(offload_keys) == len(offload_block_ids)", at=_SCHEDULER),
            Failed(  # of nightly builds of July 2026
                kind="AssertionError",
                within="offloading/scheduler.py:_build_store_jobs",
                source="len(offload_keys) == len(offload_chunk_ids)",
            ),
        ),
        releases={"vllm": ">=0.20,<0.32"},
        cause="Blocks are allocated for tokens whose hashes are not computed yet (speculative decoding, asynchronous "
        "scheduling); or a request was aborted in the queue, or preempted, and has all its hashes and too few blocks: "
        "then no draft model is needed, only many requests at once (`Aborted request(s)` stands before it, or the KV "
        "cache is full).",
        now="remove OffloadingConnector (--kv-offloading-size, --kv-transfer-config) and restart; keeping it: no "
        "--speculative-config, no client that gives up while its request waits (larger --max-num-seqs), and no more "
        "requests at once than the KV cache holds",
        fixed={"vllm": "0.32.0"},
        threads=(
            f"{_ISSUES}/55503",
            f"{_ISSUES}/52170",
            f"{_ISSUES}/49118",
            f"{_ISSUES}/51013",
            "https://github.com/intel/llm-scaler/issues/720",
            f"{_PULLS}/52923",
            f"{_PULLS}/49146",
        ),
    ),
    Problem(
        code="KVD602",
        name="offload-counts-local-hit-short",
        severity=Severity.CRASH,
        title="The OffloadingConnector finds fewer computed blocks than vLLM says there are, and EngineCore dies.",
        shows=(
            Failed(
                kind="AssertionError",
                within="offloading/scheduler.py:update_state_after_alloc",
                source="num_locally_computed_tokens",
                at=_SCHEDULER,
            ),
        ),
        releases={"vllm": ">=0.20,<0.32"},
        cause="It takes the first block without a hash for the end of what is computed. Hybrid models (Mamba, GDN, "
        "sliding window) rightly have blocks without a hash before that; up to 0.25 also a block of one KV group could "
        "be evicted while another group was allocated.",
        now="`--no-enable-prefix-caching`, or without OffloadingConnector (--kv-offloading-size); restart",
        fixed={"vllm": "0.32.0"},
        threads=(
            f"{_ISSUES}/50454",
            f"{_ISSUES}/43884",
            f"{_PULLS}/44409",
        ),
    ),
    Problem(
        code="KVD603",
        name="offload-window-off-by-one",
        severity=Severity.CRASH,
        title="A sliding window that does not begin on a block boundary trips an assertion of the OffloadingConnector.",
        shows=(
            Failed(
                kind="AssertionError",
                within="offloading/scheduler.py:update_state_after_alloc",
                source="num_pending_gpu_blocks",
                at=_SCHEDULER,
            ),
        ),
        releases={"vllm": ">=0.21,<0.32"},
        cause="Such a window touches one block more than its size divided by the block's; the bound allows none. The "
        "data are right, only the assertion is wrong.",
        now="without OffloadingConnector (--kv-offloading-size) for this model, restart; no setting moves the bound",
        fixed={"vllm": "0.32.0"},
        threads=(
            f"{_ISSUES}/48959",
            f"{_PULLS}/49052",
        ),
    ),
    Problem(
        code="KVD604",
        name="offload-load-assertion",
        severity=Severity.CRASH,
        title="An assertion of the OffloadingConnector on blocks to load killed EngineCore.",
        shows=(
            Failed(kind="AssertionError", within="offloading/scheduler.py:update_state_after_alloc", source="assert ("),
        ),
        releases={"vllm": ">=0.20,<0.32"},
        sure=False,
        cause="This Python prints only the first line of the assertion. It is one of two: fewer computed blocks "
        "counted than vLLM says (hybrid models with prefix caching, KVD602), or a sliding window that begins inside a "
        "block (KVD603; DeepSeek V4). vLLM 0.32.0 has both right.",
        now="`--no-enable-prefix-caching`, or without OffloadingConnector (--kv-offloading-size); restart",
        fixed={"vllm": "0.32.0"},
        threads=(
            f"{_ISSUES}/50454",
            f"{_ISSUES}/43884",
            f"{_ISSUES}/48959",
        ),
    ),
    Problem(
        code="KVD605",
        name="offload-load-while-storing",
        severity=Severity.CRASH,
        title="A preempted request came back while its store was in flight, and a load was started too.",
        shows=(Failed(kind="AssertionError", source="assert not req_status.transfer_jobs"),),
        releases={"vllm": ">=0.21,<0.26"},
        cause="The connector allows a request one load or several stores, never both; preemption brings them together.",
        now="so much KV cache that nothing is preempted (`--max-num-seqs` smaller, `--gpu-memory-utilization` larger), "
        "or without OffloadingConnector; restart",
        fixed={"vllm": "0.26.0"},
        threads=(
            f"{_ISSUES}/46014",
            f"{_PULLS}/46231",
        ),
    ),
    Problem(
        code="KVD606",
        name="offload-block-twice-in-job",
        severity=Severity.CRASH,
        title="A transfer holds the same GPU block twice, and EngineCore dies when it takes it off its list again.",
        shows=(Failed(kind="KeyError", within="_remove_pending_job"),),
        releases={"vllm": ">=0.21"},
        cause="Several KV groups share physical blocks (sliding window, MLA with an indexer): one job names a block "
        "once per group, and its entry is removed once per mention.",
        now="without OffloadingConnector (--kv-offloading-size) for this model, restart; SimpleCPUOffloadConnector "
        "keeps no such list",
        good="no release is known to be right: vLLM 0.32.0 has the same lines",
        threads=(
            f"{_ISSUES}/42761",
            "https://github.com/local-inference-lab/vllm/pull/197",
        ),
    ),
    Problem(
        code="KVD607",
        name="offload-full-loses-blocks",
        severity=Severity.CRASH,
        title="The CPU cache was full once, and from then on the OffloadingConnector knows too few of a request's "
        "blocks.",
        shows=(
            Failed(
                kind="IndexError", text="list index out of range", within="offloading_connector.py:_get_reqs_to_store"
            ),
        ),
        said=(
            r"OffloadingConnector|kv[-_]offloading",
            r"(?i)prepare_store\b[^\n]{0,40}fail|cannot store (?:\d+ )?blocks|blocks cannot be allocated",
            r"(?i)crash|fatal|IndexError|out of range",
        ),
        releases={"vllm": "<0.11.2"},
        cause="After `Cannot store N blocks` it left the step without noting the new blocks of the requests behind.",
        now="larger `num_cpu_blocks` in kv_connector_extra_config, or fewer requests at once (--max-num-seqs); restart",
        fixed={"vllm": "0.11.2"},
        threads=(
            f"{_ISSUES}/26329",
            f"{_PULLS}/25856",
        ),
    ),
    Problem(
        code="KVD987",
        name="offload-copy-failed",
        severity=Severity.CRASH,
        title="A copy of the OffloadingConnector has failed, and the worker dies of it.",
        shows=(
            Failed(kind="AssertionError", source="assert transfer_result.success", at=f"{_V1}/offloading/worker.py"),
        ),
        releases={"vllm": ">=0.20"},
        cause="The worker that copies, most often one from outside of vLLM (`spec_module_path`, as for a file system), "
        "reports a copy that failed, and vLLM asserts that there is none. Its own log lines before say why it failed.",
        now="`kvfix run -- CMD` (KVF330, vLLM 0.32 and later: the request computes what was not loaded); or without "
        "OffloadingConnector (--kv-offloading-size, --kv-transfer-config); restart",
        good="no release of vLLM up to 0.33.0 is right: keep kvfix (KVF330)",
        threads=(f"{_ISSUES}/39732", f"{_PULLS}/52838"),
    ),
    Problem(
        code="KVD988",
        name="offload-limit-asserts",
        severity=Severity.CRASH,
        title="A request limits what the OffloadingConnector stores of it, and EngineCore dies.",
        shows=(Failed(kind="AssertionError", source="assert boundary <= max_boundary", at=_SCHEDULER),),
        releases={"vllm": ">=0.27"},
        cause="With recurrent state (Mamba) vLLM hands over the state at the end of the prompt, beyond the limit that "
        "the request's kv_transfer_params name. Any client that may set them can do it.",
        now="`kvfix run -- CMD` (KVF334, vLLM 0.32 and later); or take the limit out of what your router lets "
        "through; restart",
        good="no release of vLLM up to 0.33.0 is right: keep kvfix (KVF334)",
        threads=(f"{_PULLS}/52397",),
    ),
    Problem(
        code="KVD400",
        name="offload-layout-not-recognised",
        severity=Severity.CRASH,
        title="OffloadingConnector does not know how this attention backend lays out the KV cache: it does not start.",
        shows=(
            Failed(kind="AssertionError", within="kv_offload/worker/cpu_gpu.py:__init__"),
            Failed(kind="ValueError", text="is not in tuple", within="kv_offload/worker/cpu_gpu.py:__init__"),
        ),
        releases={"vllm": "<0.20"},
        cause="Up to vLLM 0.19 it finds the blocks in a layer's tensor by trial: keys and values first, or blocks "
        "first, and the kernel's block size at its place. FlashInfer (HND), MLA, models with layers of several shapes "
        "(GPT-OSS, Gemma) and a kernel block smaller than vLLM's do not pass.",
        now="--attention-backend FLASH_ATTN (VLLM_ATTENTION_BACKEND=FLASH_ATTN before 0.15), no --block-size and no "
        "VLLM_KV_CACHE_LAYOUT; else without OffloadingConnector (--kv-offloading-size); restart",
        fixed={"vllm": "0.20.2"},
        sure=False,
    ),
)
