"""OffloadingConnector of vLLM: assertions of its scheduler, and configurations that it refuses."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_OFFLOAD = "vllm/v1/kv_offload"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_PULLS = "https://github.com/vllm-project/vllm/pull"
_ASCEND = "https://github.com/vllm-project/vllm-ascend/issues"
_SCHEDULER = f"{_V1}/offloading/scheduler.py"

PROBLEMS = (
    Problem(
        code="KVD601",
        name="offload-keys-not-hashed-yet",
        severity=Severity.CRASH,
        title="A store of the OffloadingConnector has more or fewer blocks than block hashes, and EngineCore dies.",
        shows=(
            Failed(kind="AssertionError", source="assert len(offload_keys) == len(offload_block_ids)", at=_SCHEDULER),
        ),
        releases={"vllm": ">=0.20,<0.32"},
        cause="Blocks are allocated for tokens whose hashes are not computed yet (speculative decoding, asynchronous "
        "scheduling); or a request was aborted in the queue, which has all its hashes and no blocks (then no draft "
        "model is needed, and `Aborted request(s)` stands before it).",
        now="remove OffloadingConnector (--kv-offloading-size, --kv-transfer-config) and restart; keeping it: no "
        "--speculative-config, and no client that gives up while its request waits (larger --max-num-seqs)",
        fixed={"vllm": "0.32.0"},
        threads=(
            f"{_ISSUES}/55503",
            f"{_ISSUES}/52170",
            f"{_ISSUES}/49118",
            f"{_ISSUES}/51013",
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
        shows=(Failed(kind="Exception", text="cpu_bytes_to_use must be specified in kv_connector_extra_config"),),
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
        releases={"vllm": ">=0.32"},
        cause="With recurrent state (Mamba) vLLM hands over the state at the end of the prompt, beyond the limit that "
        "the request's kv_transfer_params name. Any client that may set them can do it.",
        now="`kvfix run -- CMD` (KVF334); or take the limit out of what your router lets through; restart",
        good="no release of vLLM up to 0.33.0 is right: keep kvfix (KVF334)",
    ),
)
