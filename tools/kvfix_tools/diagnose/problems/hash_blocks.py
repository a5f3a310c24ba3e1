"""Sizes of the blocks that are hashed, beside those of the KV groups."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

PROBLEMS = (
    Problem(
        code="KVD735",
        name="group-smaller-than-hash-block",
        severity=Severity.CRASH,
        title="A KV group of this model has smaller blocks than those that are hashed, and the engine does not start.",
        shows=(
            Failed(
                kind="AssertionError",
                source="group.kv_cache_spec.block_size % hash_block_size == 0",
                through="offloading/",
            ),
            Failed(kind="AssertionError", source="% hash_block_size == 0", through="kv_pool/ascend_store"),
        ),
        sentence="the group's block size is no multiple of the hash's",
        sure=False,
        cause="Each KV group must hold whole hash blocks. Hybrid models (Mamba, GDN, a draft model, sparse attention) "
        "have groups of different block sizes, such as 128 and 768 tokens, and the connector takes the larger one for "
        "the hash. GLM-5.3-Flash has one of 4 tokens (its indexer's tail), which fits none.",
        now="no --block-size of your own, no --speculative-config; if it stays: --no-enable-prefix-caching "
        "(vllm-ascend), or without this connector: SimpleCPUOffloadConnector (vllm-ascend: MooncakeConnectorV2 without "
        "AscendStoreConnector); restart",
        good="the newest vLLM or vllm-ascend: each release takes more models (vllm-ascend pull request 15601; "
        "GLM-5.3-Flash with AscendStoreConnector: 16945, open)",
        threads=(
            "https://github.com/vllm-project/vllm-ascend/pull/15601",
            "https://github.com/vllm-project/vllm-ascend/issues/17245",
            "https://github.com/MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks/issues/57",
        ),
    ),
)
