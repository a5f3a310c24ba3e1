"""Settings of vLLM's own offloading connectors that are refused, ignored or not kept to."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_SIMPLE = "vllm/distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py"
_SPEC = "vllm/v1/kv_offload/tiering/spec.py"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_PULLS = "https://github.com/vllm-project/vllm/pull"

PROBLEMS = (
    Problem(
        code="KVD599",
        name="simple-offload-disk-settings",
        severity=Severity.CRASH,
        title="SimpleCPUOffloadConnector's disk is not set up whole, and it does not start.",
        shows=(
            Failed(kind="ValueError", text='kv_offload_backend="disk" requires disk_path to be set.', at=_SIMPLE),
            Failed(kind="ValueError", text='kv_offload_backend="disk" requires disk_capacity_bytes > 0.', at=_SIMPLE),
            Failed(kind="ValueError", text="Unknown kv_offload_backend <backend>; expected one of", at=_SIMPLE),
        ),
        releases={"vllm": ">=0.32"},
        cause="The backend is cpu or disk, and disk needs a path and a size.",
        now='`"kv_connector_extra_config": {"kv_offload_backend": "disk", "disk_path": "/mnt/nvme/kv", '
        '"disk_capacity_bytes": 107374182400}`, or without kv_offload_backend',
        good="the configuration",
    ),
    Problem(
        code="KVD616",
        name="simple-offload-disk-ignored",
        severity=Severity.RISK,
        title="SimpleCPUOffloadConnector ignores the disk that is set: its backend is cpu.",
        shows=(Logged('kv_offload_backend is "cpu", ignoring disk-only config: <settings>. Set', at=_SIMPLE),),
        sentence="ignored: {settings}",
        releases={"vllm": ">=0.32"},
        cause="Settings of the disk do not choose it.",
        now='`"kv_offload_backend": "disk"` in kv_connector_extra_config, restart',
        good="the configuration",
    ),
    Problem(
        code="KVD636",
        name="offload-canonical-layout-refused",
        severity=Severity.CRASH,
        title="`canonical_layout` is set, and this model's KV cannot be stored in a form that other sizes of "
        "parallelism can read.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="canonical_layout was requested but the KV cache layout could not be certified",
                at=_SPEC,
            ),
            Failed(kind="RuntimeError", text="canonical_layout could not certify every layer", at=_SPEC),
        ),
        releases={"vllm": ">=0.32"},
        cause="It needs workers that are exactly the tensor parallel group, and layers that are not packed together: "
        "no pipeline or context parallelism, no blocks across layers.",
        now="remove `canonical_layout` from kv_connector_extra_config, restart: what is stored then serves engines of "
        "the same parallelism only",
        good="the configuration",
    ),
    Problem(
        code="KVD637",
        name="offload-store-threshold-with-tiers",
        severity=Severity.CRASH,
        title="`store_threshold` is set with secondary tiers, and the engine does not start.",
        shows=(Failed(kind="ValueError", text="store_threshold is not supported for TieringOffloadingSpec", at=_SPEC),),
        releases={"vllm": ">=0.26"},
        cause="Only CPUOffloadingSpec counts how often a block was asked for before it stores it.",
        now="remove `store_threshold` from kv_connector_extra_config, or `spec_name` and `secondary_tiers`, restart",
        good="the configuration",
    ),
    Problem(
        code="KVD1761",
        name="offload-memory-rounded-up",
        severity=Severity.RISK,
        title="OffloadingConnector takes up to twice the host memory that it was given, and the pod may be killed.",
        shows=(),
        said=(
            r"(?i)kv[-_]offloading[-_]size|OffloadingConnector|CPUOffloadingSpec|kv[- ]?offload",
            r"(?i)power[- ]of[- ](?:two|2)|next_pow2|\b1\.[5-9]\d?\d? ?[x\u00d7]|\btwice\b|\bdouble",
            r"(?i)host memory|pin(?:ned|_memory)|shmem|\bRSS\b|OOM",
        ),
        releases={"vllm": "<0.32"},
        cause="torch rounds each pinned tensor up to the next power of two, and the CPU cache is one tensor for each "
        "KV tensor of each rank (gpu_worker.py 0.26.0:501): N GB cost up to 2 N. SimpleCPUOffloadConnector and "
        "TieringOffloadingSpec pin their memory otherwise.",
        now='`"spec_name": "TieringOffloadingSpec"`, or SimpleCPUOffloadConnector; else a size of which size / ranks / '
        "KV tensors is a power of two, or a little less (192 GiB, not 200, of 4 ranks with 24 tensors)",
        fixed={"vllm": "0.32.0"},
        sure=False,
        threads=(f"{_ISSUES}/53042", f"{_PULLS}/48436", f"{_PULLS}/50094"),
    ),
    Problem(
        code="KVD1767",
        name="offload-waits-for-the-others-load",
        severity=Severity.SLOW,
        title="Requests with the same prefix wait for each other's load from the CPU tier.",
        shows=(),
        said=(
            r"OffloadingConnector|(?i:kv[-_ ]?offload)",
            r"_(?:blocks|chunks)_being_loaded|already being loaded|HIT_PENDING",
        ),
        releases={"vllm": ">=0.20"},
        cause="With vLLM's prefix cache a request of which a chunk is being loaded for another one is put back until "
        "that load has ended (scheduler.py 0.33.0:1038), and one of which a chunk is still being written or fetched "
        "from a tier below waits for that, without a limit of time.",
        now="send one request with a new long prefix before the others with it; fewer at once (--max-num-seqs); "
        "waiting for a tier below: without `secondary_tiers`, or a faster one; `GPU KV cache size` that holds the "
        "shared prefix",
        good="no release changes it yet (0.33.0); pull 44295 was a try",
        sure=False,
        threads=(f"{_ISSUES}/44294", f"{_ISSUES}/49829"),
    ),
)
