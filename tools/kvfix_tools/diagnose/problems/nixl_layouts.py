"""NixlConnector: memory and layouts of KV that both sides have to choose alike."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_WORKER = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py"

PROBLEMS = (
    Problem(
        code="KVD590",
        name="nixl-rows-packed-differently",
        severity=Severity.HANG,
        title="Prefill and decode put a block's layers together in other ways, and the handshake is refused.",
        shows=(
            Failed(kind="RuntimeError", text="Packed KV block rows differ between P and D.", at=_WORKER),
            Failed(
                kind="RuntimeError",
                text="Head-sharded draft KV under an MLA target needs the same block-contiguous kv_cache_layout",
                at=_WORKER,
            ),
        ),
        releases={"vllm": ">=0.33"},
        cause="Whole rows are moved, so both sides need the same layout, block size and layers: another "
        "VLLM_KV_CACHE_LAYOUT, another --block-size, or a draft model on one side only.",
        now="`export VLLM_KV_CACHE_LAYOUT=LBHNC` and the same --block-size, --kv-cache-dtype and "
        "--speculative-config on both sides, restart both",
        good="one configuration for both sides but for the sizes of parallelism",
    ),
    Problem(
        code="KVD592",
        name="nixl-buffer-device-not-supported",
        severity=Severity.CRASH,
        title="NixlConnector cannot hold KV on this device, and the worker does not start.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="<device> with <buffer> kv_buffer is not supported.",
                at=_WORKER,
            ),
        ),
        sentence="{device} with buffers on {buffer}",
        releases={"vllm": ">=0.26"},
        cause="`kv_buffer_device` names the memory that NIXL reads: a CUDA or ROCm GPU takes cuda or cpu, an XPU xpu "
        "or cpu, a TPU and a CPU only cpu. Unset it is the device itself, which a TPU cannot. Another platform needs "
        "its plugin.",
        now='`"kv_buffer_device": "cpu"` in --kv-transfer-config, at its top level, on this side',
        good="the configuration",
    ),
)
