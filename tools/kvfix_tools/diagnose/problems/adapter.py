"""LMCacheConnectorV1's adapter in vLLM: requests, releases and devices that it does not expect."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_ADAPTER = "lmcache/integration/vllm/vllm_v1_adapter.py"

PROBLEMS = (
    Problem(
        code="KVD414",
        name="pooling-request",
        severity=Severity.CRASH,
        title="LMCache reads the sampling parameters of a request that has none, and EngineCore dies.",
        shows=(
            Failed(
                kind="AttributeError",
                text="'NoneType' object has no attribute 'extra_args'",
                within="vllm_v1_adapter.py:extract_request_configs",
            ),
        ),
        sentence="the request has no sampling parameters: a pooling, embedding or reranking model",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.14"},
        cause="extract_request_configs reads sampling_params.extra_args, and a request of a pooling model (embedding, "
        "reranker, classifier) has only pooling_params.",
        now="serve the pooling model without --kv-transfer-config, or pip install lmcache==0.4.1",
        fixed={"lmcache": "0.3.14"},
        threads=(_LMCACHE + "issues/2431",),
    ),
    Problem(
        code="KVD415",
        name="layerwise-lists-missing",
        severity=Severity.CRASH,
        title="With use_layerwise a step that stores or loads nothing asks for a list that was never made.",
        shows=(
            Failed(kind="AttributeError", text="'LMCacheConnectorV1Impl' object has no attribute 'layerwise_<what>'"),
        ),
        sentence="there are no layerwise_{what} yet",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.11"},
        cause="Only save_kv_layer makes the list of stores (layerwise_storers), and wait_for_save reads it: where "
        "nothing was stored before, as with a full hit in a remote store, it is not there. Before 0.3.9 the same goes "
        "for layerwise_retrievers and start_load_kv.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), and restart",
        fixed={"lmcache": "0.3.11"},
        threads=("https://github.com/vllm-project/vllm/issues/29840", _LMCACHE + "pull/2194"),
    ),
    Problem(
        code="KVD416",
        name="layerwise-serializer-missing",
        severity=Severity.CRASH,
        title="Layerwise loads use a part of LMCache that only asynchronous loading makes.",
        shows=(Failed(kind="AttributeError", text="'StorageManager' object has no attribute 'async_serializer'"),),
        sentence="the layerwise load has no serializer",
        releases={"lmcache": "<0.3.9"},
        cause="post_init of the storage manager makes the serializer only with enable_async_loading, and "
        "layerwise_batched_get takes it always.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), and restart",
        good="LMCache 0.3.10.post1 or newer (0.3.9 to 0.3.10 assert it: KVD813); LMCache-Ascend needs one built for it",
        threads=(_LMCACHE + "issues/1765", "https://github.com/LMCache/LMCache-Ascend/issues/96"),
    ),
    Problem(
        code="KVD418",
        name="old-nixl-backend",
        severity=Severity.CRASH,
        title="The first NIXL backend of LMCache (enable_nixl) does not go with this lookup or proxy.",
        shows=(
            Failed(kind="NotImplementedError", within="nixl_backend.py:unpin"),
            Failed(kind="AttributeError", text="'NoneType' object has no attribute 'receiver_info'"),
        ),
        sentence="the NIXL backend of LMCache before 0.3.9 fails",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.9"},
        cause="The backend behind enable_nixl has no unpin, which every lookup of LMCache 0.3.2 and newer calls; its "
        "xPyD form takes receiver_info from the request, which only the proxy of examples/disagg_prefill/xpyd sends.",
        now="LMCache 0.3.9 or newer, with enable_pd: true, transfer_channel: nixl and pd_role: sender or receiver in "
        "place of enable_nixl, and the proxy of the same release's examples",
        fixed={"lmcache": "0.3.9"},
        threads=(_LMCACHE + "issues/1084",),
    ),
    Problem(
        code="KVD419",
        name="more-tokens-than-blocks",
        severity=Severity.CRASH,
        title="LMCache counts more tokens of a request than it knows blocks for.",
        shows=(
            Logged("Num tokens: <tokens>, num blocks: <blocks>, block size: <size>", _ADAPTER),
            Logged("The number of tokens is more than the number of blocks", _ADAPTER),
        ),
        connectors=_IN_PROCESS,
        cause="Divide the line's tokens by blocks times block size. About the size of context parallelism (-dcp): each "
        "rank has only its part of the slots. A power of two without it: the model has KV groups with other block "
        "sizes. A little above 1: a load failed, and the adapter kept tokens that vLLM has taken back (KVF008).",
        now="without --decode-context-parallel-size; several KV groups: LMCacheMPConnector; else kvfix run -- CMD",
        good="LMCacheMPConnector of LMCache 0.5.5 or newer for context parallelism and several KV groups; else keep "
        "kvfix (KVF008)",
        sure=False,
        threads=(_LMCACHE + "issues/1732",),
    ),
    Problem(
        code="KVD420",
        name="cuda-connector-elsewhere",
        severity=Severity.CRASH,
        title="LMCache copies KV with its CUDA connector, and the model's KV cache is on another kind of device.",
        shows=(Failed(kind="AssertionError", text="The device should be CUDA."),),
        sentence="the KV cache is not on a CUDA or ROCm device",
        connectors=_IN_PROCESS,
        cause="VLLMPagedMemGPUConnectorV2 and V3 take the addresses of CUDA tensors. On NPU, XPU, HPU or CPU vLLM "
        "another connector has to be chosen, by LMCache's plugin for that device.",
        now="on Ascend the package LMCache-Ascend with its own connector; on XPU a build of LMCache with its XPU "
        "connectors; else without --kv-transfer-config",
        good="LMCache's package for the device; no release of the plain CUDA connector takes others (0.5.6)",
    ),
    Problem(
        code="KVD421",
        name="engine-of-other-settings",
        severity=Severity.CRASH,
        title="A process has an LMCache engine already, of other settings, and cannot make a second.",
        shows=(
            Failed(
                kind="ValueError", text="Instance <name> already exists with a different configuration or metadata."
            ),
        ),
        sentence="{name} is there already, with other settings",
        connectors=_IN_PROCESS,
        cause="A process has one engine of a name. A second LLM(...) in the same process "
        "(VLLM_ENABLE_V1_MULTIPROCESSING=0) with another model, or two LMCacheConnectorV1 in a MultiConnector, asks "
        "for it with other settings.",
        now="one LLM in a process (leave VLLM_ENABLE_V1_MULTIPROCESSING out), or "
        "LMCacheEngineBuilder.destroy('vllm-instance') between two; one LMCacheConnectorV1 in a MultiConnector",
        good="keep it so: no release has two engines of one name (0.5.6)",
        sure=False,
    ),
    Problem(
        code="KVD428",
        name="dynamic-connector-without-role",
        severity=Severity.CRASH,
        title="LMCacheConnectorV1Dynamic takes the KV cache's configuration for its role, and does not start.",
        shows=(
            Failed(
                kind="AttributeError",
                text="'NoneType' object has no attribute 'name'",
                within="lmcache_connector_v1.py:__init__",
            ),
        ),
        said=(
            r"LMCacheConnectorV1Dynamic",
            r"'NoneType' object has no attribute 'name'|\brole (?:is|was|to be|becomes) [`'\"]?None",
        ),
        sentence="the connector has no role",
        releases={"lmcache": "<0.3.14"},
        cause="vLLM 0.13 and newer make a connector with (config, role, kv_cache_config). Builds of LMCache "
        "from source between 0.3.13 and 0.3.14 expect the last two the other way round.",
        now="kv_connector: LMCacheConnectorV1 without kv_connector_module_path, or pip install lmcache==0.4.1",
        fixed={"lmcache": "0.3.14"},
        threads=(_LMCACHE + "issues/2446",),
    ),
    Problem(
        code="KVD437",
        name="cuda-before-the-fork",
        severity=Severity.CRASH,
        title="The process that starts vLLM has used CUDA already, and its forked workers cannot.",
        shows=(
            Failed(kind="RuntimeError", text="Cannot re-initialize CUDA in forked subprocess"),
            Logged("Cannot re-initialize CUDA in forked subprocess"),
        ),
        sentence="CUDA was in use before the fork",
        cause="A script has called torch.cuda, or imported LMCache's kernels, before it made LLM(...) or a "
        "multiprocessing.Process; Linux forks unless something else is set, and a forked process cannot use its "
        "parent's CUDA.",
        now="export VLLM_WORKER_MULTIPROC_METHOD=spawn, multiprocessing.set_start_method('spawn') and "
        "if __name__ == '__main__': in the script; with spawn also export PYTHONHASHSEED=0, or nothing is shared",
        good="the same, in every script that starts vLLM",
        threads=(_LMCACHE + "issues/1710",),
    ),
    Problem(
        code="KVD477",
        name="no-connector-for-this-device",
        severity=Severity.CRASH,
        title="LMCache finds no device that it can copy KV from, and does not start.",
        shows=(
            Failed(kind="RuntimeError", text="No supported connector found for the current platform."),
            Failed(kind="RuntimeError", text="No supported connector found for the current device"),
        ),
        cause="Neither CUDA nor XPU (nor HPU, NPU with their plugins) is available in this process: vLLM runs on the "
        "CPU, the container has no GPU (nvidia-smi), or torch was built without it.",
        now="python -c 'import torch; print(torch.cuda.is_available(), torch.version.cuda)' in this container; docker "
        "run --gpus all; on a CPU leave --kv-transfer-config out",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD478",
        name="scheduled-request-not-known",
        severity=Severity.CRASH,
        title="vLLM schedules a request that LMCache's scheduler side does not know any more.",
        shows=(
            Failed(
                kind="ValueError",
                text="Request <request> is not in _unfinished_requests, but it is scheduled to be cached",
                at="lmcache/integration/vllm/vllm_v1_adapter.py",
            ),
        ),
        sentence="request {request}",
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        cause="It was ended and came back under the same id (a client that sends its own request id twice), or was "
        "preempted or streamed in while its entry was already removed.",
        now="an id of its own for each request (X-Request-Id, request_id); kvfix run -- CMD; more KV memory against "
        "preemption (--gpu-memory-utilization 0.95)",
        good="report it with `kvfix-diagnose LOG --issue FILE.md` if ids are unique",
        sure=False,
    ),
)
