"""Hybrid models, several KV groups and MLA in vLLM's own connectors; transfers whose end comes late."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_PULLS = "https://github.com/vllm-project/vllm/pull"
_LMCACHE = "https://github.com/LMCache/LMCache/issues"
_BASE_WORKER = f"{_V1}/nixl/base_worker.py"

PROBLEMS = (
    Problem(
        code="KVD650",
        name="hybrid-model-with-plain-connector",
        severity=Severity.CRASH,
        title="A hybrid model cannot start: the connector makes vLLM switch its hybrid KV cache manager off.",
        shows=(
            Failed(
                kind="ValueError",
                text="Hybrid KV cache manager is disabled but failed to convert the KV cache specs to one unified type",
                at="vllm/v1/core/kv_cache_utils.py",
            ),
        ),
        releases={"vllm": "<0.32"},
        cause="The model has attention and state (Mamba, GDN) layers. The connector does not support several KV groups "
        "(or vLLM before 0.21 switches the manager off for every connector), and without the manager the model cannot "
        "run.",
        now="NixlConnector, OffloadingConnector or SimpleCPUOffloadConnector on vLLM 0.20: add "
        "`--no-disable-hybrid-kv-cache-manager`; LMCache: LMCacheMPConnector (LMCache 0.4.7 or later, vLLM 0.26 or "
        "later) instead of LMCacheConnectorV1; else no --kv-transfer-config for this model",
        good="vLLM 0.26.0 with a connector that supports several groups; LMCacheConnectorV1 does in no release",
        threads=(
            "https://github.com/LMCache/LMCache/issues/2927",
            "https://github.com/LMCache/LMCache/pull/1436",
            f"{_LMCACHE}/3163",
            "https://github.com/ai-dynamo/dynamo/issues/10741",
            f"{_ISSUES}/41830",
        ),
    ),
    Problem(
        code="KVD651",
        name="connector-without-kv-groups",
        severity=Severity.CRASH,
        title="The connector cannot handle several KV groups, and the hybrid KV cache manager is on.",
        shows=(
            Failed(
                kind="ValueError",
                text="Connector <connector> does not support HMA but HMA is enabled",
                at="vllm/distributed/kv_transfer/kv_connector/factory.py",
            ),
        ),
        sentence="{connector} with the hybrid KV cache manager",
        cause="The connector's class is no SupportsHMA one (DynamoConnector of KVBM up to Dynamo 1.4.0, "
        "LMCacheConnectorV1, many of other packages), and the manager is on: by a launcher around vLLM, by the model, "
        "or by `--no-disable-hybrid-kv-cache-manager`.",
        now="models with sliding windows alone (Gemma, gpt-oss): `--disable-hybrid-kv-cache-manager`; models with "
        "Mamba or GDN layers, and DeepSeek-V4, need it: another connector (NixlConnector, OffloadingConnector, "
        "LMCacheMPConnector of LMCache 0.4.7 or later)",
        good="a connector that supports several groups: for DynamoConnector a KVBM with pull 8051 of ai-dynamo/dynamo; "
        "LMCacheConnectorV1 does in no release",
        threads=(f"{_LMCACHE}/3163", "https://github.com/ai-dynamo/dynamo/issues/13755"),
    ),
    Problem(
        code="KVD652",
        name="hybrid-manager-forced-on",
        severity=Severity.CRASH,
        title="The hybrid KV cache manager was asked for where vLLM must switch it off.",
        shows=(
            Failed(
                kind="ValueError",
                text="Hybrid KV cache manager was explicitly enabled but is not supported",
                at="vllm/config/vllm.py",
            ),
        ),
        releases={"vllm": ">=0.15"},
        cause="A connector without support for several KV groups, KV events, or a platform without it is configured.",
        now="remove `--no-disable-hybrid-kv-cache-manager`; if the model needs it (Mamba, GDN): a connector that "
        "supports it, no --kv-events-config",
        good="the configuration",
    ),
    Problem(
        code="KVD653",
        name="mamba-with-connector-not-allowed",
        severity=Severity.CRASH,
        title="This vLLM refuses KV from outside for models with Mamba layers.",
        shows=(
            Failed(
                kind="AssertionError",
                text="External KV connector is not verified yet",
                at="vllm/v1/core/sched/scheduler.py",
            ),
            Failed(
                kind="AssertionError",
                within="_mamba_block_aligned_split",
                source="assert num_external_computed_tokens == 0",
            ),
        ),
        releases={"vllm": ">=0.15,<0.26"},
        cause="With mamba cache mode `align` (what prefix caching turns on) the scheduler asserts that no connector "
        "brings tokens: the first hit kills EngineCore.",
        now="`--no-enable-prefix-caching` on the instance that loads, or no connector there (no --kv-offloading-size); "
        "restart",
        fixed={"vllm": "0.26.0"},
        threads=(
            f"{_ISSUES}/41515",
            f"{_ISSUES}/43508",
            f"{_ISSUES}/45407",
            f"{_ISSUES}/45268",
            f"{_LMCACHE}/3655",
            f"{_PULLS}/41635",
        ),
    ),
    Problem(
        code="KVD654",
        name="mamba-state-layout",
        severity=Severity.CRASH,
        title="NIXL needs the other layout of Mamba's convolution state.",
        shows=(
            Failed(
                kind="AssertionError", text="3-read Mamba conv transfer requires DS conv state layout", at=_BASE_WORKER
            ),
        ),
        releases={"vllm": ">=0.20"},
        cause="The default layout is SD; NIXL reads the state in parts, which needs DS.",
        now="`export VLLM_SSM_CONV_STATE_LAYOUT=DS` on prefill and decode, restart (CPU platform with AVX-512 BF16: it "
        "forces SD, no way)",
        good="the configuration; on CPU no release is right yet",
        threads=(
            f"{_ISSUES}/54387",
            f"{_ISSUES}/58034",
            "https://github.com/1CatAI/1Cat-vLLM/issues/555",
        ),
    ),
    Problem(
        code="KVD658",
        name="hybrid-nixl-sizes-differ",
        severity=Severity.CRASH,
        title="NIXL cannot map this hybrid model between instances of different sizes.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="Prefix caching with heterogeneous physical_blocks_per_logical",
                at=_BASE_WORKER,
            ),
            Failed(kind="AssertionError", text="HMA does not support block size post processing", at=_BASE_WORKER),
            Failed(kind="RuntimeError", text="heterogeneous attn post process is not supported with HMA"),
            Failed(kind="RuntimeError", text="Hybrid MLA+Mamba NIXL transfers require matching DCP sizes"),
            Failed(kind="AssertionError", source="assert not self._is_hma_required", within="get_finished"),
            Failed(kind="AssertionError", source="assert not self._is_hma_required", within="_read_blocks"),
            Failed(kind="AssertionError", source="assert not self._is_hma_required", within="_xfer_blocks"),
        ),
        releases={"vllm": ">=0.26"},
        cause="With another tensor parallel (or DCP) size the block sizes of the groups differ between prefill and "
        "decode, and a hit in decode's own prefix cache, or a layout change, cannot be mapped.",
        now="the same --tensor-parallel-size, --block-size and --decode-context-parallel-size on both sides; or "
        "`--no-enable-prefix-caching` on decode",
        good="instances of the same size; no release maps it yet",
        threads=(f"{_ISSUES}/42895",),
    ),
    Problem(
        code="KVD659",
        name="full-local-hit-reported-as-load",
        severity=Severity.CRASH,
        title="A load was reported done of a request that waits for none, and EngineCore dies.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert RequestStatus.is_finished(req.status)",
                at="vllm/v1/core/sched/scheduler.py",
            ),
        ),
        connectors=(
            "MooncakeConnector",
            "MooncakeConnectorV1",
            "MooncakeConnectorV2",
            "MooncakeHybridConnector",
            "MooncakeLayerwiseConnector",
        ),
        releases={"vllm": ">=0.16"},
        sure=False,
        cause="MultiConnector: it passes each child's report on, and a child that was not chosen (LMCacheMPConnector, "
        "a store beside NixlConnector) loads all the same (KVD111). Mooncake connectors (vllm-ascend before March "
        "2026): decode has the whole prompt, pulls nothing, and reports that as a load. `KV load failure` before it: a "
        "load that failed is computed again, and its end is reported after that.",
        now="MultiConnector or a failed load: `kvfix run -- CMD` (KVF201 leaves out reports that are not due), or one "
        "connector alone; "
        "Mooncake: `--no-enable-prefix-caching` on the decode instance; restart",
        good="MultiConnector, failed loads: no release of vLLM is right yet (0.33.0 asserts); vllm-ascend after March "
        "2026 (pull 7236); vLLM's own MooncakeConnector: 0.32.0",
        threads=(
            "https://github.com/vllm-project/vllm-ascend/pull/7236",
            f"{_ISSUES}/51786",
            f"{_ISSUES}/53049",
            f"{_ISSUES}/42831",
        ),
    ),
    Problem(
        code="KVD660",
        name="offload-truncates-too-far",
        severity=Severity.CRASH,
        title="A hit was cut back below the blocks of a KV group, and EngineCore dies.",
        shows=(
            Failed(
                kind="AssertionError",
                within="truncate_computed_blocks",
                source="assert num_blocks <= len(group_blocks)",
            ),
        ),
        releases={"vllm": ">=0.27"},
        sure=False,
        cause="Hybrid model with prefix caching and a connector: the last state that a Mamba or GDN group holds lies "
        "before the attention's hit, to which the connector's answer is cut. Seen on 0.27.1 where 0.25 died of KVD602.",
        now="`--no-enable-prefix-caching`, or without the connector for this model; restart",
        good="vLLM 0.32.0, which lets a Mamba group end earlier; of other groups 0.33.0 asserts it too",
        threads=(f"{_ISSUES}/50454", f"{_ISSUES}/53505", "https://github.com/vllm-project/vllm/pull/51421"),
    ),
    Problem(
        code="KVD661",
        name="failed-load-of-hybrid-model",
        severity=Severity.CRASH,
        title="A load failed for a model with several KV groups, and EngineCore dies of it.",
        shows=(
            Failed(
                kind="ValueError",
                text="too many values to unpack",
                within="_update_requests_with_invalid_blocks",
            ),
        ),
        releases={"vllm": ">=0.11,<0.32"},
        cause="The scheduler takes the failed blocks for those of one KV group; hybrid models have several. Why the "
        "load failed stands before it.",
        now="put right why the load failed (a peer or a store that is gone); `--no-enable-prefix-caching` does not "
        "help; without the connector the model runs",
        fixed={"vllm": "0.32.0"},
        threads=(
            "https://github.com/vllm-project/vllm/issues/50687",
            "https://github.com/vllm-project/vllm/pull/50388",
        ),
    ),
    Problem(
        code="KVD969",
        name="failed-blocks-of-hybrid-model",
        severity=Severity.CRASH,
        title="A load failed for a model with several KV groups, and vLLM refuses how the connector reports it.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="A KV connector reported block-level load failures",
                at="vllm/v1/core/sched/scheduler.py",
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="The connector names blocks that failed, and a block has a number in each KV group. vLLM 0.32 and later "
        "take only requests that failed, and EngineCore dies. Why the load failed stands before it.",
        now="put right why the load failed (a peer or a store that is gone); until then without the connector",
        good="a release of the connector that reports failed requests; vLLM's own do from 0.32.0",
        threads=("https://github.com/vllm-project/vllm/pull/54733",),
    ),
)
