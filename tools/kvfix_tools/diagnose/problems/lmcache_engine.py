"""LMCache's engine and its connectors to the GPU: what they were not given, refuse, or leave out."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_GPU = "lmcache/v1/gpu_connector/gpu_connectors.py"
_EDITS = "lmcache/integration/vllm/kv_cache_group_edits.py"
_MP = "lmcache/integration/vllm/lmcache_mp_connector.py"
_LAUNCHER = "lmcache/integration/vllm/mp_server_launcher.py"
_CONFIG = "lmcache/v1/config.py"
_REPORT = "report it with `kvfix-diagnose LOG --issue FILE.md`"

PROBLEMS = (
    Problem(
        code="KVD093",
        name="mp-cannot-review-pages",
        severity=Severity.CRASH,
        title="LMCacheMPConnector cannot see this model's KV pages as tokens, and the worker does not start.",
        shows=tuple(
            Failed(kind="ValueError", text=text, at=_EDITS)
            for text in (
                "not tile the logical page (<page> bytes)",
                "expected a num-blocks-first KV cache layout; outermost",
                "does not factor into (2, block_size=<block>",
                "cannot tile a <row>-element state row into <block> aligned tokens",
                "MLA cache must have one head slot to re-view",
                "kernel-paged MLA cache must be contiguous to re-view as logical pages",
            )
        ),
        releases={"lmcache": ">=0.5.6"},
        cause="Hybrid models and block sizes that a kernel splits are shown to the server as pages of tokens, cut from "
        "vLLM's memory. Here the pages do not divide one another, or blocks are not the outermost dimension: the "
        "attention backend, --block-size, --kv-cache-dtype or VLLM_KV_CACHE_LAYOUT has laid them out otherwise.",
        now="no --block-size, no VLLM_KV_CACHE_LAYOUT, the default --attention-backend and --kv-cache-dtype; if it "
        "stays: OffloadingConnector (--kv-offloading-size 64) for this model; restart",
        good=_REPORT,
        sure=False,
    ),
    Problem(
        code="KVD094",
        name="mp-options-refused",
        severity=Severity.CRASH,
        title="An option of LMCacheMPConnector in kv_connector_extra_config is not valid.",
        shows=(
            Failed(kind="ValueError", text="lmcache.mp.save_decode_cache must be a boolean", at=_MP),
            *(
                Failed(kind="ValueError", text=text, at=_LAUNCHER)
                for text in (
                    "must be a boolean or boolean string, got <value>",
                    "LMCache MP server port must be",
                    "must be a number, got <value>",
                    "must be positive and finite, got <value>",
                )
            ),
        ),
        releases={"lmcache": ">=0.5.6"},
        cause='JSON has types: true and 5555 are not "true" and "5555 ". Switches are booleans, ports 1 to 65535, '
        "times positive seconds.",
        now='"kv_connector_extra_config": {"lmcache.mp.port": 5555, "lmcache.mp.save_decode_cache": true}, in single '
        "quotes around the whole JSON; restart",
        good="the configuration",
    ),
    Problem(
        code="KVD095",
        name="setting-not-read",
        severity=Severity.RISK,
        title="LMCache could not read a setting from the environment, and goes on without it.",
        shows=(Logged("Failed to parse <name>=<value>: <why>", at=_CONFIG),),
        sentence="{name}={value}: {why}",
        releases={"lmcache": ">=0.5.3"},
        cause="The value is not of the setting's type: sizes are plain numbers of GB (5.0, no unit), lists and "
        "extra_config are JSON with double quotes, switches are true or false. The default holds instead.",
        now="export LMCACHE_MAX_LOCAL_CPU_SIZE=5.0, LMCACHE_EXTRA_CONFIG='{\"key\": 1}', without units and with the "
        "JSON in single quotes (in Kubernetes as a quoted string); restart",
        good="the environment",
    ),
    Problem(
        code="KVD096",
        name="caches-never-registered",
        severity=Severity.CRASH,
        title="LMCache is to copy KV, and nobody has told it where vLLM's KV caches are.",
        shows=(
            Failed(kind="AssertionError", text="kvcaches should be provided in kwargs or initialized beforehand."),
            Failed(kind="ValueError", text="'kvcaches' should be provided in kwargs."),
            Failed(kind="RuntimeError", text="register_kv_caches must be called before"),
        ),
        cause="The caches come by register_kv_caches, or with the first load_kv call. vLLM's own connector class is "
        "older than that (it warns `Please use the latest lmcache connector`), LMCache started late or again in this "
        "process, or a store came before the first forward step.",
        now='"kv_connector": "LMCacheConnectorV1Dynamic" with "kv_connector_module_path": '
        '"lmcache.integration.vllm.lmcache_connector_v1", which comes with LMCache itself; restart',
        good="vLLM 0.15.1 or newer with LMCache 0.4.1 or newer (docs/matrix.json)",
        sure=False,
    ),
    Problem(
        code="KVD097",
        name="layerwise-buffer-full",
        severity=Severity.CRASH,
        title="The layerwise mode's buffer on the GPU has no room for a request, and the worker dies.",
        shows=(Failed(kind="AssertionError", text="Failed to allocate GPU buffer in GPUConnector", at=_GPU),),
        releases={"lmcache": ">=0.5.0"},
        cause="use_layerwise stages the tokens of a load or store in a buffer of as many tokens as it saw first. A "
        "longer request, or several at once, do not fit.",
        now="`use_layerwise: false` (LMCACHE_USE_LAYERWISE=false); keeping it: `--max-num-seqs 1` for the loads at a "
        "time, --max-model-len no longer than the KV cache; restart",
        good="without layerwise; blending (enable_blending), which needs it: fewer requests at once",
        sure=False,
    ),
    Problem(
        code="KVD098",
        name="chunk-format-not-of-the-connector",
        severity=Severity.CRASH,
        title="A chunk has another format than the copy to the GPU was made for, and the worker dies.",
        shows=(
            Failed(kind="AssertionError", source="memory_obj.metadata.fmt == MemoryFormat.", at=_GPU),
            Failed(kind="AssertionError", text="Expected memory format <wanted>,"),
        ),
        releases={"lmcache": ">=0.4.3"},
        cause="Chunks are kept as KV_2LTD (whole), KV_MLA_FMT (MLA) or KV_T2D / KV_2TD (single layers, blended). What "
        "was stored under the same key by another set-up (use_layerwise, enable_blending, MLA on or off) has another.",
        now="empty the store and local_disk (redis-cli FLUSHDB, a new folder or bucket), the same use_layerwise, "
        "enable_blending and serde in every engine that shares them; restart",
        good="one store for each set-up",
        sure=False,
    ),
    Problem(
        code="KVD099",
        name="servers-do-not-hold-the-same",
        severity=Severity.SLOW,
        title="The LMCache servers of one engine hold different numbers of chunks of the same prompt.",
        shows=(
            Logged(
                "LMCache hit mismatch across servers: <counts>",
                at="lmcache/integration/vllm/vllm_multi_process_adapter.py",
            ),
        ),
        sentence="{counts}",
        releases={"lmcache": ">=0.5.0"},
        cause="Each node's server keeps the ranks of its node. One has evicted, lost or not yet stored what the others "
        "have; the smallest number counts, and the rest of the prompt is computed.",
        now="the same --l1-size-gb for each server by ranks of its node, all restarted together",
        good="equal servers; now and then such a line is normal",
        sure=False,
    ),
    Problem(
        code="KVD393",
        name="no-connector-for-the-device",
        severity=Severity.HANG,
        title="LMCache has no GPU connector for this device or these options.",
        shows=(
            Failed(kind="RuntimeError", text="No supported <device> connector found."),
            Failed(kind="RuntimeError", text="Unsupported engine: <device>", at="lmcache/v1/gpu_connector/__init__.py"),
        ),
        sentence="{device}",
        releases={"lmcache": ">=0.4.3"},
        cause="The in-process connector exists for CUDA and ROCm, partly for XPU, HPU and MUSA; use_layerwise and "
        "blending only for CUDA. On a machine without its driver torch calls itself `cpu`.",
        now="without use_layerwise and enable_blending; `python -c 'import torch; print(torch.accelerator"
        ".current_accelerator())'` must name the device; on Ascend the package lmcache-ascend; restart",
        good="a device that LMCache supports",
    ),
    Problem(
        code="KVD394",
        name="worker-ids-out-of-range",
        severity=Severity.CRASH,
        title="lmcache_worker_ids or lookup_server_worker_ids names a rank that this engine does not have.",
        shows=(Failed(kind="AssertionError", source="assert -1 < worker_id < world_size", at=_CONFIG),),
        releases={"lmcache": ">=0.4.3"},
        cause="Ranks are counted from 0 to --tensor-parallel-size times --pipeline-parallel-size less one.",
        now="lookup_server_worker_ids: [0], or without it; restart",
        good="the configuration",
    ),
    Problem(
        code="KVD395",
        name="lazy-offload-out-of-step",
        severity=Severity.CRASH,
        title="The books of lmcache.mp.lazy_offload about stores that wait are broken, and the engine dies.",
        shows=(
            *(
                Failed(text=text, at="lmcache/integration/vllm/lazy_offload_manager.py")
                for text in (
                    "non-contiguous store ops for request",
                    "cache-group count changed within store batch for request",
                    "emitted while a store batch is still in flight",
                    "lazy offload GPU block pool is not bound",
                    "a different GPU block pool is already bound",
                )
            ),
            Failed(text="already has an in-flight store batch", at="lmcache/integration/vllm/lazy_offload_state.py"),
        ),
        releases={"lmcache": ">=0.5.6"},
        cause="Stores are held back until vLLM is about to evict the blocks. A request that was preempted, aborted or "
        "loaded anew has stores that do not follow one another, or the vLLM has no block pool of the expected form.",
        now='take "lmcache.mp.lazy_offload" out of kv_connector_extra_config; restart',
        good="without lazy_offload; " + _REPORT,
        sure=False,
    ),
    Problem(
        code="KVD397",
        name="chunks-too-coarse-for-groups",
        severity=Severity.SLOW,
        title="The KV groups' block sizes have a large common multiple: hits end only every so many tokens.",
        shows=(
            Logged(
                "LMCache resolved a scheduler block of <tokens> tokens from group spans <spans> (<times>x the", at=_MP
            ),
        ),
        sentence="hits end at multiples of {tokens} tokens; groups of {spans}",
        releases={"lmcache": ">=0.5.6"},
        cause="A hit has to end at a block of every KV group, so at a multiple of their least common multiple. Shorter "
        "prompts, or what is beyond the last multiple, are never found.",
        now="no --block-size of your own (vLLM then takes sizes that divide one another), or one that divides the "
        "largest group's; restart",
        good="the block size",
    ),
)
