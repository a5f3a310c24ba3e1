"""NIXL: memory that it does not find, that is not registered."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_ISSUES = "https://github.com/vllm-project/vllm/issues"
_DYNAMO = "https://github.com/ai-dynamo/dynamo/issues"

PROBLEMS = (
    Problem(
        code="KVD564",
        name="nixl-memory-of-another-device",
        severity=Severity.CRASH,
        title="NIXL does not find the KV cache in the memory that it has registered, and the engine does not start.",
        shows=(Failed(kind="nixlNotFoundError", within="register_kv_caches"),),
        releases={"vllm": "<0.11.2"},
        sure=False,
        cause="The descriptors name the rank as the device, and the GPU has another number: tensor or pipeline "
        "parallelism over several nodes. On one node: a nixl that does not fit this vLLM.",
        now="--tensor-parallel-size of at most the GPUs of one node (--data-parallel-size for more), restart",
        fixed={"vllm": "0.11.2"},
        threads=(f"{_DYNAMO}/1519", f"{_ISSUES}/22430"),
    ),
    Problem(
        code="KVD565",
        name="rdma-memory-not-registered",
        severity=Severity.CRASH,
        title="The RDMA card refused memory in a transfer: it is not registered with it.",
        shows=(
            Logged("UCX  ERROR Local protection error on <device>"),
            Logged("UCX  ERROR Remote access error on <device>"),
        ),
        sentence="{device}",
        sure=False,
        cause="Local: this side's memory was not registered, or no longer; Remote: the other side's. The engine there "
        "was restarted or its KV cache is another one than at the handshake; or the card cannot reach GPU memory (no "
        "nvidia_peermem or dma-buf, PCI access control in a virtual machine).",
        now="restart prefill and decode together; `modprobe nvidia_peermem`; for a try without RDMA "
        "`UCX_TLS=tcp,cuda_copy,cuda_ipc` on both sides",
        good="the same nixl on both sides, and GPU memory that the card can reach (`ib_write_bw --use_cuda=0`)",
        threads=(f"{_DYNAMO}/843",),
    ),
)
