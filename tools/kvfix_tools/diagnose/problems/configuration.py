"""Settings that cannot work: what vLLM or LMCache refuses at the start, or silently leaves out."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
_KV_TRANSFER = "vllm/config/kv_transfer.py"
_TRANSFER = '--kv-transfer-config \'{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}\''
_ROPE = "lmcache/v1/compute/positional_encoding.py"

PROBLEMS = (
    Problem(
        code="KVD740",
        name="unknown-setting",
        severity=Severity.RISK,
        title="LMCache does not know a setting, and goes on without it.",
        shows=(
            Logged(text="Unknown configuration key: <key> (source: <source>)"),
            Logged(text="Unknown config key: <key>, ignoring"),
        ),
        sentence="{key} is no setting of this release: it is left out",
        cause="The key is misspelt, of another release, or belongs into extra_config; what it should have set keeps "
        "its default. `pd_backends` is meant to be `nixl_backends`.",
        now="rename it: python -c 'from lmcache.v1.config import LMCacheEngineConfig as c; print(c.from_defaults())' "
        "prints every key of the installed release",
        good="a configuration file of the installed release; keys of a backend's own go below extra_config",
        threads=("https://github.com/LMCache/LMCache/issues/2854",),
    ),
    Problem(
        code="KVD741",
        name="connector-of-v1-in-v0",
        severity=Severity.CRASH,
        title="vLLM fell back to its V0 engine, which cannot use a connector of the V1 engine.",
        shows=(
            Failed(kind="AssertionError", source="assert issubclass(connector_cls, KVConnectorBase)"),
            Logged(text="--kv-transfer-config is not supported by the V1 Engine. Falling back to V0"),
            Failed(kind="NotImplementedError", text="VLLM_USE_V1=1 is not supported with --kv-transfer-config"),
        ),
        sentence="a connector of the V1 engine in the V0 engine",
        releases={"vllm": "<0.11"},
        cause="vLLM before 0.11 chose V0 where V1 could not run: a GPU older than Ampere (V100, T4), VLLM_USE_V1=0, or "
        "an option that V1 did not know; before 0.9 also because of --kv-transfer-config itself.",
        now="vLLM before 0.9: pip install -U vllm, and kv_connector: LMCacheConnectorV1 (LMCacheConnector is V0's); "
        "from 0.9 on: VLLM_USE_V1=1 on a GPU of compute capability 8.0 or more, without the option that the log names "
        "before it",
        fixed={"vllm": "0.11.2"},
        threads=(
            "https://github.com/vllm-project/production-stack/issues/582",
            "https://github.com/vllm-project/vllm/issues/18933",
            "https://github.com/LMCache/LMCache/issues/462",
        ),
    ),
    Problem(
        code="KVD734",
        name="connector-of-v0-in-v1",
        severity=Severity.CRASH,
        title="A connector of the V0 engine is named, and vLLM runs its V1 engine.",
        shows=(Failed(kind="AssertionError", source="assert issubclass(connector_cls, KVConnectorBase_V1)"),),
        sentence="a connector of the V0 engine in the V1 engine",
        releases={"vllm": "<0.11"},
        cause="LMCacheConnector, MooncakeStoreConnector and PyNcclConnector of that time are the V0 engine's; V1 has "
        "connectors of its own.",
        now='"kv_connector": "LMCacheConnectorV1" in --kv-transfer-config, and restart',
        good="the V1 engine with a connector of its own: V0 is gone from vLLM 0.11 on",
        threads=("https://github.com/vllm-project/vllm/pull/15960",),
    ),
    Problem(
        code="KVD742",
        name="no-such-connector",
        severity=Severity.CRASH,
        title="vLLM does not know the connector that --kv-transfer-config names.",
        shows=(
            Failed(kind="ValueError", text="Unsupported connector type: <name>", at=_FACTORY),
            Logged(text="Unsupported connector type: <name>", at=_FACTORY),
            Failed(kind="ValueError", text="Connector '<name>' is not registered.", at=_FACTORY),
        ),
        sentence="no connector {name} in this vLLM",
        cause="The name is misspelt, or this release has no such connector: LMCacheConnectorV1 came with 0.8.5 and its "
        "V1 engine (the table of V0 has none, and images of that time ran V0), LMCacheConnector, PyNcclConnector and "
        "MooncakeStoreConnector of the V0 engine are gone, P2pNcclConnector is gone from 0.26 on, MooncakeConnector "
        "came with 0.15, MooncakeStoreConnector for V1 with 0.26, connectors of other packages need "
        "kv_connector_module_path.",
        now="the name as `python -c 'from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory "
        "as f; print(sorted(f._registry))'` prints it; for LMCache LMCacheConnectorV1 or LMCacheMPConnector; "
        "if LMCacheConnectorV1 itself is not known: pip install -U vllm (0.11.2 or later)",
        good="a connector of the installed vLLM, or kv_connector_module_path with the module that has it",
        threads=("https://github.com/LMCache/LMCache/issues/638",),
    ),
    Problem(
        code="KVD743",
        name="connector-not-in-module",
        severity=Severity.CRASH,
        title="The module in kv_connector_module_path has no class of the connector's name.",
        shows=(Failed(kind="AttributeError", text="Class <name> not found in <module>", at=_FACTORY),),
        sentence="{module} has no class {name}",
        cause="`kv_connector` is the name of the class, `kv_connector_module_path` the module in which it stands.",
        now='for LMCache: "kv_connector":"LMCacheConnectorV1Dynamic", "kv_connector_module_path":'
        '"lmcache.integration.vllm.lmcache_connector_v1"; or "LMCacheMPConnector" and '
        '"lmcache.integration.vllm.lmcache_mp_connector"',
        good="class and module as the installed release has them",
    ),
    Problem(
        code="KVD744",
        name="kv-role-missing",
        severity=Severity.CRASH,
        title="--kv-transfer-config has no kv_role, or one that vLLM does not know.",
        shows=(
            Failed(text="Please specify kv_role when kv_connector is set", at=_KV_TRANSFER),
            Failed(text="Unsupported kv_role:", at=_KV_TRANSFER),
            Logged(text="error: argument --kv-transfer-config: Value <json> cannot be converted"),
            Logged(text="error: argument --kv-transfer-config: invalid from_cli value"),
            Logged(text="error: argument --kv-transfer-config: <n> validation error for KVTransferConfig"),
            Failed(kind="ValidationError", text="validation error for KVTransferConfig"),
        ),
        cause="The JSON of --kv-transfer-config is not valid, has a field that vLLM does not know, or lacks kv_role "
        "(kv_producer, kv_consumer or kv_both).",
        now=_TRANSFER + ", in single quotes; settings of the connector go into kv_connector_extra_config",
        good="the fields of vllm/config/kv_transfer.py of the installed release",
        threads=("https://github.com/vllm-project/vllm/issues/19448",),
    ),
    Problem(
        code="KVD745",
        name="argument-unknown-to-vllm",
        severity=Severity.CRASH,
        title="This vLLM does not know an argument for KV transfer.",
        shows=(
            Logged(text="error: unrecognized arguments: --kv-transfer-config"),
            Logged(text="error: unrecognized arguments: --kv-offloading<rest>"),
            Logged(text="error: unrecognized arguments: --mamba-cache-mode"),
            Logged(text="error: unrecognized arguments: --decode-context-parallel-size"),
            Logged(text="error: unrecognized arguments: --disable-hybrid-kv-cache-manager"),
        ),
        cause="The argument came with a later release: --kv-transfer-config with 0.6.4, --kv-offloading-size with "
        "0.11.1, --mamba-cache-mode with 0.15.",
        now="vllm serve --help=all | grep kv- shows what the installed release takes",
        fixed={"vllm": "0.15.1"},
        threads=("https://github.com/kvcache-ai/Mooncake/issues/421",),
    ),
    Problem(
        code="KVD746",
        name="cacheblend-without-hook",
        severity=Severity.CRASH,
        title="CacheBlend needs a hook in vLLM that no released vLLM has.",
        shows=(
            Failed(kind="ValueError", text="vllm model for <name> not found.", at="lmcache/v1/compute/models/utils.py"),
            Failed(kind="ValueError", text="Blender for <name> not found.", at="lmcache/v1/compute/blend/utils.py"),
        ),
        sentence="vLLM's model was not handed to LMCache ({name})",
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        cause="`enable_blending` in the engine's own process needs VLLMModelTracker.register_model to be called in "
        "vLLM's gpu_worker.py before the connector is made. vLLM 0.11.2 to 0.32 do not call it; it must be written in "
        "by hand.",
        now="LMCACHE_ENABLE_BLENDING=False (enable_blending: false), restart",
        good="no release of vLLM or LMCacheConnectorV1 is right yet; LMCacheMPConnector up to 0.5.6 does not use the "
        "CacheBlend of `lmcache server` either (KVD467)",
        threads=(
            "https://github.com/LMCache/LMCache/issues/2306",
            "https://github.com/LMCache/LMCache/issues/1405",
        ),
    ),
    Problem(
        code="KVD747",
        name="cacheblend-model-unsupported",
        severity=Severity.CRASH,
        title="CacheBlend does not support this model, its position encoding or its attention backend.",
        shows=(
            Failed(text="Model type <name> is not supported in LMCache.", at="lmcache/v1/compute/models/utils.py"),
            Failed(
                text="Attention backend <name> is not supported in LMCache.", at="lmcache/v1/compute/attention/utils.py"
            ),
            Failed(text="We haven't supported MLA with Cacheblend yet"),
            Logged(
                text="Currently KV blending do not support rope scaling", at="lmcache/v1/compute/positional_encoding.py"
            ),
            Logged(
                text="The rope parameters is not supported! Cannot use cacheblend in this case",
                at="lmcache/v1/compute/positional_encoding.py",
            ),
            Logged("Currently KV blending only support rotary_dim == head_size.", _ROPE),
            Logged("Currently KV blending do not support rope scaling.", _ROPE),
            Logged("Currently KV blending do not support rotary factor other than 1.0.", _ROPE),
            Logged("Fused/reverse rotary encoding is not correct! Will disable blending!", _ROPE),
        ),
        cause="CacheBlend computes attention itself, for a few models (Llama, Qwen), plain rotary positions and "
        "FlashAttention or sparse FlashInfer only.",
        now="LMCACHE_ENABLE_BLENDING=False (enable_blending: false), restart",
        good="no release supports more yet: LMCache 0.5.6 has the same check",
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        threads=("https://github.com/LMCache/LMCache/issues/1257",),
    ),
    Problem(
        code="KVD748",
        name="serde-with-mla",
        severity=Severity.CRASH,
        title="A model with MLA and a compressing remote_serde do not go together.",
        shows=(Failed(kind="ValueError", text="MLA only works with naive serde mode"),),
        cause="CacheGen and KIVI compress keys and values, which MLA does not keep apart.",
        now="LMCACHE_REMOTE_SERDE=naive (remote_serde: naive)",
        good="naive; no release of LMCache compresses MLA",
    ),
    Problem(
        code="KVD764",
        name="multi-connector-two-answers",
        severity=Severity.CRASH,
        title="Two connectors below MultiConnector answer the end of a request with transfer parameters, and "
        "EngineCore dies.",
        shows=(
            Failed(kind="RuntimeError", text="Only one connector can produce KV transfer params"),
            Failed(kind="RuntimeError", text="Key clash in kv_transfer_params from multiple connectors"),
        ),
        cause="vLLM before 0.26 allows one answer only, and LMCacheMPConnector (vLLM's own, and LMCache's before "
        "0.5.1) answers every request of a P/D pair with an empty one beside NixlConnector's. vLLM 0.26 and newer "
        "merges answers, and dies only where both name the same key: then two P/D connectors are listed.",
        now='LMCache 0.5.1 or newer, and its own connector in "connectors": {"kv_connector":"LMCacheMPConnector",'
        '"kv_role":"kv_both","kv_connector_module_path":"lmcache.integration.vllm.lmcache_mp_connector"}; one P/D '
        "connector only",
        good="vLLM 0.26.0 or newer",
        threads=("https://github.com/LMCache/LMCache/pull/3866", "https://github.com/vllm-project/vllm/pull/46777"),
    ),
    Problem(
        code="KVD366",
        name="kv-transfer-config-is-a-dict",
        severity=Severity.CRASH,
        title="vLLM was given kv_transfer_config as a dictionary where it wants a KVTransferConfig.",
        shows=(
            Failed(kind="AttributeError", text="'dict' object has no attribute 'is_kv_transfer_instance'"),
            Failed(kind="AttributeError", text="'dict' object has no attribute 'kv_connector'"),
            Failed(kind="AttributeError", text="'dict' object has no attribute 'kv_role'"),
            Failed(kind="AttributeError", text="'str' object has no attribute 'is_kv_transfer_instance'"),
        ),
        cause="A program handed it over so, or took the arguments apart: `LLM(**asdict(engine_args))` turns the "
        "configuration inside into a dictionary, too.",
        now="LLM(..., kv_transfer_config=KVTransferConfig(kv_connector=..., kv_role=...)) from vllm.config; in place "
        "of asdict(args): {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}",
        good="the configuration as an object",
        threads=("https://github.com/vllm-project/vllm/issues/19259",),
    ),
    Problem(
        code="KVD1652",
        name="alignment-is-no-power-of-two",
        severity=Severity.CRASH,
        title="The alignment of LMCache's pinned memory is no power of two.",
        shows=(
            Failed(kind="ValueError", text="extra_config['local_cpu.pinned_align_bytes'] must be a positive power of"),
            Failed(kind="ValueError", text="extra_config['rust_raw_block.block_align'] must be a"),
            Failed(kind="ValueError", text="align_bytes must be a positive power of two"),
        ),
        releases={"lmcache": ">=0.3.15"},
        cause="It is a number of bytes: 4096 for O_DIRECT on most NVMe. For the LMCache server the option is "
        "--l1-align-bytes.",
        now="extra_config: {local_cpu.pinned_align_bytes: 4096, rust_raw_block.block_align: 4096}, or without both; "
        "for the server --l1-align-bytes 4096; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1656",
        name="hidden-states-mode-not-known",
        severity=Severity.CRASH,
        title="hidden_states_retrieve_mode is none that LMCache knows.",
        shows=(
            Failed(
                kind="ValueError",
                text="hidden_states_retrieve_mode must be 'prefix_strict' or 'skip_missing_chunks', got <got>",
                at="lmcache/v1/config.py",
            ),
        ),
        sentence="it is {got}",
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        releases={"lmcache": ">=0.5.1"},
        cause="It knows prefix_strict (the default) and skip_missing_chunks, and its older name legacy.",
        now="hidden_states_retrieve_mode: prefix_strict, or the line left out; env | grep LMCACHE_HIDDEN; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
)
