"""NIXL: memory that it does not find, that is not registered."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_ISSUES = "https://github.com/vllm-project/vllm/issues"
_DYNAMO = "https://github.com/ai-dynamo/dynamo/issues"

_BASE = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py"

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
    Problem(
        code="KVD589",
        name="nixl-cannot-map-sizes",
        severity=Severity.CRASH,
        title="Prefill and decode are started so differently that NIXL cannot map their KV onto each other.",
        shows=(
            Failed(kind="AssertionError", text="Heterogeneous block sizes are not supported with host buffer"),
            Failed(kind="RuntimeError", text="Heterogeneous TP head-dimension splitting requires contiguous heads"),
            Failed(kind="AssertionError", text="DCP sizes must divide one another", at=_BASE),
            Failed(kind="AssertionError", text="Hybrid MLA kernel-granularity block lengths must match", at=_BASE),
            Failed(kind="AssertionError", text="NIXL transfer regions must name the same model caches", at=_BASE),
            Failed(kind="AssertionError", text="Remote is missing locally owned layers", at=_BASE),
            Failed(kind="ValueError", text="NixlPushConnector does not support decode_context_parallel_size > 1."),
        ),
        releases={"vllm": ">=0.32"},
        cause="What the message says: other block sizes, tensor or context parallel sizes, attention backends (they "
        "choose the KV layout) or models on the two sides.",
        now="the same --block-size, --tensor-parallel-size, --decode-context-parallel-size, --attention-backend, "
        "--kv-cache-dtype and model on prefill and decode; `kv_buffer_device` left out; restart both",
        good="two sides that are started alike; no release maps these",
    ),
)
