"""Options of vLLM around the KV cache that it refuses together: routed experts, types and blocks, fast prefill."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_CONFIG = "vllm/config/vllm.py"

PROBLEMS = (
    Problem(
        code="KVD1536",
        name="routed-experts-refused",
        severity=Severity.CRASH,
        title="--enable-return-routed-experts asks for a set-up that this engine does not have.",
        shows=(
            Failed(text="AuxOutput Connector requires Model Runner V2", at=_CONFIG),
            Failed(text="AuxOutput Connector only supports generate runners.", at=_CONFIG),
            Failed(text="AuxOutput Connector only supports MoE models.", at=_CONFIG),
            Failed(text="AuxOutput Connector requires prefix caching.", at=_CONFIG),
            Failed(text="--enable-return-routed-experts is incompatible with pipeline parallelism", at=_CONFIG),
            Failed(text="--enable-return-routed-experts is incompatible with context parallelism", at=_CONFIG),
            Failed(text="--enable-return-routed-experts is incompatible with adaptive speculative", at=_CONFIG),
            # 0.15 to 0.26.
            Failed(kind="AssertionError", text="enable_return_routed_experts does not support context parallelism"),
        ),
        releases={"vllm": ">=0.32"},
        cause="The experts of each token are kept beside its blocks, by an AuxOutput connector that vLLM adds by "
        "itself. That needs a MoE model that generates, prefix caching, Model Runner V2, and whole layers and blocks "
        "on each rank.",
        now="`export VLLM_USE_V2_MODEL_RUNNER=1`, no --no-enable-prefix-caching, --pipeline-parallel-size 1 and "
        "--decode-context-parallel-size 1; or without --enable-return-routed-experts; restart",
        good="the settings",
    ),
    Problem(
        code="KVD1538",
        name="nvfp4-cache-with-mla",
        severity=Severity.CRASH,
        title="--kv-cache-dtype nvfp4 is refused for a model with MLA.",
        shows=(Failed(text="nvfp4 KV cache is not supported with MLA", at=_CONFIG),),
        releases={"vllm": ">=0.26"},
        cause="The packed layout of nvfp4 divides a head, which the latent cache of MLA does not have. The connector "
        "has no part in it.",
        now="--kv-cache-dtype fp8 or auto, on every engine that shares the cache; restart",
        good="the option; from 0.32 on nvfp4_ds_mla where the attention backend is a sparse MLA one",
    ),
    Problem(
        code="KVD1540",
        name="mamba-block-size-without-prefix-caching",
        severity=Severity.CRASH,
        title="--mamba-block-size is set, and prefix caching is off.",
        shows=(Failed(text="--mamba-block-size can only be set with --enable-prefix-caching", at=_CONFIG),),
        cause="Without prefix caching a request has one state of Mamba, whose block is the whole context.",
        now="--enable-prefix-caching, or leave out --mamba-block-size; restart",
        good="the options",
    ),
    Problem(
        code="KVD1542",
        name="fast-prefill-with-drafts",
        severity=Severity.CRASH,
        title="--kv-sharing-fast-prefill is refused together with drafts of EAGLE or MTP.",
        shows=(Failed(text="Fast prefill optimization for KV sharing is not compatible with EAGLE", at=_CONFIG),),
        cause="The drafter reads the hidden states of every prompt token, which fast prefill does not compute.",
        now="without --kv-sharing-fast-prefill, or without --speculative-config; restart",
        good="the options",
    ),
)
