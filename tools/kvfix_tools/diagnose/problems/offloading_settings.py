"""Settings of vLLM's own offloading connectors that are refused or ignored."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_SIMPLE = "vllm/distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py"
_SPEC = "vllm/v1/kv_offload/tiering/spec.py"

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
)
