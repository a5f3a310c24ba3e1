"""LMCache layer by layer (`use_layerwise`): loads and stores that fail."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_ENGINE = "lmcache/v1/cache_engine.py"

PROBLEMS = (
    Problem(
        code="KVD805",
        name="layer-evicted-before-load",
        severity=Severity.CRASH,
        title="A layer's chunk is gone when it is to be loaded, and the worker dies.",
        shows=(
            Failed(kind="KeyError", text="LayerCacheEngineKey("),
            Failed(
                kind="KeyError",
                source="self.hot_cache[key]",
                within="local_cpu_backend.py:batched_get_non_blocking",
                through="/cache_engine.py",
            ),
        ),
        said=(r"(?i)lmcache", r"(?i)layer-?wise", r"\bKeyError\b"),
        connectors=_IN_PROCESS,
        cause="With use_layerwise only the first layer of a chunk is looked up; another layer's part was evicted "
        "since, or never stored, and the load takes it from the CPU cache or the disk without asking "
        "(local_cpu_backend.py, batched_get_non_blocking).",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), and restart; blending needs layers: there without "
        "local_disk, and with a max_local_cpu_size that does not evict",
        good="no release of LMCache is right yet (0.5.6): leave use_layerwise at false, or a larger max_local_cpu_size",
        threads=("https://github.com/vllm-project/vllm/pull/37270", _LMCACHE + "issues/1900", _LMCACHE + "issues/1616"),
    ),
    Problem(
        code="KVD807",
        name="layerwise-store-advanced-too-often",
        severity=Severity.CRASH,
        title="Layerwise stores of several requests are in one list, and one is advanced beyond its end.",
        shows=(
            Failed(kind="StopIteration", within="vllm_v1_adapter.py:wait_for_save"),
            Failed(kind="StopIteration", within="vllm_v1_adapter.py:save_kv_layer"),
            # What vLLM's context manager makes of it.
            Failed(kind="RuntimeError", text="generator raised StopIteration", within="_get_kv_connector_output"),
        ),
        said=(
            r"(?is)\A(?!.*(?:freez|frozen|unhealthy)).*StopIteration",
            r"(?i)layer-?wise|save_kv_layer|store_layer|KV save path",
            r"wait_for_save|(?i:exhausted|advanced|async[-_ ]scheduling)",
        ),
        replaces=("KVD1132",),
        sentence="a layerwise store of another request had ended already",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.15"},
        cause="All stores are advanced for each layer and once more at the end; where requests interleave, one of them "
        "has ended. vLLM's own copy of the adapter (use_native: true) does the same in every release.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), and no use_native: true in kv_connector_extra_config",
        fixed={"lmcache": "0.3.15"},
        threads=(_LMCACHE + "issues/2453", _LMCACHE + "issues/1844", _LMCACHE + "pull/2268"),
    ),
    Problem(
        code="KVD808",
        name="layerwise-while-unhealthy",
        severity=Severity.CRASH,
        title="LMCache is unhealthy or frozen, leaves a layerwise load or store out, and the worker dies of it.",
        shows=(
            Failed(kind="StopIteration", within="vllm_v1_adapter.py:wait_for_save"),
            Failed(kind="StopIteration", within="vllm_v1_adapter.py:save_kv_layer"),
            Failed(kind="StopIteration", within="vllm_v1_adapter.py:start_load_kv"),
            Logged("LMCache is unhealthy, skipping store_layer operation", _ENGINE),
            Logged("LMCache is unhealthy, skipping retrieve_layer operation", _ENGINE),
        ),
        said=(r"StopIteration", r"(?:store|retrieve)_layer|(?i:layer-?wise)", r"(?i)freez|frozen|unhealthy|skip"),
        sentence="a layerwise operation was left out, and its caller expects one step a layer",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.15"},
        cause="Where LMCache is unhealthy (a failed start, or a remote store that does not answer its health check) or "
        "frozen, the generator of the operation ends at once; the adapter advances it for every layer: StopIteration.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), and see why LMCache is unhealthy: its first ERROR",
        good="no release of LMCache is right yet (0.5.6): leave use_layerwise at false",
        threads=(_LMCACHE + "issues/4927", _LMCACHE + "pull/4928"),
    ),
    Problem(
        code="KVD809",
        name="layerwise-wants-tensor",
        severity=Severity.CRASH,
        title="The layerwise store demands token ids as a tensor and gets a list.",
        shows=(
            Failed(
                kind="AssertionError",
                within="vllm_v1_adapter.py:save_kv_layer",
                source="assert isinstance(token_ids, torch.Tensor)",
            ),
        ),
        sentence="token ids became a list in this release, and the layerwise store was forgotten",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.9"},
        cause="Token ids became a list in the adapter; the assertion of the layerwise store stayed as it was.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), and restart",
        fixed={"lmcache": "0.3.9"},
        threads=(_LMCACHE + "issues/1150", _LMCACHE + "pull/1517"),
    ),
    Problem(
        code="KVD810",
        name="layerwise-load-finds-nothing",
        severity=Severity.CRASH,
        title="A layerwise load finds none of the chunks that were hit, and the worker dies.",
        shows=(
            Failed(kind="UnboundLocalError", text="mem_obj_consumer", at=_ENGINE),
            Failed(kind="NameError", text="mem_obj_consumer", at=_ENGINE),
        ),
        sentence="all chunks of the hit were gone when they were to be loaded",
        connectors=_IN_PROCESS,
        cause="The chunks were evicted between lookup and load; retrieve_layer then goes on with a variable that is "
        "set only where there is something to load.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), or a larger max_local_cpu_size, and restart",
        good="no release of LMCache is right yet (0.5.6): leave use_layerwise at false",
        threads=(_LMCACHE + "issues/899",),
    ),
    Problem(
        code="KVD811",
        name="layerwise-load-of-two-tiers",
        severity=Severity.CRASH,
        title="The chunks of a layerwise load lie in different tiers, and the worker dies.",
        shows=(
            Failed(
                kind="AssertionError",
                text="All retrieved keys should be from the same location when use layerwise retrieval.",
                at=_ENGINE,
            ),
        ),
        sentence="some chunks of the prompt are in one tier and the rest in another",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.9.post1"},
        cause="A layerwise load takes all its chunks from one tier only; with local_disk or remote_url beside the CPU "
        "cache, older chunks of a prompt are soon only in the other one.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False); or one tier only: no local_disk and no remote_url",
        good="no release of LMCache is right yet (0.5.6): leave use_layerwise at false with more than one tier",
    ),
    Problem(
        code="KVD812",
        name="layerwise-to-remote-store",
        severity=Severity.SLOW,
        title="Chunks of single layers cannot be written to a remote store: nothing is stored there.",
        shows=(
            Logged("Shape dimension should be 4", "lmcache/v1/protocol.py"),
            Failed(kind="AssertionError", text="Shape dimension should be 4", at="lmcache/v1/protocol.py"),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.4.4"},
        cause="With use_layerwise a chunk has three dimensions; the header of remote stores (redis, fs, lm, "
        "mooncakestore) takes four.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), and restart",
        good="LMCache 0.4.4 writes such chunks (protocol.py fills up their shape); use_layerwise: false with a remote "
        "store is what is known to work",
        threads=(
            _LMCACHE + "issues/1150",
            _LMCACHE + "issues/1862",
            _LMCACHE + "issues/2752",
            _LMCACHE + "issues/1762",
        ),
    ),
    Problem(
        code="KVD813",
        name="layerwise-without-serializer",
        severity=Severity.CRASH,
        title="Layerwise loads need the asynchronous lookup server, which was not started.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Async serializer must be initialized via post_init before using layerwise_batched_get.",
                at="lmcache/v1/storage_backend/storage_manager.py",
            ),
        ),
        sentence="the layerwise load has no serializer",
        releases={"lmcache": ">=0.3.9,<0.3.10.post1"},
        cause="In these releases layerwise_batched_get takes a serializer that only enable_async_loading makes.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), and restart",
        fixed={"lmcache": "0.3.10.post1"},
        threads=(_LMCACHE + "issues/1794", _LMCACHE + "issues/1987"),
    ),
    Problem(
        code="KVD1070",
        name="layerwise-chunk-of-other-shape",
        severity=Severity.CRASH,
        title="With use_layerwise a chunk has another number of tokens than the place that it is copied to.",
        shows=tuple(
            Failed(kind="RuntimeError", text=text, within="batched_to_gpu", source="tmp_gpu_buffer_obj.tensor[")
            for text in ("The size of tensor a", "The expanded size of the tensor")
        ),
        sentence="a layer of a chunk does not fit where it is copied to",
        connectors=_IN_PROCESS,
        cause="Only layerwise loads copy with torch, layer by layer, a slice for each chunk. The memory of the "
        "chunk has another shape: it was freed and given to another chunk while it was still used (under load, "
        "or with enable_async_loading), or it was stored with another chunk_size, or before use_layerwise was set.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False) and restart, with an empty local_disk folder and "
        "remote store",
        good="no release of LMCache keeps layerwise chunks safe under load (0.5.6): leave use_layerwise at false",
        sure=False,
        threads=(_LMCACHE + "issues/832", _LMCACHE + "issues/1805"),
    ),
    Problem(
        code="KVD819",
        name="freed-chunk-copied",
        severity=Severity.CRASH,
        title="A layerwise load copies a chunk that was freed already, and the worker dies.",
        shows=(Failed(kind="TypeError", text="copy_(): argument 'other' (position 1) must be Tensor, not NoneType"),),
        sentence="a chunk of the load has no memory any more",
        connectors=_IN_PROCESS,
        replaces=("KVD802",),
        cause="A chunk that was hit had been freed: it was evicted between lookup and load, or released twice. The "
        "line `Trying to access an invalidated MemoryObj` before it says so.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), and restart",
        good="from LMCache 0.3.9 on an assertion stands before the copy; leave use_layerwise at false",
        sure=False,
        threads=(_LMCACHE + "issues/951",),
    ),
    Problem(
        code="KVD370",
        name="layerwise-staging-is-empty",
        severity=Severity.CRASH,
        title="A layer is stored into memory for no tokens.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="must match the size of tensor b (0) at non-singleton dimension",
                within="batched_from_gpu",
            ),
        ),
        cause="With use_layerwise the first releases made the staging tensor for other tokens than those that the step "
        "stores (requests of one batch, or chunked prefill).",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), and restart",
        good="LMCache 0.3.9 or newer if layerwise is needed",
        releases={"lmcache": "<0.3.9"},
        threads=("https://github.com/LMCache/LMCache/issues/817",),
    ),
    Problem(
        code="KVD468",
        name="cachegen-by-layers",
        severity=Severity.CRASH,
        title="CacheGen cannot compress chunks of single layers.",
        shows=(
            Failed(kind="RuntimeError", text="permute(sparse_coo)", within="cachegen_encoder.py:serialize"),
            Failed(kind="RuntimeError", text="is invalid for input of size", within="cachegen_encoder.py:serialize"),
        ),
        connectors=_IN_PROCESS,
        cause="remote_serde: cachegen takes chunks of all layers (four dimensions, five when split into heads), and "
        "use_layerwise or an MLA model hands it others (cachegen_encoder.py 0.5.6:98).",
        now="remote_serde: naive (LMCACHE_REMOTE_SERDE=naive) and use_layerwise: false, in every engine, and restart",
        good="no release of LMCache compresses layers with CacheGen (0.5.6): keep remote_serde: naive",
        threads=(_LMCACHE + "issues/2137",),
    ),
    Problem(
        code="KVD493",
        name="chunk-of-other-format",
        severity=Severity.CRASH,
        title="A loaded chunk is not in the format that the copy to the GPU expects.",
        shows=(
            Failed(kind="AssertionError", source="assert memory_obj.metadata.fmt =="),
            Failed(kind="AssertionError", text="Expected memory format MemoryFormat"),
            Failed(kind="ValueError", text="The memory object should be in KV_"),
        ),
        connectors=_IN_PROCESS,
        cause="Chunks by layers (use_layerwise, blending), of all layers and of MLA models have three formats. A "
        "chunk keeps the one it was stored in: local_disk or a remote store was filled with the other setting, or a "
        "backend that does not keep the format (local_disk before 0.3.9) read it back.",
        now="empty local_disk and the remote store's keys of this model after use_layerwise or enable_blending was "
        "changed; or use_layerwise: false; restart",
        good="a folder or database for each such setting; LMCache 0.3.9 or newer",
        sure=False,
        threads=(_LMCACHE + "issues/683",),
    ),
    Problem(
        code="KVD498",
        name="layerwise-without-staging",
        severity=Severity.CRASH,
        title="Layerwise copies have no buffer on the GPU.",
        shows=(
            Failed(kind="AttributeError", text="has no attribute 'gpu_buffer_allocator'"),
            Failed(kind="AssertionError", source="assert self.gpu_buffer_allocator is not None"),
            Failed(kind="AssertionError", text="GPU buffer allocator should be initialized"),
        ),
        connectors=_IN_PROCESS,
        cause="LMCache before 0.3.9 makes that buffer only with local_cpu: true. Later it is made at the first copy, "
        "in what vLLM has left free on the GPU: a start that failed before that leaves none.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), or local_cpu: true, and restart; else the first "
        "error of this process",
        good="LMCache 0.3.9 or newer; --gpu-memory-utilization 0.85 where it is the memory",
        sure=False,
        threads=(_LMCACHE + "issues/669",),
    ),
    Problem(
        code="KVD1132",
        name="layerwise-step-beyond-its-end",
        severity=Severity.CRASH,
        title="A layerwise load or store of LMCache was stepped on although its copy had ended.",
        shows=(Failed(kind="RuntimeError", text="generator raised StopIteration", through="/lmcache"),),
        sentence="the copy of the layers ended before the steps did",
        connectors=_IN_PROCESS,
        sure=False,
        cause="A generator of LMCache's (store_layer, retrieve_layer) drives another one, of the GPU connector or the "
        "store, one step a layer. They count layers differently (a draft model's beside the model's own, an indexer "
        "cache), or the copy had ended at once, with nothing to load.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False); with CacheBlend, which needs it, "
        "LMCACHE_ENABLE_BLENDING=False too; restart",
        good="the same: no layerwise copies for a model with a draft model or an indexer cache",
    ),
)
