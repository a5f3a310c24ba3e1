"""Statistics that kill a process: of requests and connectors the API server, of usage the engine."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_ASCEND = "https://github.com/vllm-project/vllm-ascend/issues"

PROBLEMS = (
    Problem(
        code="KVD517",
        name="multi-connector-counts-unknown-child",
        severity=Severity.CRASH,
        title="The API server dies of the statistics of a connector inside MultiConnector.",
        shows=(
            Failed(
                kind="AssertionError",
                text="<connector> is not contained in the list of registered connectors",
                at=f"{_V1}/multi_connector.py",
            ),
            # Of a traceback that ends before its exception: nothing else in there raises.
            Failed(kind="AssertionError", within="loggers.py:record", source="self.kv_connector_prom_observe("),
        ),
        sentence="a connector in it reports statistics and registers none",
        releases={"vllm": "<0.33"},
        cause="MultiConnector asserts that each child that reports statistics has Prometheus metrics. The child that "
        "the line names (MooncakeConnector, FlexKVConnectorV1) reports and registers none, so the first good transfer "
        "kills the API server.",
        now="`--disable-log-stats` on both engines, or that connector alone, not in MultiConnector",
        fixed={"vllm": "0.33.0"},
        threads=(
            f"{_ISSUES}/43828",
            "https://github.com/gpustack/runner/pull/273",
            "https://github.com/taco-project/FlexKV/issues/188",
        ),
    ),
    Problem(
        code="KVD1091",
        name="multi-connector-child-of-another-name",
        severity=Severity.CRASH,
        title="The API server dies of the statistics of a connector whose class has another name than it.",
        shows=(
            Failed(
                kind="ValueError",
                text="Connector '<connector>' is not registered.",
                within="multi_connector.py:build_kv_connector_stats",
            ),
        ),
        sentence="{connector} is the name of a class, and no connector has it",
        releases={"vllm": ">=0.11.1"},
        cause="MultiConnector names its children's statistics by their classes, and the API server looks these up "
        "among the registered connectors. A plugin's class may differ (vllm-ascend's AscendOffloadingConnector, "
        "UCMConnectorV1), and what only kv_connector_module_path brings is not registered in that process.",
        now="`--disable-log-stats`, or that connector alone, not in MultiConnector; restart",
        good="the plugin registers its connector under the class's name, as a vllm.general_plugins entry point; 0.33.0 "
        "has the same code",
        threads=("https://github.com/vllm-project/vllm/pull/57683", f"{_ASCEND}/16932"),
    ),
    Problem(
        code="KVD662",
        name="prompt-token-counter-goes-down",
        severity=Severity.CRASH,
        title="The API server dies of its own count of prompt tokens, which a connector's hits made negative.",
        shows=(
            Failed(
                kind="ValueError",
                text="Counters can only be incremented by non-negative amounts",
                within="loggers.py:record",
            ),
        ),
        releases={"vllm": "<0.20.2"},
        cause="vLLM 0.16 to 0.19 take the tokens of the connector from those that were cached at the first try. A "
        "request that was preempted and finds more in the connector at its second try makes the rest negative, and "
        "Prometheus refuses it. Every connector that stores can do that.",
        now="`--disable-log-stats`, restart (no metrics then); fewer preemptions make it rarer: a larger "
        "--gpu-memory-utilization, a smaller --max-num-seqs",
        good="vLLM 0.20.2, which counts each request once (pull 37460); releases between 0.18 and it were not looked "
        "at",
        threads=(
            "https://github.com/LMCache/LMCache/pull/3269",
            f"{_ISSUES}/37354",
            f"{_ASCEND}/7489",
            f"{_ASCEND}/10028",
        ),
    ),
    Problem(
        code="KVD962",
        name="usage-statistics-kill-engine",
        severity=Severity.CRASH,
        title="LMCache's usage statistics cannot read the CPU's description, and the engine does not start.",
        shows=(Failed(within="usage_context.py:_get_cpu_info"),),
        said=(r"(?i)lmcache", r"\bget_cpu_info\b|_get_cpu_info\b", r"JSONDecodeError|(?i:crash|kill|fail)"),
        releases={"lmcache": "<0.5.2"},
        cause="LMCache reports its environment at the start, and py-cpuinfo fails on this node (its output is not "
        "JSON). These releases do not catch that.",
        now="LMCACHE_TRACK_USAGE=false in the environment of vLLM; restart",
        fixed={"lmcache": "0.5.2"},
        threads=("https://github.com/LMCache/LMCache/issues/2593",),
    ),
    Problem(
        code="KVD444",
        name="prometheus-folder-missing",
        severity=Severity.CRASH,
        title="The folder in which the processes of the engine keep their metrics is not there.",
        shows=(
            Failed(kind="FileNotFoundError", text=".db'", within="mmap_dict.py:__init__"),
            Failed(kind="FileNotFoundError", text="/tmp/lmcache_prometheus"),
            Failed(kind="FileNotFoundError", text="gauge_all_<pid>.db"),
            Failed(kind="FileNotFoundError", text="gauge_livesum_<pid>.db"),
            Logged("No such file or directory: '/tmp/lmcache_prometheus"),
        ),
        sentence="PROMETHEUS_MULTIPROC_DIR names a folder that is missing",
        cause="prometheus_client writes a file for each process into PROMETHEUS_MULTIPROC_DIR. LMCache before 0.4.6 "
        "makes the folder only where the variable was not set; one that is set has to exist. It is missing where the "
        "value has quotes in it (a double quote before /tmp in the message), in a second container, or after "
        "/tmp was cleaned.",
        now='mkdir -p "$PROMETHEUS_MULTIPROC_DIR" before vLLM starts, the value without quotes (one folder for '
        "each engine, emptied at each start); or unset PROMETHEUS_MULTIPROC_DIR",
        good="LMCache 0.4.6 or newer makes the folder that is set; internal_api_server_enabled: true shows LMCache's "
        "metrics without it",
        threads=(
            "https://github.com/LMCache/LMCache/pull/1318",
            "https://github.com/LMCache/LMCache/issues/621",
        ),
    ),
    Problem(
        code="KVD476",
        name="statistics-of-two-engines",
        general=True,
        severity=Severity.SLOW,
        title="Two LMCache engines in one process share their statistics.",
        shows=(
            Logged("PrometheusLogger instance already created"),
            Logged("ContinuousUsageContext instance already created"),
            Logged("CacheControllerPrometheusLogger instance already created"),
        ),
        cause="The line says that counters of the first engine are used for the second one too: numbers are wrong, "
        "nothing else is. It comes when scheduler and worker are one process (tensor parallel 1), or an LLM is made "
        "twice.",
        now="nothing has to be done for it: if something fails, look at the other errors of this log",
        good="LMCache 0.4.6 or newer, which does not say it",
    ),
)
