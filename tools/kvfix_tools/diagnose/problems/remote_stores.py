"""Remote stores of the in-process connector that fail: the connection, Redis and Valkey, lm://, files, plugins."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_REMOTE = "lmcache/v1/storage_backend/remote_backend.py"
_CONNECTORS = "lmcache/v1/storage_backend/connector"
_SCHEMES = "redis://, rediss://, unix://, redis-sentinel://, valkey://, lm://, s3://, fs://, mooncakestore://, ..."
_CHECK = "lmcache/v1/health_monitor/checks/remote_backend_check.py"

PROBLEMS = (
    Problem(
        code="KVD860",
        name="remote-store-not-reached",
        severity=Severity.SLOW,
        title="LMCache does not reach its remote store: nothing is stored there, and nothing found.",
        shows=(
            Logged("Failed to initialize/re-establish remote connection", _REMOTE),
            Logged("Failed to initialize/re-establish remote connection: "),
        ),
        cause="The error after the colon decides. `Connection refused`, `timed out`, `Name or service not known`: no "
        "store at remote_url, as seen from the workers' container (localhost is the container itself). `Authentication "
        "required` or `NOAUTH`: user and password are missing in the URL.",
        now="remote_url: redis://:PASSWORD@HOST:6379 (or lm://HOST:65432, ...) with a host that the worker's container "
        "reaches, and start the store first; its health check tries again by itself",
        good="keep it so: the set-up was wrong, and no release changes that",
        connectors=_IN_PROCESS,
        threads=(_LMCACHE + "issues/929", _LMCACHE + "issues/2581"),
    ),
    Problem(
        code="KVD861",
        name="remote-store-unconnected",
        severity=Severity.SLOW,
        title="LMCache has no connection to its remote store, and leaves it out.",
        shows=(
            Logged("Connection is None in contains, returning False", _REMOTE),
            Logged("Connection is None in batched_contains, returning"),
            Logged("Connection is None in submit_put_task, returning None", _REMOTE),
            Logged("Connection is None in batched_submit_put_task, returning None", _REMOTE),
            Logged("Connection is None in get_blocking, returning None", _REMOTE),
            Logged("Connection is None in batched_get_blocking, returning", _REMOTE),
            Logged("Connection is None in batched_async_contains, returning 0", _REMOTE),
            Logged("Connection will not be re-established yet", _REMOTE),
        ),
        connectors=_IN_PROCESS,
        cause="The connection failed when LMCache started; `Failed to initialize/re-establish remote connection` "
        "before it has the reason. Its health check tries again from time to time, loads and stores do not.",
        now="make the store at remote_url reachable from the worker's container, then restart vLLM",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD862",
        name="remote-store-drops-lookups",
        severity=Severity.SLOW,
        title="The remote store fails at lookups: every one counts as a miss.",
        shows=(
            Logged("Remote connection failed in contains: "),
            Logged("Remote connection failed in batched_contains: "),
            Logged("lm connector failed in exists: "),
        ),
        connectors=_IN_PROCESS,
        cause="The error after the colon decides: the store was stopped or restarted, refuses more clients, or the "
        "network drops idle connections.",
        now="from the worker's container `redis-cli -u REMOTE_URL ping` (lm:// and others: nc -vz HOST PORT): no "
        "answer: start the store; an answer: restart vLLM, whose lm:// socket is never made anew (redis:// connects by "
        "itself)",
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
        threads=(_LMCACHE + "issues/929",),
    ),
    Problem(
        code="KVD865",
        name="remote-put-fails",
        severity=Severity.SLOW,
        title="Chunks could not be written to the remote store: later requests will not find them.",
        shows=(
            Logged("Put task failed for key <key>: <error>", _REMOTE),
            Logged("batched put error: <error>", f"{_CONNECTORS}/instrumented_connector.py"),
        ),
        quotes=True,
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.15"},
        cause="The error at the end of the line decides: the store is full, gone, or refuses the size. Requests are "
        "answered all the same; only the cache suffers.",
        now="redis-cli -u REMOTE_URL info memory (used_memory at maxmemory: maxmemory-policy allkeys-lru), df -h for "
        "fs://, nc -vz HOST PORT for the others; unset LMCACHE_REMOTE_URL (remote_url: null) and restart if it floods "
        "the log",
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
        threads=("https://github.com/vllm-project/production-stack/issues/923",),
    ),
    Problem(
        code="KVD867",
        name="remote-get-too-slow",
        severity=Severity.SLOW,
        title="A remote store brings chunks too slowly, and the load is given up.",
        shows=(Logged("get blocking timeout, trigger cancel the future task", _REMOTE),),
        sentence="a load from the remote store took longer than blocking_timeout_secs",
        said=(
            r"(?i)lmcache",
            r"(?i)lmcache_server|remote|another server|\blm://|redis|cross-server",
            r"AssertionError[^\n]{0,60}vllm_v1_adapter|vllm_v1_adapter[^\n]{0,60}AssertionError",
            r"(?i)(?:network|connection)\b[^\n]{0,30}\bslow|slow (?:network|connection)|bandwidth|blocking_timeout",
        ),
        connectors=_IN_PROCESS,
        cause="blocking_timeout_secs (10 seconds unless set) is for all chunks of a prompt: network and store do not "
        "bring them in that time. The load comes short and vLLM computes the rest.",
        now="blocking_timeout_secs: 30, and restart; a smaller prompt share (min_retrieve_tokens), a faster network",
        good="LMCache 0.4.1 or newer survives the short load (before, a save may die of it with an AssertionError in "
        "vllm_v1_adapter.py: KVD112)",
        threads=(_LMCACHE + "issues/2204",),
    ),
    Problem(
        code="KVD868",
        name="remote-get-fails",
        severity=Severity.SLOW,
        title="A load from the remote store failed: it is computed again.",
        shows=(
            Logged("Error occurred in get_blocking: <error>", _REMOTE),
            Logged("Error occurred in batched_get_blocking: <error>", _REMOTE),
            Logged("Error occurred in batched_async_contains: <error>", _REMOTE),
            Logged("Error occurred in batched_get_non_blocking: <error>"),
        ),
        quotes=True,
        connectors=_IN_PROCESS,
        cause="The error after the colon decides: connection lost, an object of another chunk size or model under the "
        "same key, or a format that this release does not read.",
        now="`redis-cli -u REMOTE_URL ping` (others: nc -vz HOST PORT) from the worker's container; if it answers: "
        "empty the store (redis-cli FLUSHDB, a new folder or bucket), as after a change of chunk_size, model or "
        "release, and restart vLLM",
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
    ),
    Problem(
        code="KVD869",
        name="remote-url-not-known",
        severity=Severity.SLOW,
        title="LMCache has no connector for remote_url: its scheme is unknown, or the connector did not import.",
        shows=(
            Logged("Failed to initialize/re-establish remote connection: No adapter found for URL: <url>"),
            Failed(kind="ValueError", text="No adapter found for URL: <url>", at=f"{_CONNECTORS}/__init__.py"),
        ),
        sentence="no connector for {url}",
        connectors=_IN_PROCESS,
        cause=f"Known are {_SCHEMES}. With one of these in remote_url the connector's module did not import (a package "
        "is missing): a WARNING at the start says which.",
        now="a known scheme: pip install the package that the WARNING names; another: remote_url with one of these "
        "schemes, redis://HOST:6379 for example; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD870",
        name="remote-url-incomplete",
        severity=Severity.SLOW,
        title="LMCache cannot read the remote_url: it lacks its host or its port, or has more than this release takes.",
        shows=(
            Logged("Failed to initialize/re-establish remote connection: Invalid URL <url>: missing"),
            Logged("Failed to initialize/re-establish remote connection: Invalid host definition in URL:"),
            Failed(kind="AssertionError", text="Invalid URL <url>: missing", at=f"{_CONNECTORS}/__init__.py"),
            Failed(kind="ValueError", text="Invalid remote url <url>: missing scheme", at=f"{_CONNECTORS}/__init__.py"),
        ),
        connectors=_IN_PROCESS,
        cause="Every remote_url needs scheme, host and port, also where they mean nothing: fs://host:0/path. "
        "`Invalid host definition`: LMCache of early 2025 takes no user and password in it.",
        now="pip install -U 'lmcache>=0.3.9' for redis://USER:PASSWORD@HOST:6379; else remote_url: "
        "redis://HOST:6379, lm://HOST:65432, or fs://host:0/mnt/kv, and restart",
        good="LMCache 0.3.9 or newer, which reads a user and password (pull 737), and a URL with host and port",
        threads=(_LMCACHE + "issues/667", _LMCACHE + "pull/737"),
    ),
    Problem(
        code="KVD871",
        name="store-settings-refused",
        severity=Severity.CRASH,
        title="The connector of a remote store does not start with these settings.",
        shows=(
            Logged("save_chunk_meta must be False for"),
            Logged("save_unfull_chunk must be False for"),
            Logged("s3_region is required"),
            Failed(text="save_chunk_meta must be False for"),
            Failed(kind="AssertionError", text="save_unfull_chunk must be False for"),
            Failed(kind="ValueError", text="save_unfull_chunk must be False for"),
            Failed(kind="AssertionError", text="s3_region is required"),
        ),
        connectors=_IN_PROCESS,
        cause="S3, RESP and Valkey's glide connector store whole chunks without a header; S3 needs its region also "
        "where the server has none.",
        now='save_unfull_chunk: false and extra_config: {save_chunk_meta: false, s3_region: "us-east-1"}, and restart',
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD875",
        name="store-health-check-fails",
        severity=Severity.SLOW,
        title="LMCache took itself out of service because a store does not answer its health check.",
        shows=(
            Logged("HealthMonitor: System unhealthy, entering degraded mode", "lmcache/v1/health_monitor/base.py"),
            Logged("LMCache is unhealthy, skipping store operation", "lmcache/v1/cache_engine.py"),
            Logged("LMCache is unhealthy, skipping retrieve operation", "lmcache/v1/cache_engine.py"),
            Logged("LMCache is unhealthy, skipping lookup operation", "lmcache/v1/cache_engine.py"),
            Logged("Health check failed: <check>", "lmcache/v1/health_monitor/base.py"),
            Logged("Ping failed with error code: <error>", _CHECK),
            Logged("Ping timeout", _CHECK),
            Logged("Ping error: <error>", _CHECK),
            Logged("Put timeout, check failed.", _CHECK),
            Logged("Put error, check failed: <error>", _CHECK),
            Logged("Get failed, the return value is None, check failed.", _CHECK),
            Logged("Detected <count> get blocking failed in interval, threshold: <limit>", _CHECK),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.13"},
        cause="The remote store was pinged in vain, or LMCache failed to start (`marked as init failed` at the log's "
        "beginning). All loads and stores are left out until a ping succeeds; after a failed start, for ever. `get "
        "blocking failed`: loads of the store ran into blocking_timeout_secs (10), so it is too slow or has lost keys.",
        now="bring the store at remote_url up; after a failed start put right what its first ERROR says and restart",
        good="keep it so: the set-up was wrong, and no release changes that; extra_config fallback_policy: local_cpu "
        "keeps the CPU cache in use",
    ),
    Problem(
        code="KVD960",
        name="s3-part-size-not-set",
        severity=Severity.SLOW,
        title="LMCache's S3 connector cannot be made: its part size is compared before the chunk size is known.",
        shows=(
            Logged(
                "Failed to initialize/re-establish remote connection: 'NoneType' object cannot be interpreted as an "
                "integer"
            ),
            Logged(
                "Failed to initialize/re-establish remote connection: S3 part size must be equal to chunk size in "
                "S3Connector"
            ),
        ),
        releases={"lmcache": "<0.3.10.post1"},
        connectors=_IN_PROCESS,
        cause="S3Connector compares s3_part_size with full_chunk_size in its constructor, and that is None until "
        "later: with a part size the assertion fails, without one the S3 client gets None.",
        now="pip install 'lmcache>=0.3.10.post1'; until then another store than s3:// in remote_url",
        fixed={"lmcache": "0.3.10.post1"},
        threads=(_LMCACHE + "issues/1961",),
    ),
    Problem(
        code="KVD435",
        name="cachegen-not-written",
        severity=Severity.SLOW,
        title="With remote_serde: cachegen nothing reaches the remote store: its chunks have no dtype.",
        shows=(
            Logged("batched put error: zip() argument 2 is shorter than argument 1"),
            Logged("Put task failed for key <key>: zip() argument 2 is shorter than argument 1"),
            Failed(
                kind="ValueError",
                text="zip() argument 2 is shorter than argument 1",
                within="protocol.py:_prepare_params",
            ),
        ),
        sentence="a chunk compressed by cachegen has a shape and no dtype",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.12,<0.5.6"},
        cause="RemoteMetadata pairs the shapes of a chunk with its dtypes, one to one. A chunk that cachegen has "
        "compressed is plain bytes: one shape and, in these releases, an empty list of dtypes. Every put fails, the "
        "engine goes on, and no other engine finds anything.",
        now="remote_serde: naive (LMCACHE_REMOTE_SERDE=naive) on every engine, and restart",
        fixed={"lmcache": "0.5.6"},
        threads=(_LMCACHE + "issues/2787",),
    ),
    Problem(
        code="KVD483",
        name="cachegen-model-not-known",
        severity=Severity.CRASH,
        title="CacheGen has no settings for this model.",
        shows=(
            Failed(kind="ValueError", text="Model <model> not supported by CacheGenConfig"),
            Failed(kind="ValueError", text="num_hidden_layers is None for model <model>"),
        ),
        sentence="{model}",
        connectors=_IN_PROCESS,
        cause="remote_serde: cachegen counts its bins from the model's name: it knows some families, and asks Hugging "
        "Face for the number of layers of others (which needs the network, or a folder with config.json).",
        now="remote_serde: naive (LMCACHE_REMOTE_SERDE=naive) in every engine that shares the store, and restart",
        good="no release knows every model (0.5.6): remote_serde: naive",
    ),
    Problem(
        code="KVD484",
        name="remote-store-without-cpu-pool",
        severity=Severity.CRASH,
        title="A remote store needs a pool in host memory, and there is none.",
        shows=(Failed(kind="AssertionError", text="Remote backend requires local CPU backend as a buffer."),),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.15"},
        cause="Chunks go through the CPU pool on their way, also with local_cpu: false; max_local_cpu_size is 0.",
        now="max_local_cpu_size: 5 (LMCACHE_MAX_LOCAL_CPU_SIZE=5) or more, local_cpu: false if nothing is to stay "
        "there",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD485",
        name="maru-not-installed",
        severity=Severity.CRASH,
        title="The Maru backend's packages are not installed.",
        shows=(Failed(kind="ImportError", text="The 'maru' and 'maru_lmcache' packages are required"),),
        releases={"lmcache": ">=0.4.3"},
        cause="maru_path is set, and its two packages are no part of LMCache.",
        now="install them as Maru's own documentation says, or leave maru_path out and take local_disk or remote_url",
        good="an image with both packages",
    ),
)
