"""NixlConnector and NixlPushConnector: pairs and layouts that they refuse, and pushes that do not start."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/"
_WORKER = _NIXL + "base_worker.py"
_OLD = "vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py"
_PULL = _NIXL + "pull_worker.py"
_PUSH = _NIXL + "push_worker.py"

PROBLEMS = (
    Problem(
        code="KVD044",
        name="nixl-context-parallel-refused",
        severity=Severity.CRASH,
        title="NixlConnector does not take this kind of context parallelism.",
        shows=(
            Failed(kind="NotImplementedError", text="NixlConnector PCP currently supports kv_producer only"),
            Failed(kind="NotImplementedError", text="NixlConnector PCP+DCP requires TP1 with DCP spanning"),
            Failed(kind="NotImplementedError", text="NixlConnector PCP producers do not support bidirectional"),
            Failed(kind="NotImplementedError", text="Remote NixlConnector PCP+DCP does not span the full PCP group"),
            Failed(kind="NotImplementedError", text="Replicated PCP cannot be paired with a DCP-sharded NIXL peer"),
            Failed(kind="NotImplementedError", text="DCP region pulls require matching logical and physical block"),
            Failed(kind="NotImplementedError", text="Region-mapped pulls with DCP or different logical block sizes"),
        ),
        releases={"vllm": ">=0.32"},
        cause="Prefill context parallelism goes on prefill only (kv_role kv_producer, not kv_both), without "
        "bidirectional_kv_xfer; with decode context parallelism beside it only with tensor parallel size 1 and both "
        "sizes equal.",
        now='"kv_role": "kv_producer" on prefill and "kv_consumer" on decode; --prefill-context-parallel-size 1 on '
        "decode; PCP with DCP: --tensor-parallel-size 1 and both the same size; restart",
        good="such sizes; no release up to 0.33.0 takes more",
    ),
    Problem(
        code="KVD045",
        name="nixl-cache-geometry-refused",
        severity=Severity.HANG,
        title="The KV caches of prefill and decode are cut so differently that NIXL's worker cannot pair them.",
        shows=(
            Failed(text="Different NIXL cache-group layouts are only supported for pure MLA models", at=_PULL),
            Failed(text="Region-mapped NIXL transfers require matching physical block sizes", at=_PULL),
            Failed(text="NixlPushConnector does not support different producer and consumer cache-group", at=_PUSH),
            Failed(text="PLE pages require identical P/D geometry", at=_WORKER),
            Failed(text="Packed MLA page sizes must match for layer", at=_WORKER),
            Failed(kind="NotImplementedError", text="Reading multi-group packed KV rows into per-layer regions"),
            Failed(kind="NotImplementedError", text="NIXL head-sharded draft KV under an MLA target requires"),
            Failed(kind="NotImplementedError", text="NIXL push mode does not support a head-sharded draft"),
            Failed(text="has no layout", within="_align_remote_regions_by_layer"),
            Failed(text="escapes its block", within="_align_remote_regions_by_layer"),
            Failed(text="unpairable SSM state slots", at=_WORKER),
            Failed(text="Remote KV pages do not cover the requested range", at=_WORKER),
        ),
        releases={"vllm": ">=0.32"},
        replaces=("KVD156", "KVD570"),
        cause="They differ in what decides the layout: --block-size, --kv-cache-dtype, --attention-backend, a draft "
        "model, --disable-hybrid-kv-cache-manager, or the vLLM release. The message names what it could not pair.",
        now="the same image and the same of these options on prefill and decode; with other tensor parallel sizes "
        "first try equal ones; restart both",
        good="one configuration for both roles, with only kv_role, ports and parallel sizes apart",
    ),
    Problem(
        code="KVD046",
        name="nixl-prefill-has-more-ranks-than-heads",
        severity=Severity.HANG,
        title="Prefill has more tensor parallel ranks than the model has KV heads, and decode fewer: not supported.",
        shows=(
            Failed(
                kind="AssertionError",
                within="_validate_remote_agent_handshake",
                source="self.transfer_topo.is_kv_replicated(remote_engine_id)",
            ),
            Failed(
                kind="AssertionError", within="_validate_remote_agent_handshake", source="assert not (tp_ratio < 0 and"
            ),
            Failed(
                kind="AssertionError", within="_validate_remote_agent_handshake", source="tp_ratio < 0 and self.kv_topo"
            ),
        ),
        replaces=("KVD156", "KVD570"),
        cause="With more ranks than KV heads prefill keeps each head on several ranks. Decode with a smaller tensor "
        "parallel size would read heads from several of them; vLLM does that only where each is on one (MLA and Mamba "
        "are free of it).",
        now="--tensor-parallel-size of prefill no larger than num_key_value_heads of config.json, or no larger than "
        "decode's; restart prefill",
        good="such sizes; no release up to 0.33.0 takes more",
    ),
    Problem(
        code="KVD047",
        name="nixl-peer-describes-itself-otherwise",
        severity=Severity.HANG,
        title="What the other engine says of its KV cache does not fit this one, and the NIXL handshake asserts.",
        shows=(
            Failed(kind="AssertionError", within="_validate_remote_agent_handshake"),
            Failed(kind="AssertionError", within="base_worker.py:add_remote_agent"),
            Failed(kind="AssertionError", within="nixl/worker.py:add_remote_agent"),
            Failed(kind="AssertionError", within="nixl_connector.py:add_remote_agent"),
        ),
        general=True,
        replaces=("KVD156", "KVD570"),
        cause="Each side compares number and length of the other's memory regions, blocks, groups and heads with its "
        "own. The assertion names what differs: other vLLM releases, --block-size, --kv-cache-dtype, "
        "--attention-backend, a draft model or MTP on one side, another model, or tensor parallel sizes that do not "
        "divide.",
        now="the same image and the same of these options on both sides; first equal --tensor-parallel-size; then "
        "restart both (a failed handshake is not tried again before vLLM 0.15)",
        good="one configuration for both roles, with only kv_role, ports and parallel sizes apart",
        sure=False,
    ),
    Problem(
        code="KVD048",
        name="nixl-push-not-started",
        severity=Severity.HANG,
        title="Decode could not register a request with prefill for a push, or prefill could not push it.",
        shows=(
            Logged("No remote agents for engine <engine>; cannot send registration for <request>", at=_PUSH),
            Logged("Failed to decode PUSH_REG notification payload", at=_PUSH),
            Logged("PUSH_REG notif missing request_id; dropping", at=_PUSH),
            Logged("nixl-push-writer error; continuing", at=_PUSH),
            Logged("No local blocks to push for request <request>", at=_PUSH),
        ),
        releases={"vllm": ">=0.32"},
        sure=False,
        cause="`No remote agents`: the handshake with that prefill failed (its lines come before). `PUSH_REG`: the "
        "two engines are of different vLLM releases, or one runs NixlConnector. `nixl-push-writer error`: the "
        "exception behind it. The request waits until its lease ends.",
        now='"kv_connector": "NixlPushConnector" and one vLLM release on both sides; look at the first handshake '
        "error; restart the side that was restarted last and its peer",
        good="one release and one connector on both sides",
    ),
    Problem(
        code="KVD049",
        name="connectors-count-differently",
        severity=Severity.CRASH,
        title="Connectors below MultiConnector report finished transfers in numbers that do not fit each other.",
        shows=(Failed(kind="ValueError", text="MultiConnector children returned incompatible finished counts"),),
        releases={"vllm": ">=0.32"},
        cause="vLLM counts a transfer as done when so many ranks have reported it; one connector reports from all "
        "ranks, another from some (MLA, context parallelism, several prefills for one decode).",
        now="one connector in place of MultiConnector; or without --prefill-context-parallel-size and "
        "--decode-context-parallel-size where two are needed",
        good="no release up to 0.33.0 combines them",
    ),
    Problem(
        code="KVD050",
        name="connector-hook-without-metadata",
        severity=Severity.CRASH,
        title="A connector's hook was called in a forward pass of no step: warm-up, profiling or graph capture.",
        shows=(
            Failed(
                kind="AssertionError",
                within="base.py:_get_connector_metadata",
                source="assert self._connector_metadata is not None",
            ),
            Failed(kind="AssertionError", within="save_kv_layer", source="assert self._connector_metadata is not None"),
        ),
        cause="vLLM gives a connector its metadata in each step. Layers also call save_kv_layer and "
        "wait_for_layer_load when vLLM runs the model without a step (dummy runs of data parallelism, profiling, "
        "capture), where there is none. Connectors that save layer by layer (P2pNcclConnector, ExampleConnector, "
        "LMCache's layerwise) assert; so may one whose own class forgets bind_connector_metadata.",
        now="`--enforce-eager` for the start (no capture), and without --data-parallel-size on that engine; LMCache: "
        "use_layerwise: false; P2pNcclConnector: NixlConnector in its place; restart",
        good="a connector that does not save by layers, or vLLM 0.26.0 or newer",
        sure=False,
        threads=("https://github.com/vllm-project/vllm/issues/25043",),
    ),
    Problem(
        code="KVD051",
        name="transfer-ended-before-its-request",
        severity=Severity.CRASH,
        title="A connector reports a request's blocks as sent while the request still runs, and EngineCore dies.",
        shows=(
            Failed(kind="AssertionError", within="scheduler.py:_free_blocks", source="assert request.is_finished()"),
        ),
        sure=False,
        cause="NixlConnector before vLLM 0.11.1 counts VLLM_NIXL_ABORT_REQUEST_TIMEOUT from the moment that a step "
        "ends, and gives up blocks of a request that was not finished yet: with a small limit or a slow step. In "
        "later releases: two requests of one id (a router that sends an id again), or a connector of your own that "
        "reports early.",
        now="unset VLLM_NIXL_ABORT_REQUEST_TIMEOUT (480 s by default), or 600; no request ids that come again "
        "(X-Request-Id); restart prefill",
        good="vLLM 0.11.1 or newer, and ids that are never used twice",
        threads=("https://github.com/vllm-project/vllm/pull/26929",),
    ),
    Problem(
        code="KVD059",
        name="nixl-mamba-prefix-cached",
        severity=Severity.CRASH,
        title="A hit of decode's own prefix cache meets a model with Mamba or linear attention, and NIXL asserts.",
        shows=(Failed(kind="AssertionError", text="SSM can only have one local block"),),
        cause="With prefix caching such a model (Nemotron-H, Qwen3-Next and 3.5, Granite 4, Jamba) keeps states of "
        "several places of a prompt, and NIXL's worker takes one state block for granted. It shows with the first "
        "prompt that decode has seen before.",
        now="--no-enable-prefix-caching on decode and on prefill (--mamba-cache-mode none); restart both",
        good="vLLM 0.32 or newer, whose NIXL worker has no such assertion, with --mamba-cache-mode align on both sides",
        threads=("https://github.com/ai-dynamo/dynamo/issues/12197",),
    ),
    Problem(
        code="KVD007",
        name="nixl-agent-of-this-name-changed",
        severity=Severity.HANG,
        title="NIXL knows a peer of this name already, with other connection data.",
        shows=(
            Failed(kind="nixlNotAllowedError", within="add_remote_agent"),
            Failed(kind="nixlNotAllowedError", text="NIXL_ERR_NOT_ALLOWED", within="loadRemoteMD"),
        ),
        sure=False,
        cause="A peer's metadata may be loaded again, but not changed. The peer was restarted under its old agent "
        "name, two peers have one name, or its metadata was read while it still registered memory or backends (many "
        "requests at once).",
        now="restart this engine too; agent names of their own for each process (vLLM draws one at each start; "
        "Dynamo's nixl_connect takes the one that is given); fewer requests at once until then",
        good="the old peer removed (remove_remote_agent) before the new one is added",
        threads=("https://github.com/ai-dynamo/dynamo/issues/2998",),
    ),
    Problem(
        code="KVD1105",
        name="nixl-decode-smaller-than-prefill",
        severity=Severity.HANG,
        title="Decode has a smaller tensor parallel size than prefill, which this NixlConnector does not take.",
        shows=(
            Failed(kind="AssertionError", text="Decode TP cannot be smaller than prefill TP", at=_OLD),
            Failed(kind="AssertionError", source="assert tp_ratio > 0", within="nixl_connector.py:add_remote_agent"),
        ),
        releases={"vllm": "<0.15"},
        replaces=("KVD570",),
        cause="Until vLLM 0.11.2 each decode rank reads a part of one prefill rank's heads; to gather several prefill "
        "ranks into one came later.",
        now="--tensor-parallel-size on decode as large as on prefill, or a multiple of it; restart both",
        good="vLLM 0.15.1 or newer on both sides",
    ),
    Problem(
        code="KVD1107",
        name="block-smaller-than-the-kernel-s",
        severity=Severity.CRASH,
        title="--block-size is smaller than the blocks that the attention kernel works with.",
        shows=(
            Failed(kind="AssertionError", source="assert self.block_size > kernel_block_size", at=_WORKER),
            Failed(
                kind="AssertionError",
                source="assert self.block_size > kernel_block_size",
                at="vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py",
            ),
        ),
        releases={"vllm": ">=0.26"},
        cause="A connector can cut a block of vLLM's into several of the kernel's, not the other way round. FlashMLA "
        "and TRT-LLM's kernels want 32, 64 or 128; the size of the kernel stands in the line `physical kernel block "
        "size` before it.",
        now="no --block-size, or that of the kernel (or a multiple); the same on prefill and decode; restart",
        good="the setting; no release takes it the other way round",
    ),
    Problem(
        code="KVD1093",
        name="nixl-attention-backends-differ",
        severity=Severity.HANG,
        title="Prefill and decode use different attention backends, and NIXL refuses the pair.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert nixl_agent_meta.attn_backend_name == self.backend_name",
                at=_OLD,
            ),
        ),
        releases={"vllm": "<0.15"},
        replaces=("KVD570",),
        cause="Each backend has its own layout of a block. Another GPU, VLLM_ATTENTION_BACKEND, FP8 KV or another "
        "release on one side makes vLLM choose another one.",
        now="VLLM_ATTENTION_BACKEND (the same, FLASH_ATTN say) on both sides, one --kv-cache-dtype; restart both",
        good="the setting in both start scripts",
    ),
)
