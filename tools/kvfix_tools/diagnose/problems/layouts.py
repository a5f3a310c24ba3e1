"""KV whose layout LMCache does not expect: hybrid models, MLA with an indexer, draft models, a newer vLLM's layouts."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_THREAD = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_MP = ("LMCacheMPConnector", "MultiConnector")
_EDITS = "lmcache/integration/vllm/kv_cache_group_edits.py"
_WITHOUT = "take --kv-transfer-config out for this model, or "
_TO_MP = (
    "LMCacheMPConnector: lmcache server --l1-size-gb N --eviction-policy LRU, and --kv-transfer-config "
    '\'{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}\''
)

_TOO_MANY = "could not broadcast input array from shape (<caches>,) into shape (<layers>,)"

PROBLEMS = (
    Problem(
        code="KVD770",
        name="more-caches-than-layers",
        severity=Severity.CRASH,
        title="The model has another number of KV caches than LMCache counts layers, and LMCache refuses it.",
        shows=(
            Failed(
                kind="ValueError",
                text=_TOO_MANY,
                within="gpu_connector.py:_initialize_pointers",
            ),
            Failed(
                kind="ValueError",
                text=_TOO_MANY,
                within="gpu_connectors.py:_initialize_pointers",
            ),
            Failed(
                kind="ValueError",
                text=_TOO_MANY,
                within="xpu_connectors.py:_initialize_pointers",
            ),
            Failed(kind="AssertionError", text="Expected <layers> KV cache pointers, got <caches>"),
            Failed(kind="AssertionError", text="Expected <layers> KV caches, got <caches>"),
        ),
        sentence="vLLM has registered {caches} caches, LMCache has room for {layers}",
        said=(
            r"(?i)lmcache",
            r"(?i)\bglm-?5(?:\.[123])?(?![\d.])|deepseek-?v3\.2",
            r"(?i)shape mismatch|broadcast|invalid for input of size",
        ),
        connectors=_IN_PROCESS,
        cause="Twice as many, or a quarter more with `use mla: True`: sparse attention with an indexer cache beside "
        "each layer (DeepSeek-V3.2, GLM-5), or beside some (GLM-5.2, GLM-5.3: 99 for 78). One to three more: a draft "
        "model (EAGLE, MTP) whose layers LMCache did not count. About half: for the draft model it counted all layers "
        "of the model again (GLM-4.7-Flash).",
        now="twice as many or many more: " + _WITHOUT + "LMCacheMPConnector (to leave the indexer's caches out gives "
        "wrong answers); one to three more, or fewer: without --speculative-config",
        good="LMCacheMPConnector, which takes caches of several shapes; no release of LMCacheConnectorV1 does (0.5.6)",
        threads=(
            "https://github.com/LMCache/LMCache/issues/5002",
            _THREAD + "pull/2951",
            _THREAD + "issues/967",
            _THREAD + "issues/2774",
            _THREAD + "issues/3339",
        ),
    ),
    Problem(
        code="KVD771",
        name="indexer-cache-taken-for-kv",
        severity=Severity.CRASH,
        title="A chunk has another shape than the model's KV: the indexer's cache was taken for it.",
        shows=(Failed(kind="RuntimeError", text="shape '[1, <layers>, <chunk>, 132]' is invalid for input of size"),),
        sentence="{layers} layers of 132 bytes each: that is the indexer's cache, not the KV",
        connectors=_IN_PROCESS,
        cause="DeepSeek-V3.2 and GLM-5 keep an indexer cache (132 bytes a token) beside the MLA cache (576), and the "
        "in-process connector takes all caches for one kind.",
        now=_WITHOUT + "LMCacheMPConnector (LMCache 0.4.3 or newer)",
        good="LMCacheMPConnector; no release of LMCacheConnectorV1 is right yet (0.5.6)",
        threads=(_THREAD + "issues/2881", _THREAD + "pull/2951"),
    ),
    Problem(
        code="KVD772",
        name="head-sizes-differ-by-layer",
        severity=Severity.CRASH,
        title="Layers with other head sizes than the first are split as the first one, and the start fails.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="shape '[<blocks>, 2, <half>]' is invalid for input of size <size>",
                within="detectors/vllm.py:discover",
            ),
            Failed(
                kind="RuntimeError",
                text="shape '[<blocks>, 2, <half>]' is invalid for input of size <size>",
                within="gpu_connector/utils.py:normalize_kv_and_discover_format",
            ),
        ),
        sentence="half a head of {half} does not fit a cache of {size} elements",
        releases={"lmcache": ">=0.4.7,<0.5.3"},
        cause="vLLM 0.26 keeps keys and values in one axis; LMCache halves it by the first layer's head size. Gemma "
        "4 (256 and 512) has several; MiniMax-M3 has an indexer's caches of half the size beside the others, without "
        "values. With MiniMax-M3 on ROCm 0.5.3 is reported to hang where it registers them (issue 4608).",
        now="no KV connector for this model with this release",
        fixed={"lmcache": "0.5.3"},
        threads=(
            _THREAD + "issues/4358",
            _THREAD + "issues/4263",
            _THREAD + "pull/4206",
            _THREAD + "issues/4608",
        ),
    ),
    Problem(
        code="KVD773",
        name="kv-groups-not-served",
        severity=Severity.CRASH,
        title="LMCache refuses a KV group of this model.",
        shows=(Failed(kind="ValueError", text="LMCache cannot serve this model's KV cache groups: <why>", at=_EDITS),),
        sentence="{why}",
        releases={"lmcache": ">=0.4.7"},
        connectors=_MP,
        cause="MambaSpec: states can be restored only with mamba_cache_mode `align` (from 0.5.6 on also `all`). "
        "CrossAttentionSpec: encoder and decoder models are not supported.",
        now="vllm serve ... --mamba-cache-mode align (vLLM 0.22 or newer); cross attention: take --kv-transfer-config "
        "out",
        good="--mamba-cache-mode align",
        threads=("https://github.com/ai-dynamo/dynamo/issues/13300",),
    ),
    Problem(
        code="KVD774",
        name="mamba-steps-below-a-block",
        severity=Severity.CRASH,
        title="A hybrid model's steps do not fit its blocks.",
        shows=(
            Failed(
                kind="ValueError",
                text="Mamba-hybrid models with LMCache require",
                at="lmcache/integration/vllm/lmcache_mp_connector.py",
            ),
            Failed(kind="ValueError", text="All Mamba KV cache groups must use one physical block size"),
        ),
        releases={"lmcache": ">=0.4.7"},
        connectors=_MP,
        cause="Each step of a prefill must fill a block, so that its state can be stored: 0.4.7 to 0.5.3 want exactly "
        "one block a step (block size <= max_num_batched_tokens < 2 * block size), 0.5.4 and newer at least one.",
        now="--max-num-batched-tokens N, N as the line says (from 0.5.4 on: the block size in the line or more)",
        good="LMCache 0.5.4 or newer with --max-num-batched-tokens not below the block size",
    ),
    Problem(
        code="KVD775",
        name="mixed-block-sizes-in-process",
        severity=Severity.WRONG,
        title="KV groups have different block sizes, and the in-process connector moves all of them with one.",
        shows=(
            Logged(
                text="detected heterogeneous per-group block_size <sizes> but forwards",
                at="lmcache/v1/gpu_connector/gpu_connectors.py",
            ),
        ),
        sentence="block sizes {sizes}, moved as if they were one: wrong KV",
        releases={"lmcache": ">=0.4.5"},
        connectors=_IN_PROCESS,
        cause="A model with compressed and plain groups (DeepSeek V4) has a block size for each; the copy takes one. "
        "LMCache warns and goes on.",
        now="stop using LMCacheConnectorV1 for this model, and delete what it has stored (local_disk, remote_url)",
        good=_TO_MP + "; no release of LMCacheConnectorV1 is right yet (0.5.6)",
        threads=(_THREAD + "pull/3171",),
    ),
    Problem(
        code="KVD776",
        name="mp-connector-of-vllm-with-groups",
        severity=Severity.CRASH,
        title="This multi-process connector knows one KV group only, and the model has several.",
        shows=(Failed(kind="RuntimeError", text="LMCacheMPConnector only works without hybrid kv cache manager"),),
        connectors=_MP,
        cause="vLLM's own copy of the connector, LMCache's up to 0.4.6, and its _0180 and _0201 variants take one list "
        "of blocks for each request.",
        now="--disable-hybrid-kv-cache-manager (models with sliding window only: Mamba and GDN cannot run with it)",
        good="LMCache's own connector of 0.4.7 or newer with vLLM 0.26 or newer: the log says `Using external "
        "LMCacheMPConnector`",
        threads=(_THREAD + "issues/2845",),
    ),
    Problem(
        code="KVD777",
        name="layout-unknown-to-old-lmcache",
        severity=Severity.RISK,
        title="LMCache cannot ask this vLLM for the layout of its KV, and guesses.",
        shows=(
            Logged(
                text="vLLM is not available but tried to query kv cache layout information",
                at="lmcache/integration/vllm/utils.py",
            ),
        ),
        sentence="vLLM's layout is not known, NHD is assumed",
        releases={"lmcache": ">=0.4.3,<0.5.5"},
        sure=False,
        cause="vLLM 0.32 no longer has the function get_kv_cache_layout that LMCache before 0.5.5 asks (0.26 has it). "
        "If vLLM uses HND (VLLM_KV_CACHE_LAYOUT, or a backend that wants it), keys are moved to the wrong places; "
        "hybrid models fail at the start with `Unsupported kv_layout: none`.",
        now="VLLM_KV_CACHE_LAYOUT unset, and no answers trusted that were loaded from LMCache",
        fixed={"lmcache": "0.5.5"},
        threads=(_THREAD + "issues/4870",),
    ),
    Problem(
        code="KVD778",
        name="layout-none-for-hybrid",
        severity=Severity.CRASH,
        title="LMCache does not know the layout of this vLLM's KV, and refuses the model.",
        shows=(Failed(kind="ValueError", text="Unsupported kv_layout: <layout>"),),
        sentence="the layout is {layout}",
        releases={"lmcache": ">=0.5.3,<0.5.6"},
        connectors=_MP,
        cause="LMCache before 0.5.5 cannot ask vLLM 0.32 for its layout (`none`), and up to 0.5.5 takes NHD and HND "
        "only.",
        now="LMCache 0.5.6 on both sides (pip install --upgrade --no-deps lmcache==0.5.6, of this torch and CUDA)",
        fixed={"lmcache": "0.5.6"},
        threads=(_THREAD + "issues/4870",),
    ),
    Problem(
        code="KVD779",
        name="layout-not-supported",
        severity=Severity.CRASH,
        title="vLLM was told to use a layout of KV that LMCache does not support.",
        shows=(
            Failed(kind="NotImplementedError", text="LMCache does not support the <layout> KV cache layout"),
            Failed(kind="ValueError", text="kv_layout hint <layout> is not a layout LMCache supports"),
        ),
        sentence="layout {layout}",
        releases={"lmcache": ">=0.5.5"},
        cause="With other layouts than LBNHC, LBHNC, BLHNC and BLNHC a block's content is in pieces.",
        now="unset VLLM_KV_CACHE_LAYOUT, or VLLM_KV_CACHE_LAYOUT=LBNHC",
        good="one of these four layouts",
    ),
    Problem(
        code="KVD963",
        name="one-format-for-all-layers",
        severity=Severity.CRASH,
        title="LMCache reads every KV cache of the model in the format of the first, and fails at one of another form.",
        shows=(
            Failed(within="kv_layer_groups.py:group_layers_by_identity"),
            Failed(kind="IndexError", text="tuple index out of range", within="nl_x_nb_two_bs_nh_hs.py:num_heads"),
        ),
        releases={"lmcache": ">=0.4.7,<0.5.1"},
        cause="The model has caches of several forms (keys and values beside an indexer or compressor: MiniMax-M3, "
        "DeepSeek V4), and these releases detect one format for all.",
        now="pip install 'lmcache>=0.5.1' for vLLM and for the server",
        fixed={"lmcache": "0.5.1"},
        threads=("https://github.com/LMCache/LMCache/issues/4008",),
    ),
    Problem(
        code="KVD1110",
        name="layer-cache-is-no-tensor",
        severity=Severity.CRASH,
        title="The KV cache of a layer is several tensors, and the connector takes it for one.",
        shows=(
            Failed(kind="AttributeError", text="'tuple' object has no attribute 'data_ptr'"),
            Failed(kind="AttributeError", text="'list' object has no attribute 'data_ptr'"),
            Failed(kind="AttributeError", text="'tuple' object has no attribute 'shape'", through="/lmcache"),
            Failed(kind="AttributeError", text="'list' object has no attribute 'shape'", through="/lmcache"),
            Failed(kind="AttributeError", text="'tuple' object has no attribute 'device'", through="/lmcache"),
            Failed(kind="AttributeError", text="'list' object has no attribute 'device'", through="/lmcache"),
        ),
        sentence="a layer's cache is a tuple or a list of tensors",
        connectors=(*_IN_PROCESS, "LMCacheConnectorV1Dynamic", "LMCacheAscendConnectorV1Dynamic"),
        sure=False,
        cause="Two models have such: MLA on Ascend (DeepSeek: a pair for each layer), and layers with a state (Mamba, "
        "GDN, linear attention), whose cache is a list. LMCache in the engine's process takes neither; the log's "
        "`use mla` or the model's name tells which it is.",
        now="DeepSeek on Ascend: use_layerwise: true (LMCACHE_USE_LAYERWISE=True) with a lmcache-ascend of the same "
        "LMCache release, else without --kv-transfer-config; Mamba or GDN: LMCacheMPConnector (LMCache 0.4.7 or newer)",
        good="lmcache-ascend that lists MLA as supported; for models with a state LMCacheMPConnector",
        threads=("https://github.com/LMCache/LMCache-Ascend/issues/12",),
    ),
    Problem(
        code="KVD1610",
        name="keys-and-values-in-one-dimension",
        severity=Severity.CRASH,
        title="vLLM keeps K and V of a token side by side, and this LMCache does not know that layout.",
        shows=(
            Failed(
                kind="ValueError",
                text="currently unsupported kv_caches format with list depth 1 and tensor dimension 4",
            ),
        ),
        sentence="the KV caches have four dimensions",
        releases={"lmcache": ">=0.3.14,<0.4.7"},
        cause="vLLM's FlashAttention and FlashInfer had [2, blocks, ...] or [blocks, 2, ...] up to 0.20; in 0.26 a "
        "block is [heads, tokens, 2 * head_size], four dimensions in all. LMCache reads that from 0.4.7 on.",
        now="pip install 'lmcache>=0.5.1' for vLLM and for the server, or the vLLM of this LMCache's time "
        "(pip install 'vllm<=0.20.2')",
        fixed={"lmcache": "0.4.7"},
    ),
    Problem(
        code="KVD1646",
        name="cache-format-not-known-yet",
        severity=Severity.CRASH,
        title="This LMCache does not know the nesting or the dimensions of the engine's KV caches.",
        shows=(
            Failed(
                kind="ValueError",
                text="currently unsupported kv_caches format with list depth <depth> and tensor dimension <dimension>",
                at="lmcache/v1/gpu_connector/utils.py",
            ),
        ),
        sentence="list depth {depth}, {dimension} dimensions",
        releases={"lmcache": ">=0.3.14,<0.5"},
        cause="It takes depth 0, depth 1 with 3 dimensions (MLA) or 5 (K and V first or second). Depth 2: the first "
        "layer has a state (Mamba, GDN). 4 dimensions: vLLM 0.26. `GPU KV Cache Dimensions` above has the sizes.",
        now="pip install 'lmcache>=0.5.1' for vLLM and for the server; models with a state: LMCacheMPConnector",
        good="a newer LMCache for a newer vLLM",
        sure=False,
    ),
)
