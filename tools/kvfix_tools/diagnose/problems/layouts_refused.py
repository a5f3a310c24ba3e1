"""Tensors that LMCache refuses at registration, or copies wrong."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_THREAD = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_EDITS = "lmcache/integration/vllm/kv_cache_group_edits.py"
_GROUPS = "lmcache/integration/vllm/kv_cache_groups.py"
_ILLEGAL = "an illegal memory access was encountered"

PROBLEMS = (
    Problem(
        code="KVD780",
        name="cache-views-in-one-pool",
        severity=Severity.CRASH,
        title="The layers' caches are views of one pool, which this LMCache does not take.",
        shows=(
            Failed(text="not a supported (dim-0 padding only) layout -- storage_offset != 0"),
            Failed(text="not a supported (dim-0 padding only) layout — storage_offset != 0"),
        ),
        releases={"lmcache": ">=0.4.5,<0.5.1"},
        cause="With speculative decoding (MTP) and several groups vLLM cuts the caches out of one pool; LMCache "
        "refused every view that does not begin at its beginning.",
        now="without --speculative-config, or without LMCache",
        fixed={"lmcache": "0.5.1"},
        threads=(_THREAD + "issues/3821",),
    ),
    Problem(
        code="KVD781",
        name="cache-layout-not-tight",
        severity=Severity.CRASH,
        title="A cache has gaps within its blocks, and LMCache refuses it.",
        shows=(
            Failed(
                kind="ValueError",
                text="tensor is non-contiguous and not a supported (dim-0 padding only) layout -- stride",
            ),
            Failed(
                kind="ValueError",
                text="tensor is non-contiguous and not a supported (dim-0 padding only) layout -- dim",
            ),
            Failed(kind="ValueError", text="tensor is non-contiguous for reasons other than permutation"),
        ),
        cause="Hybrid models (GDN, Mamba) and packed formats (NVFP4) have caches with padding between heads or tokens; "
        "only padding between blocks can be copied. In the server's log the worker sees a timeout of 300 s instead.",
        now="take --kv-transfer-config out for this model, or --kv-cache-dtype auto if it is packed",
        good="LMCache 0.5.6, which takes more of these layouts; not all: issue 4771 is open",
        sure=False,
        threads=(_THREAD + "issues/4771",),
    ),
    Problem(
        code="KVD782",
        name="group-tensor-not-as-expected",
        severity=Severity.CRASH,
        title="A KV group's tensor has another form than LMCache expects of this vLLM.",
        shows=(
            Failed(
                kind="ValueError", text="expected a Mamba [conv_state, ssm_state] tensor list, got <form>", at=_EDITS
            ),
            Failed(kind="ValueError", text="attention KV tensor, got <form>", at=_EDITS),
            Failed(kind="ValueError", text="Mamba conv state must view the page base, got <form>", at=_EDITS),
            Failed(kind="ValueError", text="Mamba conv state per-block stride <form> does not equal"),
            Failed(kind="ValueError", text="kernel-paged attention KV tensor must be <form>"),
            Failed(kind="ValueError", text="logical block size <form> is not a multiple of"),
            Failed(kind="ValueError", text="kernel page count <form> is not a multiple of"),
        ),
        sentence="{form}",
        releases={"lmcache": ">=0.4.7"},
        connectors=("LMCacheMPConnector", "MultiConnector"),
        sure=False,
        cause="vLLM changed how it lays hybrid caches out with nearly every release from 0.23 to 0.32; this LMCache "
        "was made for another one. What decides is which pair it is: LMCache 0.5.6 fits vLLM 0.32.",
        now="the newest LMCache for the newest vLLM: pip install --upgrade --no-deps lmcache==0.5.6 (of this torch and "
        "CUDA), server and workers",
        good="releases of vLLM and LMCache of the same weeks",
        threads=(_THREAD + "pull/4729",),
    ),
    Problem(
        code="KVD783",
        name="group-of-unlike-layers",
        severity=Severity.CRASH,
        title="vLLM has put layers into one KV group that LMCache keeps apart.",
        shows=(
            Failed(
                kind="ValueError",
                text="have different sliding window sizes <sizes>, but they are in the same group",
                at=_GROUPS,
            ),
            Failed(kind="ValueError", text="mix recurrent-state and attention <sizes> in one group"),
        ),
        releases={"lmcache": ">=0.4.7"},
        connectors=("LMCacheMPConnector", "MultiConnector"),
        cause="With --disable-hybrid-kv-cache-manager vLLM makes one group of all layers, whatever their windows.",
        now="without --disable-hybrid-kv-cache-manager",
        good="the hybrid KV cache manager on, which LMCacheMPConnector of 0.4.7 and newer supports",
    ),
    Problem(
        code="KVD784",
        name="cache-structure-unknown",
        severity=Severity.CRASH,
        title="LMCache does not recognise the engine's KV caches.",
        shows=(
            Failed(kind="ValueError", text="unsupported kv_caches structure for <engine>"),
            Failed(kind="ValueError", text="no KV cache detector for serving engine <engine>"),
            Failed(kind="ValueError", text="encountered an empty kv_caches list, <engine>"),
        ),
        releases={"lmcache": ">=0.5.0"},
        cause="No format of this release fits the shape or the nesting of the caches: an attention backend or an "
        "engine that is newer than LMCache.",
        now="another attention backend (--attention-backend FLASH_ATTN; before 0.15 VLLM_ATTENTION_BACKEND=FLASH_ATTN)",
        good="a newer LMCache; report the shapes that the log prints before it",
    ),
    Problem(
        code="KVD785",
        name="chunk-of-another-format",
        severity=Severity.CRASH,
        title="A chunk has the format of MLA and the model has none, or the other way round.",
        shows=(
            Failed(kind="ValueError", text="The memory object should be in KV_MLA_FMT format"),
            Failed(kind="ValueError", text="The memory object should be in KV_2LTD format"),
            Failed(text="The memory object sheould be in KV_MLA_FMT format"),  # LMCache up to 0.3.3
        ),
        connectors=_IN_PROCESS,
        cause="Old releases gave each chunk of an MLA model back as one without MLA, from local_disk before 0.3.0 and "
        "from gds_path up to 0.3.3. Else the chunk was stored by another engine or release under the same key: "
        "another model under the same name, or one with and one without MLA.",
        now="LMCache up to 0.3.3: pip install -U lmcache, or no local_disk and no gds_path for this model. "
        "Newer: empty local_disk or the remote store, and give each model a name of its own (--served-model-name is "
        "not enough: the key has the path of --model)",
        good="LMCache 0.3.9 or newer, and one store for each model",
        sure=False,
        threads=(
            "https://github.com/LMCache/LMCache/issues/722",
            "https://github.com/LMCache/LMCache/issues/1323",
        ),
    ),
    Problem(
        code="KVD786",
        name="layerwise-with-mla",
        severity=Severity.CRASH,
        title="The layerwise mode of this release cannot serve a model with MLA.",
        shows=(Failed(text="layerwise MLA connector is not supported yet"),),
        connectors=_IN_PROCESS,
        cause="LMCache before 0.3.10, and vLLM's own copy of its connector (`use_native: true`) in every release, have "
        "no layerwise copy for MLA.",
        now="LMCACHE_USE_LAYERWISE=False (use_layerwise: false)",
        fixed={"lmcache": "0.3.10"},
    ),
    Problem(
        code="KVD787",
        name="no-copy-for-device",
        severity=Severity.CRASH,
        title="LMCache has no copy for this kind of device.",
        shows=(
            Failed(kind="RuntimeError", text="Unsupported device platform for LMCache engine"),
            Failed(kind="RuntimeError", text="No DeviceSpec registered for accelerator <device>;"),
        ),
        cause="The device that torch reports is not CUDA, ROCm, XPU, HPU or MUSA; or torch sees none (`cpu`): the "
        "driver, the container, or CUDA_VISIBLE_DEVICES hides it.",
        now="python -c 'import torch; print(torch.cuda.is_available(), torch.cuda.device_count())' in the same "
        "environment",
        good="an accelerator that LMCache supports; Ascend: the package lmcache-ascend with its own connector",
    ),
    Problem(
        code="KVD788",
        name="illegal-access-noticed-by-lmcache",
        severity=Severity.CRASH,
        title="An illegal memory access on the GPU was noticed while LMCache waited for a copy.",
        shows=(
            Failed(text=_ILLEGAL, within="lmcache/"),
            Failed(text=_ILLEGAL, within="lmcache_connector.py:wait_for_save"),
            Failed(text=_ILLEGAL, within="lmcache_connector.py:start_load_kv"),
        ),
        sure=False,
        cause="CUDA reports it late: the traceback shows who waited, not who did it. Known causes: torch and "
        "extensions of different CUDA releases; a model with an indexer cache (DeepSeek-V3.2, GLM-5) or mixed block "
        "sizes; decode context parallelism; a faulty GPU (`Xid` in dmesg). CUDA_LAUNCH_BLOCKING=1 names the true "
        "place.",
        now="once with CUDA_LAUNCH_BLOCKING=1, once without --kv-transfer-config, and dmesg | grep Xid: they tell "
        "whose it is",
        good="as the true place says; an indexer cache or mixed block sizes: LMCacheMPConnector",
        threads=(_THREAD + "issues/1422", _THREAD + "issues/2776", _THREAD + "pull/2951"),
    ),
    Problem(
        code="KVD766",
        name="layout-without-kernel",
        severity=Severity.SLOW,
        title="The server's copy kernel does not know this layout of vLLM's KV: nothing is stored.",
        shows=(
            Failed(kind="RuntimeError", text="Unsupported GPUKVFormat: 6"),
            Failed(kind="RuntimeError", text="Unsupported GPUKVFormat: 7"),
        ),
        releases={"lmcache": "<0.4.6"},
        connectors=("LMCacheMPConnector", "MultiConnector"),
        cause="6 and 7 are layouts with the heads before the tokens (HND), which vLLM takes for FlashInfer on "
        "Blackwell. The in-process kernel has them, the server's got them with 0.4.6: each store fails, each load "
        "finds nothing.",
        now="pip install --no-deps lmcache==0.4.6 (of this torch and CUDA) for the server and the workers; or where "
        "the attention backend allows it VLLM_KV_CACHE_LAYOUT=NHD for vLLM",
        fixed={"lmcache": "0.4.6"},
        threads=(_THREAD + "issues/3281",),
    ),
    Problem(
        code="KVD767",
        name="packed-layout-without-kernel",
        severity=Severity.SLOW,
        title="LMCache's copy kernel does not know the layout in which vLLM packs K and V: nothing is stored.",
        shows=(
            Failed(kind="RuntimeError", text="Unsupported GPUKVFormat: 10"),
            Failed(kind="RuntimeError", text="Unsupported EngineKVFormat: 10"),
            Failed(kind="RuntimeError", text="Unsupported EngineKVFormat: 11"),
        ),
        releases={"lmcache": "<0.5.2"},
        cause="From 0.26 on vLLM packs K and V of a head next to each other. LMCache 0.4.7 to 0.5.1 recognise that, "
        "but have no kernel for it.",
        now="pip install --no-deps lmcache==0.5.2 or newer (of this torch and CUDA) for the server and the workers",
        fixed={"lmcache": "0.5.2"},
        threads=(_THREAD + "issues/4111",),
    ),
    Problem(
        code="KVD768",
        name="packed-layout-with-connector-v3",
        severity=Severity.CRASH,
        title="LMCache takes the packed K and V of this vLLM for one plane, and the first whole chunk does not fit.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="The size of tensor a (<here>) must match the size of tensor b (<there>) at non-singleton "
                "dimension 3",
                within="gpu_connectors.py:from_gpu",
            ),
        ),
        sentence="the chunk's rows are {here} wide, the cache's {there}",
        releases={"lmcache": ">=0.5.0"},
        connectors=_IN_PROCESS,
        cause="vLLM 0.26 and newer pack K and V of a head next to each other; with use_gpu_connector_v3 that is seen "
        "at the first store. Without it nothing is seen, and half of the KV goes to wrong places: answers are wrong.",
        now="do not only turn use_gpu_connector_v3 off: LMCacheMPConnector (an lmcache server), or kvfix run -- CMD "
        "(KVF020); empty local_disk and remote stores that were filled so",
        good="no release of LMCacheConnectorV1 is right yet (0.5.6); issue 4463, pulls 4467 and 4887 are open",
        threads=(_THREAD + "issues/4463",),
    ),
    Problem(
        code="KVD769",
        name="pairs-of-caches-on-another-device",
        severity=Severity.CRASH,
        title="The layers' caches are pairs (K, V), as vLLM-Ascend has them, and LMCache's CUDA connector runs.",
        shows=(
            Failed(
                kind="AttributeError",
                text="'tuple' object has no attribute 'device'",
                within="gpu_connector.py:_initialize_pointers",
            ),
            Failed(
                kind="AttributeError",
                text="'tuple' object has no attribute 'device'",
                within="gpu_connectors.py:_initialize_pointers",
            ),
        ),
        connectors=_IN_PROCESS,
        cause="On NVIDIA and ROCm vLLM has one tensor for each layer; other platforms register a pair, which their "
        "own connector has to take.",
        now="Ascend: the package lmcache-ascend of the same LMCache release, which replaces this connector; another "
        "device: without --kv-transfer-config",
        good="lmcache-ascend on Ascend; for other devices no release is known to be right in this mode",
        replaces=("KVD1110",),
        threads=(_THREAD + "issues/2121",),
    ),
    Problem(
        code="KVD765",
        name="padded-blocks-refused",
        severity=Severity.CRASH,
        title="vLLM pads the blocks of this model, and LMCache refuses to copy them in this layout.",
        shows=(
            Failed(
                kind="ValueError",
                text="but engine_kv_format=<format> is not a supported dim-0-padded format",
                at="lmcache/v1/gpu_connector/utils.py",
            ),
            Failed(kind="ValueError", text="but gpu_kv_format=<format> is not a supported dim-0-padded format"),
        ),
        sentence="padded blocks in the format {format}",
        releases={"lmcache": ">=0.5.0"},
        cause="For hybrid models (GDN, Mamba) vLLM makes the pages of all layers equal by padding. LMCache before "
        "0.5.3 takes that in NL_X_NB_BS_HS alone; 0.5.5 also in NL_X_NB_BS_NH_CS and NL_X_NB_NH_BS_CS, 0.5.6 in "
        "NL_X_NB_BS_NH_HS too. The worker only sees that its registration times out after 300 s.",
        now="NL_X_NB_BS_NH_CS, NL_X_NB_NH_BS_CS, NL_X_NB_BS_NH_HS: pip install --no-deps lmcache==0.5.6 (of this "
        "torch and CUDA), server and workers; another format: take --kv-transfer-config out for this model",
        good="LMCache 0.5.6 for these three formats (issue 4771 is still open); no release for the others",
        threads=(_THREAD + "issues/4771",),
    ),
)
