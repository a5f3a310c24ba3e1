"""Settings that LMCache reads from a file, and not from the environment."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

PROBLEMS = (
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
