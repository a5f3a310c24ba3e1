"""NIXL: memory that it does not find, that is not registered, or that it cannot map."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem

_ISSUES = "https://github.com/vllm-project/vllm/issues"
_DYNAMO = "https://github.com/ai-dynamo/dynamo/issues"

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_BASE = f"{_V1}/nixl/base_worker.py"
_OLD = f"{_V1}/nixl_connector.py"
_CONV_SPLIT = "ssm_conv_transfer_utils.py:derive_mamba_conv_split"

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
        code="KVD683",
        name="nixl-caches-of-different-size",
        severity=Severity.CRASH,
        title="This release registers only KV caches of one size, and the model's layers have several.",
        shows=(
            Failed(kind="AssertionError", text="All kv cache tensors must have the same size", at=_OLD),
            Failed(kind="AssertionError", text="All non-MLA kv cache tensors must have the same size", at=_BASE),
        ),
        releases={"vllm": "<0.32"},
        cause="Some layers have other KV heads, another head size or type than the rest: linear or sparse attention "
        "beside full attention, an indexer's cache, or the layers of a draft model. MLA caches are exempt.",
        now="without --speculative-config if the model itself has equal layers; else another connector "
        "(LMCacheConnectorV1) until the upgrade",
        fixed={"vllm": "0.32.0"},
        threads=("https://github.com/vllm-project/vllm/pull/51361",),
    ),
    Problem(
        code="KVD684",
        name="nixl-blocks-not-as-announced",
        severity=Severity.CRASH,
        title="A layer's KV cache has another number of blocks than vLLM announced, and it cannot be registered.",
        shows=(
            Failed(kind="AssertionError", text="All kv cache tensors must have the same number of blocks", at=_OLD),
            Failed(kind="AssertionError", text="KV cache tensor has too few blocks"),
        ),
        sure=False,
        cause="Something beside vLLM allocates or views the cache: kvcached (all memory at once), a platform plugin "
        "that adds a block (Gaudi's did), or a backend with blocks of its own. From 0.26 on the line has "
        "expected_num_blocks and cache_shape: twice as many are smaller blocks of a kernel, one more is a plugin's.",
        now="without kvcached; the release of the plugin that belongs to this vLLM; `--block-size` as the backend's "
        "kernel has it (16 or 64)",
        good="a plugin that fits this vLLM; kvcached issue 311 is open",
        threads=(
            "https://github.com/vllm-project/vllm-gaudi/pull/1138",
            "https://github.com/ovg-project/kvcached/issues/311",
        ),
    ),
    Problem(
        code="KVD685",
        name="nixl-state-of-this-model-unknown",
        severity=Severity.CRASH,
        title="NixlConnector cannot send the recurrent state of this model.",
        shows=(
            Failed(
                kind="NotImplementedError",
                text="3-read conv transfer only supports Mamba2 models, got mamba_type=",
                within=_CONV_SPLIT,
            ),
            Failed(
                kind="NotImplementedError",
                text="Conv transfer only supports Mamba1, Mamba2 and GDN models, got mamba_type=",
                within=_CONV_SPLIT,
            ),
        ),
        releases={"vllm": ">=0.20"},
        cause="It is cut into parts for the ranks of the other side, and that is written for some models only: Mamba2 "
        "up to 0.20, with Mamba1 and gated delta nets (Qwen3-Next, Qwen3.5) from 0.26 on.",
        now="vLLM 0.26 or later for gated delta nets and Mamba1; for other models prefill and decode in one engine",
        good="for gated delta nets and Mamba1 vLLM 0.26.0; for others no release yet",
        threads=(f"{_ISSUES}/41860", f"{_ISSUES}/41886"),
    ),
    Problem(
        code="KVD686",
        name="nixl-buffer-of-this-platform",
        severity=Severity.CRASH,
        title="NixlConnector cannot use this kv_buffer_device on this platform.",
        shows=(
            Failed(kind="RuntimeError", text="<platform> with <device> kv_buffer is not supported.", at=_OLD),
            Failed(kind="RuntimeError", text="<platform> with <device> kv_buffer is not supported.", at=_BASE),
        ),
        sentence="{platform} with a buffer on {device}",
        cause="`kv_buffer_device` names the memory that NIXL reads. CUDA and ROCm have `cuda` and `cpu`, XPU `cpu` "
        "(from 0.20 on also `xpu`), TPU and CPU only `cpu`; another platform needs its plugin. Up to vLLM 0.15 the "
        "default is `cuda` on every platform, from 0.20 on it is the platform itself, which a TPU cannot.",
        now='`"kv_buffer_device": "cpu"` in --kv-transfer-config, at its top level, on both sides',
        good="the same; no release changes that",
        threads=("https://github.com/vllm-project/vllm/pull/18293",),
    ),
    Problem(
        code="KVD687",
        name="ucx-too-many-transports",
        severity=Severity.CRASH,
        title="UCX finds more transports on this node than it has numbers for, and aborts.",
        shows=(Died(text="UCS_BITMAP_BITS_IN_WORD"), Logged("exceeded transports/devices limit (")),
        sure=False,
        cause="With `num_words=2` in the line, while UCX starts: UCX counts each network interface with each protocol "
        "as one resource, and has room for 128. Nodes with many cards and virtual interfaces have more.",
        now="fewer of them: `UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1` (the cards that shall be used, as `ucx_info -d` names "
        "them) or `UCX_TLS=rc,cuda_copy,cuda_ipc`, the same on both sides",
        good="such a UCX_NET_DEVICES in the image",
        threads=("https://github.com/ai-dynamo/nixl/issues/1214", "https://github.com/openucx/ucx/pull/6184"),
    ),
    Problem(
        code="KVD589",
        name="nixl-cannot-map-sizes",
        severity=Severity.CRASH,
        title="Prefill and decode are started so differently that NIXL cannot map their KV onto each other.",
        shows=(
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
    Problem(
        code="KVD372",
        name="ucx-device-queues-refused",
        severity=Severity.CRASH,
        title="UCX could not make queues on the RDMA card for transfers that the GPU starts.",
        shows=(
            Logged("gdaki channel chunk init: create_cq/qp failed"),
            Logged("(name=gdaki_channel_pool) chunk:"),
            Logged("mlx5dv_devx_obj_create(<object>) failed on <device>, syndrome"),
        ),
        sure=False,
        cause="UCX's transport gdaki (rc_gda) makes queues in GPU memory for every channel and endpoint. The card's "
        "firmware refuses more (the syndrome is its reason), or the container may not map them. NIXL then says "
        "NIXL_ERR_BACKEND.",
        now="UCX_TLS=^rc_gda on both engines (or UCX_TLS=rc,cuda_copy,cuda_ipc); several engines on one card: fewer",
        good="a firmware and driver that allow it (NVIDIA names them for DOCA GPUNetIO), or this transport left out",
        threads=("https://github.com/sgl-project/sglang/pull/27894",),
    ),
    Problem(
        code="KVD1556",
        name="nixl-host-buffer-without-memory",
        severity=Severity.CRASH,
        title="There is no host memory for the second KV cache that NixlConnector stages transfers in.",
        shows=(Logged("NIXLConnectorWorker gets <error>."),),
        sentence="{error}",
        releases={"vllm": ">=0.11"},
        cause="With kv_buffer_device cpu each worker makes a tensor in host memory as large as its KV cache on the "
        "device (`GPU KV cache size` of the log times the bytes of a token), all of it at the start.",
        now='`"kv_buffer_device": "cuda"` (xpu: "xpu") in --kv-transfer-config where the device can; else a memory '
        "limit of the container above the sum of the KV caches of its workers, or --num-gpu-blocks-override lower; "
        "restart",
        good="memory for it, or transfers from the device",
    ),
)
