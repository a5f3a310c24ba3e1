"""SimpleCPUOffloadConnector of vLLM: blocks whose bookkeeping went wrong, and what it needs."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_ISSUES = "https://github.com/vllm-project/vllm/issues"

PROBLEMS = (
    Problem(
        code="KVD630",
        name="simple-offload-hash-does-not-fit",
        severity=Severity.CRASH,
        title="A KV group's blocks are smaller than vLLM's hash size, and CPU offloading asserts on the first request.",
        shows=(
            Failed(
                kind="AssertionError",
                within="resolve_block_hashes",
                source="assert block_size % hash_block_size == 0",
                at="vllm/v1/core/kv_cache_utils.py",
            ),
        ),
        releases={"vllm": ">=0.26"},
        cause="The model has a group with small blocks (a window or circular buffer, as DeepSeek V4.1 Flash), which "
        "the connector hashes like the others.",
        now="without SimpleCPUOffloadConnector (or OffloadingConnector) for this model, restart",
        good="no release is known to be right for such a group yet",
        threads=(f"{_ISSUES}/56396",),
    ),
    Problem(
        code="KVD631",
        name="simple-offload-needs-prefix-cache",
        severity=Severity.SLOW,
        title="SimpleCPUOffloadConnector does nothing: prefix caching is off.",
        shows=(
            Logged(
                "Detected prefix caching disabled, disabling CPU offload", at=f"{_V1}/simple_cpu_offload_connector.py"
            ),
        ),
        cause="It keeps blocks by the hashes of vLLM's prefix cache.",
        now="remove `--no-enable-prefix-caching`, restart",
        good="the configuration",
    ),
    Problem(
        code="KVD632",
        name="simple-offload-old-rocm",
        severity=Severity.CRASH,
        title="SimpleCPUOffloadConnector needs a newer ROCm.",
        shows=(Failed(kind="RuntimeError", text="hipMemcpyBatchAsync is unavailable in this ROCm install"),),
        cause="Its copies use hipMemcpyBatchAsync, which ROCm has from 7.1 on.",
        now="OffloadingConnector (--kv-offloading-size) instead, or an image with ROCm 7.1",
        good="ROCm 7.1 or later",
    ),
    Problem(
        code="KVD999",
        name="simple-offload-disk-failed",
        severity=Severity.HANG,
        title="The disk of SimpleCPUOffloadConnector is full or fails, and its thread ends: later loads wait for ever.",
        shows=(
            Failed(kind="OSError", within="_writev_slot", through="simple_kv_offload/disk_backend.py"),
            Failed(kind="OSError", within="_readv_slot", through="simple_kv_offload/disk_backend.py"),
        ),
        releases={"vllm": ">=0.32"},
        cause="With kv_offload_backend `disk` its file takes room only as it is written to, so the disk may fill up "
        "later. The thread catches nothing, and vLLM does not look whether it lives.",
        now="`kvfix run -- CMD` (KVF370: the request computes what was not loaded); a smaller disk_capacity_bytes; "
        "restart",
        good="no release of vLLM up to 0.33.0 is right: keep kvfix (KVF370)",
    ),
    Problem(
        code="KVD1061",
        name="simple-offload-beyond-its-buffer",
        severity=Severity.CRASH,
        title="SimpleCPUOffloadConnector copies a block beyond the end of a worker's CPU buffer.",
        shows=(Died(within="cuda_mem_ops.py:copy_blocks"), Died(within="hipMemcpyBatchAsync")),
        releases={"vllm": ">=0.20,<0.33"},
        sure=False,
        replaces=("KVD383", "KVD623"),
        cause="The scheduler counts the CPU blocks by its own idea of a block's bytes (manager.py 0.32.0:294), each "
        "worker by its own layers (worker.py 0.32.0:162). Where pipeline stages differ in size, or the last has draft "
        "layers, one worker has fewer blocks than are handed out. It is this with --pipeline-parallel-size above 1 or "
        "--speculative-config; 0.33.0 lets the workers agree first.",
        now="`--pipeline-parallel-size 1` and no --speculative-config, or OffloadingConnector (--kv-offloading-size) "
        "in its place; restart",
        fixed={"vllm": "0.33.0"},
        threads=("https://github.com/vllm-project/vllm/pull/52921",),
    ),
    Problem(
        code="KVD634",
        name="simple-offload-hit-gone",
        severity=Severity.CRASH,
        title="Blocks that SimpleCPUOffloadConnector had promised were evicted before it took them.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Expected <promised> hit tokens, got <found>",
                at="vllm/v1/simple_kv_offload/manager.py",
            ),
        ),
        sentence="{promised} tokens were promised, {found} were still there",
        releases={"vllm": "<0.26"},
        cause="Between the lookup and the allocation nothing held the CPU blocks. A store of another request may evict "
        "them: the CPU pool is full. 0.20.2 is so, 0.26.0 holds them.",
        now='a larger "cpu_bytes_to_use" in kv_connector_extra_config makes it rarer; without '
        "SimpleCPUOffloadConnector it is gone",
        fixed={"vllm": "0.26.0"},
        threads=(f"{_ISSUES}/39702",),
    ),
    Problem(
        code="KVD635",
        name="free-blocks-out-of-step",
        severity=Severity.CRASH,
        title="vLLM's list of free GPU blocks is broken: the number of free ones is not that of the list.",
        shows=(
            Failed(
                kind="AssertionError",
                within="popleft_n",
                source="assert curr_block is not None",
                at="vllm/v1/core/kv_cache_utils.py",
            ),
            Failed(
                kind="AssertionError",
                text="prev_free_block of fake_free_list_tail should always exist",
                at="vllm/v1/core/kv_cache_utils.py",
            ),
        ),
        sure=False,
        cause="Which connector ran decides. SimpleCPUOffloadConnector in its eager mode (the default) with sliding "
        "windows: one request holds a block at several places, and it is freed once for each. AscendStore with "
        "asynchronous loads and speculative decoding: it asks for -1 blocks. With neither it is not known.",
        now='SimpleCPUOffloadConnector: "lazy_offload": true beside "cpu_bytes_to_use" in kv_connector_extra_config, '
        "or without it; AscendStore: without --speculative-config. If it stays without a connector, it is vLLM's own",
        good="no release is known to be right: pull 42615 (SimpleCPUOffloadConnector) is open, so is vllm-ascend 14283",
        threads=(
            f"{_ISSUES}/42571",
            f"{_ISSUES}/42085",
            "https://github.com/vllm-project/vllm-ascend/issues/14283",
        ),
    ),
    Problem(
        code="KVD1388",
        name="simple-offload-stored-a-failed-load",
        severity=Severity.CRASH,
        title="SimpleCPUOffloadConnector stored blocks whose load by another connector failed, and EngineCore dies.",
        shows=(
            Failed(
                kind="AssertionError",
                within="simple_kv_offload/manager.py:_process_store_completion",
                source="assert primary_hash is not None",
            ),
        ),
        releases={"vllm": ">=0.32"},
        sure=False,
        cause="A MultiConnector with a second one that loads within the step, as LMCacheConnectorV1 does. Its load "
        "failed (`Failing 1 request(s) due to KV load failure` just before), vLLM took the keys from the blocks, and "
        "the store that began in the same step wants them. Without that line the cause is another.",
        now="kvfix run -- CMD (KVF373), or one of the two connectors alone; restart. `kv_load_failure_policy: "
        "recompute` without the fix does not die, and stores wrong KV",
        good="no release is right yet (0.33.0): keep kvfix (KVF373)",
    ),
    Problem(
        code="KVD549",
        name="simple-offload-hit-not-aligned",
        severity=Severity.CRASH,
        title="A hit of SimpleCPUOffloadConnector is not a multiple of every KV group's block, and EngineCore dies.",
        shows=(
            Failed(
                kind="AssertionError",
                text="num_external_tokens=<tokens> not aligned to group <group> block_size=<block>",
                at="vllm/v1/simple_kv_offload/manager.py",
            ),
        ),
        sentence="a hit of {tokens} tokens, blocks of {block} tokens in group {group}",
        releases={"vllm": ">=0.26,<0.32"},
        cause="A hybrid model's hit is as long as its finest group allows. With decode context parallelism the blocks "
        "of attention groups count for as many times more tokens, and the connector takes whole blocks only.",
        now="`--decode-context-parallel-size 1`, or without SimpleCPUOffloadConnector for this model, restart",
        fixed={"vllm": "0.32.0"},
        threads=("https://github.com/vllm-project/vllm/pull/55168",),
    ),
)
