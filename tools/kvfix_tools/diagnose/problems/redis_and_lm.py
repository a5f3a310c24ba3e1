"""Redis, Valkey and the lm:// server as remote stores: restarts, limits, passwords."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem, either

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")

PROBLEMS = (
    Problem(
        code="KVD863",
        name="store-wants-tls",
        severity=Severity.SLOW,
        title="The Redis server breaks off plain connections: it speaks TLS only.",
        shows=(
            Logged("Remote connection failed in contains: Error while reading from <server> : (104, 'Connection reset"),
            Logged("Remote connection failed in batched_contains: Error while reading from <server> : (104, 'Conn"),
        ),
        sentence="{server} reset the connection",
        connectors=_IN_PROCESS,
        cause="Redis services in clouds take TLS connections only, and reset those that begin in plain text. A server "
        "that was restarted resets once; this one resets each time.",
        now="remote_url: rediss://:PASSWORD@HOST:6379 (two s), and restart",
        good="keep it so: the set-up was wrong, and no release changes that; rediss:// is in LMCache 0.3.9 and newer",
        sure=False,
        threads=(_LMCACHE + "issues/929",),
    ),
    Problem(
        code="KVD864",
        name="lm-server-restarted",
        severity=Severity.SLOW,
        title="The lm:// server was stopped or restarted; the connector never connects anew, and never hits again.",
        shows=(
            Logged("Remote connection failed in contains: unpack requires a buffer of <count> bytes"),
            Logged("Remote connection failed in batched_contains: unpack requires a buffer of <count> bytes"),
            Logged("lm connector failed in exists: unpack requires a buffer of <count> bytes"),
            Logged("Error in LMCache lookup server: unpack requires a buffer of <count> bytes"),
            Failed(kind="error", text="unpack requires a buffer of <count> bytes"),
        ),
        sentence="the lm server closed the connection",
        said=(r"LMCServerConnector|\blm://", r"(?i)broken pipe|\bEPIPE\b|\bre-?connect", r"(?i)\brestart|\brolled?\b"),
        connectors=_IN_PROCESS,
        cause="A dead socket gives 0 bytes where an answer should be. The connector opens its socket once and keeps "
        "it; the error is logged, and the next question goes to the same socket. vLLM's V0 connector raises it into "
        "the engine (HTTP 500). Where the server's own log ends in an exception, the request that it failed at ends "
        "it again.",
        now="restart vLLM after the lm server (python -m lmcache.v1.server, lmcache_server) is up again",
        good="no release of LMCache reconnects an lm:// socket (0.5.6): redis:// or valkey://, or `lmcache server` "
        "with LMCacheMPConnector",
        threads=(_LMCACHE + "issues/651", _LMCACHE + "issues/471", _LMCACHE + "issues/3565"),
    ),
    Problem(
        code="KVD866",
        name="store-died-under-writes",
        severity=Severity.SLOW,
        title="The remote store went away while chunks were written to it.",
        shows=(
            Logged("Put task failed for key <key>: [Errno 32] Broken pipe"),
            Logged("Put task failed for key <key>: [Errno 104] Connection reset by peer"),
            Logged("batched put error: [Errno 32] Broken pipe"),
            Logged("Remote connection failed in contains: [Errno 32] Broken pipe"),
        ),
        said=(
            r"lmcache_server|\blm://",
            r"(?i)\bevict",
            r"(?i)out of memory|memory (?:exhaust|limit)|\bOOM|gets? full|unbounded",
        ),
        sentence="the store closed the connection while a chunk was written",
        connectors=_IN_PROCESS,
        cause="The store's process ended: look whether its pod says OOMKilled. lmcache_server (lm://) evicts nothing "
        "in any release, so it grows until its memory limit; and an lm:// connector does not connect anew. Or lm:// "
        "points at `lmcache server`, the multi-process one, which hangs up on it after 30 seconds.",
        now="restart the store with more memory, then vLLM; or remote_url: redis://HOST:6379 with Redis set to "
        "maxmemory 50gb and maxmemory-policy allkeys-lru; with lm:// start `lmcache_server HOST PORT`, one word, while "
        "`lmcache server` wants LMCacheMPConnector without a remote_url",
        good="no release of lmcache_server evicts: Redis or Valkey with a limit, or `lmcache server --l1-size-gb 50 "
        "--eviction-policy LRU` with LMCacheMPConnector",
        threads=(
            "https://github.com/LMCache/LMCache/issues/1938",
            "https://github.com/vllm-project/production-stack/issues/923",
            _LMCACHE + "issues/900",
        ),
    ),
    Problem(
        code="KVD1218",
        name="redis-not-connected",
        severity=Severity.CRASH,
        title="Redis cannot be reached from this process.",
        shows=(
            Failed(kind="ConnectionError", within="redis/connection.py:connect_check_health"),
            Failed(kind="ConnectionError", within="redis/connection.py:<lambda>", source="self._connect()"),
        ),
        cause="Where it is raised in LMCache's own thread, that thread ends: a lookup server that has lost it answers "
        "no more, and the engine waits for ever. It is the Redis of remote_url, or before LMCache 0.3.7 that of "
        "lookup_url with enable_p2p. The error's last line tells refused (not started), timed out (a firewall) and "
        "an unknown name.",
        now="`nc -vz HOST PORT` of remote_url or lookup_url from this container; start Redis first, bound to 0.0.0.0, "
        "then vLLM; or leave enable_p2p and lookup_url out",
        good="a readiness probe of Redis before the engine starts",
        sure=False,
        threads=(_LMCACHE + "issues/1491",),
    ),
    Problem(
        code="KVD1216",
        name="probe-of-lm-server-is-not-there",
        severity=Severity.CRASH,
        title="Kubernetes restarts lmcache_server: the chart's probe is no file of the image, or asks HTTP.",
        shows=(Logged("/workspace/LMCache/examples/kubernetes/health_probe.py"),),
        cause="production-stack's chart runs /workspace/LMCache/examples/kubernetes/health_probe.py in the cache "
        "server's container, and newer images of LMCache do not have it. lmcache_server speaks a protocol of its own "
        "over TCP, so that an HTTP probe gets no answer either.",
        now="livenessProbe: {tcpSocket: {port: 8000}, initialDelaySeconds: 30}, with the port of lmcache_server, in "
        "the chart's template or with `kubectl patch deployment`",
        good="a chart whose probe is a tcpSocket",
        threads=("https://github.com/vllm-project/production-stack/issues/1057",),
    ),
    Problem(
        code="KVD872",
        name="redis-evicted-half-a-chunk",
        severity=Severity.SLOW,
        title="Redis or Valkey has evicted a chunk's data and kept its header: the load comes short.",
        shows=(Logged("Key exists but KV cache does not exist.Might happen when the cache is evicted by"),),
        sentence="the header is there, the data is gone",
        connectors=_IN_PROCESS,
        replaces=("KVD1090",),
        cause="Header and data are two keys, and the server evicts key by key at its maxmemory. With tensor "
        "parallelism each rank has keys of its own, so the ranks differ too (KVD304).",
        now="more maxmemory for the server, or a shorter life of keys than its limit; the line is harmless if rare",
        good="no release of the redis:// connector keeps header and data in one key (0.5.6)",
        threads=(_LMCACHE + "issues/1467",),
    ),
    Problem(
        code="KVD823",
        name="ranks-differ-and-die",
        severity=Severity.CRASH,
        title="The ranks answer a lookup with different hits, and LMCache lets EngineCore die of it.",
        shows=(Failed(text="Lookup results (number of hit tokens) differ across"),),
        sentence="the ranks find different hits for the same tokens",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.6"},
        cause="Each rank keeps its part of a chunk and evicts by itself (CPU memory, disk; Redis: key by key); these "
        "releases raise where the ranks differ, newer ones take the least. A rank that is 0 from the first request on: "
        "PYTHONHASHSEED is not the same.",
        now="upgrade; until then PYTHONHASHSEED=0 for all processes, and a larger max_local_cpu_size, so that nothing "
        "is evicted; with redis:// in remote_url a larger maxmemory too",
        fixed={"lmcache": "0.3.6"},
        threads=(_LMCACHE + "issues/1379", _LMCACHE + "issues/1467"),
    ),
    Problem(
        code="KVD873",
        name="redis-full",
        severity=Severity.SLOW,
        title="Redis is full and takes no more: nothing is stored there.",
        shows=(
            Logged("OOM command not allowed when used memory"),
            Failed(kind="OutOfMemoryError", text="command not allowed when used memory"),
            Failed(kind="ResponseError", text="OOM command not allowed when used memory"),
        ),
        cause="The server is at its maxmemory with maxmemory-policy noeviction, which is Redis' default.",
        now="redis-cli config set maxmemory-policy allkeys-lru, or more maxmemory",
        good="both in redis.conf: maxmemory 50gb, maxmemory-policy allkeys-lru",
        sentence="the server refuses writes: used memory > maxmemory",
    ),
    Problem(
        code="KVD874",
        name="redis-refuses",
        severity=Severity.SLOW,
        title="Redis refuses LMCache: a password is missing or wrong, or the server is not ready.",
        shows=(
            Logged("NOAUTH Authentication required"),
            Logged("invalid username-password pair"),
            Logged("Authentication required."),
            Logged("max number of clients reached"),
            Logged("MISCONF Redis is configured to save RDB snapshots"),
            Failed(kind="AuthenticationError"),
        ),
        cause="What the line says: NOAUTH or a wrong pair: user and password in remote_url. `max number of clients`: "
        "every worker opens its own connections. MISCONF: the server cannot write its snapshot and takes no writes.",
        now="remote_url: redis://USER:PASSWORD@HOST:6379; redis-cli config set maxclients 10000; redis-cli config set "
        "stop-writes-on-bgsave-error no",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD899",
        name="lm-server-rejects-keys",
        severity=Severity.SLOW,
        title="lmcache_server (lm://), or a peer, cannot read the key of a chunk: its thread for that engine ends.",
        shows=(
            Failed(kind="ValueError", text="Invalid key string: <key>", within="server/__main__.py:handle_client"),
            Failed(kind="ValueError", text="Invalid key string: <key>"),
        ),
        sentence="{key}",
        sure=False,
        cause="A key is model@world size@rank@hash@dtype (up to 0.3.12 with `vllm@` before it). One part more, a plain "
        "number at its end, is a layer's: with use_layerwise: true no lmcache_server before 0.3.14 reads it "
        "(`parse_cache_key` looks for the number one part too early). Else engine and server, or two peers (P2P, P/D), "
        "are of different releases: the form of keys changed up to 0.3.15.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False) for a layer's key, until engines and server both have "
        "LMCache 0.3.14 or newer; else the same LMCache on engines and server; restart both",
        good="one release for all of them, LMCache 0.3.14 or newer",
        threads=(
            _LMCACHE + "issues/1790",
            _LMCACHE + "issues/2135",
            "https://github.com/LMCache/LMCache-Ascend/issues/89",
        ),
    ),
    Problem(
        code="KVD445",
        name="redis-view-of-other-format",
        severity=Severity.CRASH,
        title="LMCache before 0.3 cannot copy what it got from Redis into its buffer.",
        shows=(Failed(kind="NotImplementedError", text="memoryview: unsupported format <B"),),
        sentence="a chunk from Redis is not written into the buffer",
        releases={"lmcache": "<0.3.9"},
        cause="The buffer's memoryview has the format '<B', in which Python assigns no bytes. Stores work, the first "
        "hit fails.",
        now="another store than redis:// in remote_url; or vLLM 0.11.2 or newer with `pip install -U 'lmcache>=0.3.9'` "
        "(both: wheels of LMCache are compiled for the torch of their vLLM, and 0.8.5 has torch 2.6)",
        good="LMCache with pull 662 (May 2025): every 0.3 from 0.3.9 on casts the view; with the vLLM of that time",
        threads=(_LMCACHE + "issues/660", _LMCACHE + "pull/662"),
    ),
    Problem(
        code="KVD152",
        name="stored-by-another-lmcache",
        severity=Severity.CRASH,
        title="LMCache cannot read the header of a chunk or a message: another release wrote it.",
        shows=(
            Failed(kind="ValueError", text="<number> is not a valid MemoryFormat", within="protocol.py:deserialize"),
        ),
        sentence="{number} stands where the kind of memory should",
        sure=False,
        cause="The header before a chunk (lm://, redis://) is a row of numbers without a version, and its length has "
        "changed: seven numbers up to 0.3.11, as many as the model's KV has shapes later. lmcache_server or another "
        "engine of another release, or chunks that an older one left. Equal releases (`pip show lmcache`) on all of "
        "them decide.",
        now="one release of LMCache on engines and lmcache_server; empty the store (redis-cli FLUSHDB, restart "
        "lmcache_server), restart the engines",
        good="an empty store with each upgrade of LMCache",
        threads=(_LMCACHE + "pull/397",),
    ),
    Problem(
        code="KVD497",
        name="redis-is-a-cluster",
        severity=Severity.SLOW,
        title="The Redis server is a node of a cluster, and LMCache speaks to it alone.",
        shows=(
            Logged(": MOVED <slot> <node>:"),
            Failed(kind="MovedError"),
            Failed(kind="ResponseError", text="MOVED <slot> <node>:"),
            *either("CROSSSLOT Keys in request don't hash to the same slot"),
        ),
        said=(
            r"(?i)lmcache",
            r"(?i)\b(?:valkey|redis)[ -]clusters?\b",
            r"(?i)\bresp(?:_l2|\b)|`redis://|remote_url",
            r"(?i)single|one (?:host|node)|not (?:\w+ )?support|fails?\b",
        ),
        cause="redis:// takes the server for the only one; a node of a cluster refuses keys that belong to others. "
        "Managed ones (ElastiCache with cluster mode, MemoryDB) are clusters.",
        now='remote_url: "redis-cluster://HOST1:6379,HOST2:6379" (Valkey: valkey:// with extra_config: {valkey_mode: '
        "cluster}), and restart; `lmcache server` knows a cluster with valkey, not with resp",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
)
