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
)
