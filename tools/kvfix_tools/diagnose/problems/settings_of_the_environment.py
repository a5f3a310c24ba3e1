"""Settings of the environment that LMCache does not read, or not so."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

PROBLEMS = (
    Problem(
        code="KVD1843",
        name="variables-of-another-name",
        severity=Severity.SLOW,
        title="LMCache's variables are misspelt: it reads LMCACHE_..., and these begin with LM_CACHE_.",
        shows=(),
        said=(
            r"\bLM_CACHE_(?:CHUNK_SIZE|LOCAL_|MAX_LOCAL_|REMOTE_|ENABLE_|USE_|SAVE_|CONFIG_FILE|LOOKUP_)",
            r"(?i)\bvllm\b|(?<!_)lmcache",
        ),
        replaces=("KVD1320",),
        cause="A variable that LMCache does not know is passed over without a word, and every setting keeps its "
        "default (5 GB of host memory, no disk, no remote store). vLLM's `CPU KV cache usage` counts its own swap "
        "space, and stays at 0 with LMCache.",
        now="export LMCACHE_CHUNK_SIZE=256 LMCACHE_LOCAL_CPU=True LMCACHE_MAX_LOCAL_CPU_SIZE=20 (GB for each worker) "
        "in vLLM's environment, or LMCACHE_CONFIG_FILE=/path/lmcache.yaml; restart; the line `LMCache Configuration:` "
        "shows what it has read",
        good="the same: no release reads LM_CACHE_... (0.5.6)",
        threads=("https://github.com/LMCache/LMCache/issues/419",),
    ),
    Problem(
        code="KVD900",
        name="location-set-by-environment",
        severity=Severity.CRASH,
        title="LMCACHE_STORE_LOCATION or LMCACHE_RETRIEVE_LOCATIONS is set, and LMCache does not start.",
        shows=(Failed(kind="KeyError", text="'env_converter'", at="lmcache/v1/config.py"),),
        sentence="a setting without a converter was given by the environment",
        releases={"lmcache": ">=0.4.2,<0.5.3"},
        cause="store_location and retrieve_locations have no converter from text in these releases (config.py). With "
        "LMCACHE_CONFIG_FILE set, every variable that is there is converted, and these two fail.",
        now="unset LMCACHE_STORE_LOCATION LMCACHE_RETRIEVE_LOCATIONS, and put them into the file: `store_location: "
        "LocalCPUBackend`, `retrieve_locations: [LocalCPUBackend]`; restart",
        fixed={"lmcache": "0.5.3"},
        threads=("https://github.com/LMCache/LMCache/issues/4379",),
    ),
)
