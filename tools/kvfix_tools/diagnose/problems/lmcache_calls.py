"""Calls that do not go together: a connector's arguments, compiled operations, settings of the wrong kind, metrics."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem, either

_LMCACHE = "https://github.com/LMCache/LMCache/"

PROBLEMS = (
    Problem(
        code="KVD1100",
        name="connector-without-cache-config",
        severity=Severity.CRASH,
        title="The connector's class takes two arguments, and this vLLM hands three: it is of an older interface.",
        shows=(
            Failed(
                kind="TypeError",
                text="<connector>.__init__() takes <few> positional arguments but <given> were given",
                within="factory.py:create_connector",
            ),
            Failed(
                kind="TypeError",
                text="<connector>.__init__() missing <count> required positional argument",
                within="factory.py:create_connector",
            ),
        ),
        sentence="{connector} is not made as this vLLM makes connectors",
        cause="vLLM hands (vllm_config, role, kv_cache_config). Up to 0.20.2 it still asked whether a class from "
        "outside takes the third, from 0.26 on it does not. LMCache's own class for kv_connector_module_path has it "
        "from 0.3.14 on.",
        now='{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"} without kv_connector_module_path; with '
        "another connector pip install -U its package; `kvfix doctor -- vllm serve ...` checks it",
        good="LMCache 0.3.14 or newer, or the release of the connector's package that is of this vLLM's month",
        threads=(_LMCACHE + "issues/2446",),
    ),
    Problem(
        code="KVD1102",
        name="metrics-registered-twice",
        severity=Severity.CRASH,
        title="A metric is registered for the second time in one process.",
        shows=either("Duplicated timeseries in CollectorRegistry"),
        sure=False,
        cause="prometheus_client takes each name once in a process. Two engines in it (two LLM objects, a test that "
        "starts one after the other), or the same module loaded under two names (an image's lmcache and a checkout on "
        "PYTHONPATH).",
        now="one engine in a process; python -c 'import lmcache; print(lmcache.__file__)' and PYTHONPATH without a "
        "second copy",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1104",
        name="setting-is-text",
        severity=Severity.CRASH,
        title="LMCache compares a setting with a number, and the setting is text.",
        shows=(
            Failed(kind="TypeError", text="not supported between instances of 'str' and '<kind>'", within="lmcache/"),
            Failed(kind="TypeError", text="not supported between instances of '<kind>' and 'str'", within="lmcache/"),
        ),
        sure=False,
        cause="A number in quotes in LMCache's file, in extra_config or in the JSON of --kv-transfer-config "
        "(extra_config is taken as it stands, nothing converts it), or a size with its unit (`5GB`).",
        now="the setting that the last line of the traceback names without quotes and unit: max_local_cpu_size: 5.0, "
        "chunk_size: 256; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1106",
        name="operations-of-another-build",
        severity=Severity.CRASH,
        title="LMCache's Python code calls a compiled operation with arguments that it does not take.",
        shows=(
            Failed(kind="TypeError", text="<operation>(): incompatible function arguments", within="lmcache/"),
            Failed(kind="TypeError", text="<operation>(): incompatible function arguments", through="/lmcache/"),
        ),
        sentence="{operation} was compiled for other arguments",
        cause="The sources were updated (git pull, another checkout, pip install over an editable one) and the "
        "compiled c_ops are of an older state; or a plugin for other hardware (LMCache-Ascend) is of another release.",
        now="pip uninstall -y lmcache until it says that none is left, then pip install lmcache==<your release>; from "
        "source: pip install -e . --no-build-isolation again",
        good="Python code and compiled code of one release: a wheel, or an image of LMCache's",
    ),
    Problem(
        code="KVD1108",
        name="lmcache-file-missing",
        severity=Severity.CRASH,
        title="LMCache's configuration file is not there.",
        shows=(
            Failed(kind="FileNotFoundError", within="v1/config.py:_from_file"),
            Failed(kind="FileNotFoundError", within="v1/config_base.py:_from_file"),
            Failed(kind="FileNotFoundError", within="utils.py:lmcache_get_config"),
            Failed(kind="FileNotFoundError", within="utils.py:lmcache_get_or_create_config"),
        ),
        cause="LMCACHE_CONFIG_FILE names a path that this process does not have: relative to another folder, not "
        "mounted into the container, or not on this node (Ray's workers read it on theirs).",
        now="export LMCACHE_CONFIG_FILE=/full/path/lmcache.yaml with the file mounted into every container and node; "
        "or unset it and set LMCACHE_CHUNK_SIZE, LMCACHE_LOCAL_CPU, LMCACHE_MAX_LOCAL_CPU_SIZE",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
)
