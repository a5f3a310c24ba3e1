"""OffloadingConnector of vLLM: copies, host memory and native crashes."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_OFFLOAD = "vllm/v1/kv_offload"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_PULLS = "https://github.com/vllm-project/vllm/pull"

PROBLEMS = (
    Problem(
        code="KVD620",
        name="offload-skips-on-wrong-side",
        severity=Severity.CRASH,
        title="A load that begins inside an offloaded block is counted wrong, and the copy asserts.",
        shows=(
            Failed(
                kind="AssertionError",
                within="cpu_gpu.py:transfer_async",
                source="src_sub_block_count == dst_blocks.size",
            ),
            Failed(kind="AssertionError", within="kv_offload/worker/cpu_gpu.py:transfer_async"),
            Logged("Exception in ('CPU', 'GPU') transfer <job>: AssertionError()"),
        ),
        releases={"vllm": "<0.15"},
        cause="The GPU's own prefix hit ends inside a CPU block, which is larger than the GPU's: the blocks to skip "
        "are taken from the wrong side. `assert success` after it is only the echo.",
        now="leave `block_size` (or `cpu_block_size`) out of kv_connector_extra_config, or "
        "`--no-enable-prefix-caching`; restart",
        fixed={"vllm": "0.15.1"},
        threads=(
            f"{_ISSUES}/28950",
            f"{_PULLS}/28951",
        ),
    ),
    Problem(
        code="KVD621",
        name="offload-copy-out-of-range",
        severity=Severity.CRASH,
        title="A copy between GPU and CPU cache was refused by the driver.",
        shows=(
            Failed(kind="RuntimeError", text="cuMemcpyBatchAsync failed at index <index> with error <error>"),
            Logged("cuMemcpyBatchAsync failed at index <index> with error <error>"),
        ),
        said=(
            r"(?i)kv[-_ ]?(?:cache )?offload|OffloadingConnector",
            r"cuMemcpyBatchAsync[`'\"]? (?:failed|fails|returns)\b",
        ),
        sentence="copy {index}: CUDA error {error}",
        sure=False,
        cause="Error 1 (invalid value): an address or size outside of its memory. With a draft model (MTP, EAGLE) and "
        "vLLM before 0.26 its KV group is offloaded with wrong block numbers; fp8 or different page sizes before "
        "0.20.2 too. Else open: with very many copies the driver itself is suspected.",
        now="without OffloadingConnector (--kv-offloading-size), or without --speculative-config; restart",
        good="vLLM 0.20.2 for fp8 or different page sizes, 0.26.0 for draft models; no release is known to be right "
        "for all (vllm#40259 is open)",
        threads=(
            f"{_ISSUES}/40259",
            f"{_ISSUES}/39491",
            f"{_ISSUES}/44780",
        ),
    ),
    Problem(
        code="KVD622",
        name="offload-cpu-cache-too-small",
        severity=Severity.CRASH,
        title="The CPU cache has fewer blocks than are handed out: copies beyond its end crash the worker.",
        shows=(Died(within="swap_blocks"),),
        releases={"vllm": "<0.20"},
        cause="For models with two page sizes in one KV group (Gemma 4, other sliding-window hybrids) the page size is "
        "counted twice, so the workers' buffers are far smaller than the scheduler thinks.",
        now="without OffloadingConnector (--kv-offloading-size) for this model, restart",
        fixed={"vllm": "0.20.2"},
        threads=(
            f"{_ISSUES}/42348",
            f"{_PULLS}/50443",
        ),
    ),
    Problem(
        code="KVD623",
        name="offload-batch-copy-crashes",
        severity=Severity.CRASH,
        title="The batch copy between GPU and CPU cache crashed the worker.",
        shows=(
            Died(within="swap_blocks_batch"),
            Died(within="cuMemcpyBatchAsync"),
        ),
        sure=False,
        cause="With MTP or EAGLE and vLLM before 0.26: the draft's KV group is offloaded with block numbers of another "
        "size. Without a draft model: a batch of tens of thousands of copies (long prompts) in the driver, or MLA with "
        "an indexer; both are open.",
        now="without --speculative-config, or without OffloadingConnector (--kv-offloading-size); restart",
        good="vLLM 0.26.0 if a draft model is in use (of the releases known here); otherwise no release is known to be "
        "right",
        threads=(
            f"{_ISSUES}/44780",
            f"{_PULLS}/44784",
            f"{_ISSUES}/49276",
        ),
    ),
    Problem(
        code="KVD624",
        name="offload-transfer-reported-failed",
        severity=Severity.CRASH,
        title="A copy of the OffloadingConnector failed, and the worker asserts that none does.",
        shows=(
            Failed(kind="AssertionError", within="offloading_connector.py:get_finished", source="assert success"),
            Failed(kind="AssertionError", within="offloading_connector.py:start_kv_transfers", source="assert success"),
            Failed(kind="AssertionError", within="offloading/worker.py:start_kv_transfers", source="assert success"),
            Failed(kind="AssertionError", within="offloading/worker.py:handle_preemptions", source="assert success"),
            Logged("Failed to submit <kind> transfer <job>"),
        ),
        releases={"vllm": ">=0.11"},
        sure=False,
        cause="Failed copies are not handled: the worker dies. Why it failed stands before it: `Exception in ... "
        "transfer`, a CUDA error, or a secondary tier's error.",
        now="look at the first WARNING or ERROR of kv_offload before it; without OffloadingConnector "
        "(--kv-offloading-size) the engine runs",
        good="no release handles a failed copy yet (vLLM 0.33.0 asserts too)",
    ),
    Problem(
        code="KVD625",
        name="offload-shm-too-small",
        severity=Severity.CRASH,
        title="/dev/shm has no room for the CPU cache.",
        shows=(
            Failed(kind="RuntimeError", text="Insufficient space in <path> for CPU KV offload shared region"),
            Failed(kind="RuntimeError", text="Insufficient space in /dev/shm"),  # of which a line was broken
            Failed(kind="OSError", text="[Errno 14] Bad address", within="shared_offload_region.py:__init__"),
            Failed(
                kind="OSError", text="[Errno 12] Cannot allocate memory", within="shared_offload_region.py:__init__"
            ),
            Failed(
                kind="OSError", text="[Errno 28] No space left on device", within="shared_offload_region.py:__init__"
            ),
            Died(within="shared_offload_region.py:__init__"),
        ),
        said=(
            r"/dev/shm",
            r"vllm_offload_|SharedOffloadRegion",
            r"(?i)\bleak|left behind|stale|orphan|not (?:removed|un"
            r"linked)|no (?:space|room)",
        ),
        releases={"vllm": ">=0.20"},
        cause="The CPU cache of all ranks is one file in /dev/shm, of cpu_bytes_to_use (--kv-offloading-size) bytes: a "
        "container has 64 MB there by default. If it worked before: an engine that died leaves "
        "/dev/shm/vllm_offload_*.mmap behind (before vLLM 0.32; with `secondary_tiers` in 0.33.0 too), which also "
        "outlives a restart of the container in its pod, and the next start finds no room.",
        now="no engine runs: rm -f /dev/shm/vllm_offload_*.mmap (Kubernetes: delete the pod). Else `--shm-size` above "
        "the CPU cache (docker; or `--ipc host`), Kubernetes: an emptyDir with medium Memory and a sizeLimit at "
        "/dev/shm, memory limit raised by as much; or a smaller `cpu_bytes_to_use`",
        good="/dev/shm and memory limit larger than the CPU cache; vLLM 0.32.0 checks it at the start and, without "
        "secondary_tiers, leaves no file behind; with them: that `rm` before each start",
        threads=(
            f"{_ISSUES}/52656",
            f"{_ISSUES}/54002",
            f"{_ISSUES}/46949",
            f"{_ISSUES}/57303",
            f"{_PULLS}/50358",
        ),
    ),
    Problem(
        code="KVD626",
        name="offload-old-kernel",
        severity=Severity.CRASH,
        title="The kernel is too old for the way in which this vLLM fills its shared CPU cache.",
        shows=(Failed(kind="OSError", text="[Errno 22] Invalid argument", within="shared_offload_region.py:__init__"),),
        releases={"vllm": ">=0.20,<0.32"},
        cause="MADV_POPULATE_WRITE needs Linux 5.14; the call is not guarded.",
        now="a host with Linux 5.14 or later; on this one SimpleCPUOffloadConnector, which has no shared region",
        fixed={"vllm": "0.32.0"},
        threads=(f"{_ISSUES}/44888",),
    ),
    Problem(
        code="KVD627",
        name="offload-region-not-ready",
        severity=Severity.CRASH,
        title="A worker waited in vain for the shared CPU cache that another worker creates.",
        shows=(
            Failed(
                kind="TimeoutError",
                text="Timed out waiting for mmap file to reach <size> bytes",
                at=f"{_OFFLOAD}/cpu/shared_offload_region.py",
            ),
            Failed(kind="RuntimeError", text="Shared offload region creator failed during initialization"),
        ),
        releases={"vllm": ">=0.20"},
        sure=False,
        cause="The region is a file in /dev/shm, which the ranks of one host share. Ranks on several hosts (--nnodes, "
        "Ray) or in containers with a /dev/shm of their own never see it: no release refuses that yet. On one host the "
        "worker that creates it died (its own error stands before this one: /dev/shm too small, memory limit), or a "
        "file of an engine that crashed before is still there.",
        now="several hosts: SimpleCPUOffloadConnector, or an LMCache server for each host; one host: look for the "
        "first error of the other workers, `rm /dev/shm/vllm_offload_*.mmap` while no engine runs; /dev/shm larger "
        "than the CPU cache",
        good="all ranks of an engine on one host, or a connector without a shared region",
        threads=(f"{_ISSUES}/52656", f"{_ISSUES}/54415"),
    ),
    Problem(
        code="KVD628",
        name="offload-region-not-pinned",
        severity=Severity.RISK,
        title="The CPU cache could not be pinned: copies are slow, and before vLLM 0.32 the worker may die of it "
        "later.",
        shows=(
            Logged("cudaHostRegister failed for rank=<rank> (code=<code>)"),
            Logged("cudaHostRegister failed (code=<code>)", at=f"{_OFFLOAD}/cpu/host_register.py"),
            Failed(
                kind="RuntimeError",
                text="cudaHostRegister failed: <code>",
                through="simple_kv_offload/",
                at="vllm/v1/simple_kv_offload/cuda_mem_ops.py",
            ),
        ),
        sentence="cudaHostRegister answers {code}",
        releases={"vllm": ">=0.20"},
        said=(
            r"cudaHostRegister|pin_mmap_region",
            r"(?i)cpu_bytes_to_use|offload",
            r"(?i)512 ?GiB|\b549\.\d+e9|single (?:registration|call|cudaHostRegister)|error (?:is )?pending",
        ),
        cause="The driver does not pin that much: 512 GiB or more in one call, the memlock limit, or more than the "
        "card can address. Every rank pins the whole region. Before 0.32 the error stays pending, and an unrelated "
        "CUDA call then reports `out of memory` or `invalid argument`.",
        now="`cpu_bytes_to_use` (--kv-offloading-size) below 512 GiB, on AMD below about 128 GB; container with "
        "`--ulimit memlock=-1`",
        good="vLLM 0.32.0, which pins in parts of 64 GiB and clears the error",
        threads=(
            f"{_ISSUES}/51080",
            f"{_PULLS}/51081",
            f"{_ISSUES}/52656",
        ),
    ),
    Problem(
        code="KVD629",
        name="simple-offload-copy-refused",
        severity=Severity.CRASH,
        title="A batch copy of SimpleCPUOffloadConnector was refused by the driver.",
        shows=(
            Failed(kind="RuntimeError", text="cuMemcpyBatchAsync failed: err=<error> failIdx=<index>"),
            Failed(
                kind="RuntimeError",
                text="batch memcpy failed: err=<error> failIdx=<index>",
                at="vllm/v1/simple_kv_offload/cuda_mem_ops.py",
            ),
        ),
        sentence="copy {index}: error {error}",
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="Error 1: an address outside of its memory (a layout that the connector computed wrong); 2 or 700: an "
        "earlier CUDA error that shows here. The thread that copies has ended, so every later load waits for ever.",
        now="`kvfix run -- CMD` (KVF370, vLLM 0.32 and later: the thread goes on); or without "
        "SimpleCPUOffloadConnector; restart; `CUDA_LAUNCH_BLOCKING=1` once shows whether an earlier kernel "
        "is at fault",
        good="no release is known to be right or wrong here: report it with model and --kv-cache-dtype",
    ),
    Problem(
        code="KVD633",
        name="offload-registered-nothing",
        severity=Severity.CRASH,
        title="KV offloading does not know this kind of KV cache.",
        shows=(
            Failed(kind="NotImplementedError", within="offloading/worker.py:register_kv_caches"),
            Failed(kind="ValueError", text="KV offloading found no eligible cache groups"),
        ),
        cause="The model has only caches (or one kind of cache) that the connector has no copy for.",
        now="without OffloadingConnector (--kv-offloading-size) for this model",
        good="no release has it for this cache yet",
    ),
    Problem(
        code="KVD959",
        name="offload-load-finds-block-gone",
        severity=Severity.CRASH,
        title="The OffloadingConnector is to load a block that its CPU cache does not hold any more.",
        shows=(
            Failed(kind="AssertionError", text="Block <key> not found in cache", within="cpu/manager.py:prepare_load"),
            Failed(kind="AssertionError", text="Chunk <key> not found in cache", within="_prepare_load"),
            Failed(kind="AssertionError", text="Chunk <key> not found in cache", within="cpu/manager.py:prepare_load"),
        ),
        sure=False,
        cause="The lookup of this request counted the block as a hit, or took it for one of the hit (several KV "
        "groups: sliding windows, DeepSeek V4, a draft model), and a lookup does not hold it. It comes after days, "
        "once the CPU cache has been full and evicted; EngineCore dies of it. No release says which (0.33.0).",
        now="restart; without OffloadingConnector (--kv-offloading-size) for this model, or with "
        "SimpleCPUOffloadConnector, which takes no blocks by key; a larger cpu_bytes_to_use evicts less and later",
        good="no release is known to be right: the assertion is still there in vLLM 0.33.0",
        threads=("https://github.com/vllm-project/vllm/issues/54914",),
    ),
)
