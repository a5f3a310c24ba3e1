"""Settings that LMCache or vLLM refuses at the start: the message says which, and what they exclude."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_OFFLOADING = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/config.py"

PROBLEMS = (
    Problem(
        code="KVD799",
        name="lmcache-settings-refused",
        severity=Severity.CRASH,
        title="LMCache refuses its settings: the message names those that are wrong or exclude each other.",
        shows=(
            Failed(kind="ValueError", within="v1/config.py:_validate_config"),
            Failed(kind="ValueError", within="distributed/config.py:parse_args_to_config"),
            Failed(kind="ValueError", within="distributed/config.py:_parse_l1_common"),
            Failed(kind="ValueError", within="mp_server_launcher.py:_build_autostart_config_from_url"),
            Failed(kind="ValueError", within="mp_server_launcher.py:_parse_server_args"),
            Failed(kind="ValueError", within="mp_server_launcher.py:_normalize_local_host"),
            Failed(kind="ValueError", text="P2P requires a coordinator for peer discovery"),
            Failed(kind="ValueError", within="multiprocess/config.py:parse_args_to_coordinator_config"),
            Failed(kind="ValueError", within="worker_transfer.py:_resolve_mode"),
            Failed(kind="ValueError", within="transport/factory.py:_normalize_server_url"),
            Failed(kind="AssertionError", within="nixl_storage_backend.py:from_cache_engine_config"),
            Failed(kind="ValueError", within="nixl_storage_backend.py:from_cache_engine_config"),
        ),
        cause="What the message says. Settings come from the file in LMCACHE_CONFIG_FILE and from LMCACHE_ variables, "
        "which win; the server's from its command line; the connector's from kv_connector_extra_config.",
        now="change the setting that the message names, and restart; env | grep LMCACHE_ shows variables that were "
        "forgotten",
        good="a configuration that the installed release takes; its documentation is that of another release, mostly",
    ),
    Problem(
        code="KVD789",
        name="offloading-settings-refused",
        severity=Severity.CRASH,
        title="vLLM refuses the settings of its OffloadingConnector.",
        shows=(
            Failed(kind="ValueError", text="Specify only one of 'block_size' or 'blocks_per_chunk'", at=_OFFLOADING),
            Failed(kind="ValueError", text="'blocks_per_chunk' must be greater than 0.", at=_OFFLOADING),
            Failed(kind="ValueError", text="Secondary tier configuration must include 'type'"),
        ),
        releases={"vllm": ">=0.26"},
        cause="What the message says: keys of kv_connector_extra_config exclude each other, or one is missing.",
        now="leave block_size and blocks_per_chunk out of kv_connector_extra_config; give each of secondary_tiers its "
        '"type" ("fs", "obj" or "p2p"); restart',
        good="--kv-offloading-size alone, unless a tier is needed",
    ),
    Problem(
        code="KVD967",
        name="option-excludes-connectors",
        severity=Severity.CRASH,
        title="vLLM refuses an option or a model together with a KV connector.",
        shows=(
            Failed(kind="AssertionError", text="Encoder-decoder models are not currently supported with KV connectors"),
            Failed(kind="ValueError", text="--enable-return-routed-experts is incompatible with KV connectors"),
            Failed(kind="ValueError", text="--use-replayssm is incompatible with KV connectors"),
            Failed(kind="ValueError", text="Bidirectional KV transfer is not supported for NIXL push connector."),
        ),
        cause="What the message says: blocks that come from elsewhere break what the option counts on; models with "
        "cross attention (Whisper and such) have KV that no connector moves.",
        now="leave out the option that the message names, or --kv-transfer-config and --kv-offloading-size; for an "
        "encoder-decoder model the latter; for NixlPushConnector enable_bidirectional_kv",
        good="no release up to 0.33.0 has both",
    ),
    Problem(
        code="KVD968",
        name="mamba-block-exceeds-batch",
        severity=Severity.CRASH,
        title="The blocks of a Mamba model in the mode that connectors need are larger than a step may be.",
        shows=(
            Failed(
                kind="AssertionError",
                text="In Mamba cache align mode, block_size (<block>) must be <= max_num_batched_tokens (<batch>)",
                at="vllm/config/vllm.py",
            ),
        ),
        sentence="{block} tokens in a block, {batch} in a step",
        releases={"vllm": ">=0.16,<0.32"},
        cause="With `--mamba-cache-mode align` a state is kept at the end of each block, so a step has to hold a whole "
        "block.",
        now="--max-num-batched-tokens of at least the block_size that the message names",
        good="the same option",
    ),
    Problem(
        code="KVD971",
        name="kv-memory-short-with-connector",
        severity=Severity.CRASH,
        title="There is too little GPU memory for one request of the greatest length, with a connector.",
        shows=(Failed(kind="ValueError", text="cache is needed, which is larger than the available KV cache memory"),),
        connectors=(
            "LMCacheConnectorV1",
            "LMCacheConnectorV1Dynamic",
            "LMCacheMPConnector",
            "MooncakeStoreConnector",
            "MooncakeConnector",
            "MultiConnector",
            "NixlConnector",
            "OffloadingConnector",
        ),
        named=True,
        sure=False,
        cause="Without the connector it starts: then the connector has switched the hybrid KV cache manager off "
        "(a warning before it says so), and layers with a sliding window or compressed KV count in full. Without the "
        "connector it does not start either: --max-model-len is too large for this GPU.",
        now="--max-model-len of what the message says at most; the first case also a connector with several KV groups "
        "(LMCacheMPConnector of LMCache 0.4.7 or later with vLLM 0.26 or later, OffloadingConnector) and "
        "`--no-disable-hybrid-kv-cache-manager`",
        good="a connector that supports several KV groups",
        threads=("https://github.com/vllm-project/vllm/issues/44376",),
    ),
)
