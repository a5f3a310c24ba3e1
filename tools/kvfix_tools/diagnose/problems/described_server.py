"""Problems of LMCache's multi-process mode that people describe without a line of a log."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_SERVER = (
    r"LMCacheMP\w*|\blmcache[ .]server\b|lmcache/standalone|\bMP (?:mode|server|connector|deployment)"
    r"|(?i:multi-?process)"
)
_HEARTBEAT = r"(?i)heartbeats?\b"

PROBLEMS = (
    Problem(
        code="KVD1220",
        name="no-hits-from-a-server",
        severity=Severity.SLOW,
        title="With an `lmcache server` nothing hits, and no line of the text tells why.",
        shows=(),
        said=(
            r"LMCacheMPConnector|\blmcache server\b|lmcache/standalone",
            r"(?is)\A.{0,600}?(?:\bhits?(?: tokens| ?-?rate)?\b[^\n.]{0,40}\b0(?:\.0+)?%?(?![\w%]|\.\d)"
            r"|\b(?:no|never|zero|0) (?:\w+ ){0,3}hits?\b|cache miss|\u547d\u4e2d\u7387?[^\n]{0,8}0)",
        ),
        cause="In this order. vLLM's own prefix cache has the prompt: the external rate counts only what goes beyond "
        "it. The prompt is shorter than the server's `--chunk-size` (256), of which no part is stored. The server was "
        "restarted, or its L1 (`--l1-size-gb`) is smaller than what comes between. Stores fail, or the server is "
        "taken for dead: then its own log says so. PYTHONHASHSEED does not matter here: the server makes the keys.",
        now="one prompt of 2000 tokens twice, with --no-enable-prefix-caching; then kvfix-diagnose with the log of "
        "`lmcache server` and the engine's together: the server's lines tell what was stored and what was asked",
        good="what these lines show",
        sure=False,
        threads=(_LMCACHE + "issues/4094",),
    ),
    Problem(
        code="KVD1274",
        name="lm-url-of-the-mp-server",
        severity=Severity.SLOW,
        title="A remote_url of lm:// points at `lmcache server`, which speaks another protocol.",
        shows=(),
        said=(r"(?s)\A(?!.*LMCacheMP\w*Connector).*\blm://", r"\blmcache server\b[ \\\n]+--?\w"),
        cause="lm:// is the protocol of `lmcache_server`, one word. `lmcache server`, two words, is the multi-process "
        "one: it speaks ZeroMQ, takes the connection, gets no greeting, and hangs up after 30 seconds.",
        now='--kv-transfer-config \'{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both",'
        '"kv_connector_extra_config":{"lmcache.mp.host":"tcp://localhost","lmcache.mp.port":<its --port>}}\' '
        "with the server on vLLM's machine, and no remote_url; or keep lm:// and start `lmcache_server HOST PORT`",
        good="the same: the set-up was wrong, and no release changes that",
        sure=False,
        threads=(_LMCACHE + "issues/4213",),
    ),
    Problem(
        code="KVD1244",
        name="server-on-another-machine",
        severity=Severity.CRASH,
        title="The `lmcache server` runs on another machine than vLLM.",
        shows=(),
        said=(
            _SERVER,
            r"(?i)\b(?:another|other|different|separate|remote) (?:gpu )?(?:nodes?|machines?|hosts?)\b"
            r"|\bcross-(?:node|machine|host)\b|\bnode A\b|\u8de8\u8282\u70b9|\u8de8\u673a|\u591a\u673a"
            r"|\u53e6(?:\u4e00|\u5916)[^\n]{0,6}(?:\u673a\u5668|\u8282\u70b9)",
            r"(?i)connect|regist|share|sharing|\bfail|not found|cannot|can't|\u8fde\u63a5|\u5171\u4eab|\u62a5\u9519"
            r"|\u627e\u4e0d\u5230|\u65e0\u6cd5",
            r"(?i)lmcache\.mp\.host|\bserver\b",
        ),
        cause="The server opens the KV cache in the GPU's memory of vLLM's process (CUDA IPC), which works on one "
        "machine only, whatever `lmcache.mp.host` is. A port that is reached does not help.",
        now='one `lmcache server` on each machine, with "lmcache.mp.host": "tcp://localhost" for the engines beside it '
        "(Kubernetes: a DaemonSet). What machines share goes into an L2 that all servers have: --l2-adapter with S3, "
        "Redis or Valkey, Mooncake, or a file system that all mount",
        good="the same; LMCache's own transfers between servers are under construction (0.5.6)",
        sure=False,
        threads=(_LMCACHE + "issues/3618", _LMCACHE + "issues/3624"),
    ),
    Problem(
        code="KVD1230",
        name="scheduler-has-no-heartbeat",
        severity=Severity.SLOW,
        title="The scheduler's heartbeats to the servers never start: a server that was given up is not asked again.",
        shows=(),
        said=(
            _SERVER,
            _HEARTBEAT,
            r"(?i)schedul",
            r"(?i)(?:never|not|n't)(?: \w+){0,2} (?:start|created?\b|ping)|no heartbeat|before creating any",
        ),
        releases={"lmcache": ">=0.5.0"},
        fixed={"lmcache": "0.5.6"},
        cause="The collection of heartbeats is an empty dict from the start, and the function that starts them returns "
        "where it is not None. After one lookup that timed out the server stays out until vLLM restarts.",
        now="kvfix run -- CMD (KVF112), or restart vLLM",
        threads=(_LMCACHE + "issues/4963", _LMCACHE + "pull/5233"),
        sure=False,
    ),
    Problem(
        code="KVD1232",
        name="reconnect-waits-for-tcp",
        severity=Severity.SLOW,
        title="After a restart of the server a worker stays in degraded mode for two minutes.",
        shows=(),
        said=(
            _SERVER,
            _HEARTBEAT,
            r"(?i)degraded|unhealthy|re-?connect|re-?regist",
            r"\bSYN\b|(?i:connect[ _-]?timeout|\b(?:2|two) ?min|\b12\d ?s)",
        ),
        fixed={"lmcache": "0.5.6"},
        cause="The client's socket has no limit for a connection attempt before 0.5.6. One whose SYN is lost, as while "
        "Kubernetes takes the pod out of its Service, lasts as long as the system lets it: about 127 seconds.",
        now="a host's port or a headless Service in place of a ClusterIP; net.ipv4.tcp_syn_retries=2 in the engine's "
        "pod (7 seconds in place of 127)",
        threads=(_LMCACHE + "issues/4670", _LMCACHE + "pull/4671"),
        sure=False,
    ),
    Problem(
        code="KVD1234",
        name="server-stores-answers-too",
        severity=Severity.SLOW,
        title="LMCacheMPConnector stores the KV of generated tokens too, and fills L1 and L2 with it.",
        shows=(),
        said=(
            _SERVER,
            r"save_decode_cache|(?i:decode(?:d)? (?:kv|tokens|chunks)|generated tokens)",
            r"(?i)ignor|unbounded|write load|amplif|evict|fills?\b|grow",
        ),
        fixed={"lmcache": "0.5.6"},
        cause="Before 0.5.6 the connector hands every whole chunk to the server, of the prompt and of the answer; "
        "`save_decode_cache` is a setting of LMCacheConnectorV1, and it does not read it. Chunks that are never "
        "asked for again push prompts out.",
        now='LMCache 0.5.6, where "lmcache.mp.save_decode_cache" is false by default; before it a larger --l1-size-gb, '
        "and an L2 with `max_capacity_gb` and an eviction",
        threads=(_LMCACHE + "issues/5230",),
        sure=False,
    ),
    Problem(
        code="KVD1240",
        name="retrieve-without-an-answer",
        severity=Severity.HANG,
        title="A load from the `lmcache server` has no answer, and its request waits for ever.",
        shows=(),
        said=(
            _SERVER,
            r"(?i)retriev",
            r"WAITING_FOR_REMOTE_KVS|(?i:never (?:arrives?|resolves?|returns?|completes?)|\bhang|stuck)",
            r"(?i)forever|for ever|indefinitely|no timeout|\b\d{3,4} ?s\b|until (?:the )?(?:watchdog|client)",
        ),
        cause="The worker reports a load when the server answers, and there is no limit for that in any release up to "
        "0.5.6. Why there is no answer the server's log and stacks tell: a handler that failed, a thread that stands.",
        now="`kvfix dump PID` of the server and of EngineCore while it waits, and kvfix-diagnose on both; to go on, "
        "restart the server: its client then fails what is in flight, and vLLM computes it",
        good="no release up to 0.5.6 (LMCache pull request 5047 is open)",
        sure=False,
        threads=(_LMCACHE + "pull/5047", _LMCACHE + "issues/4759"),
    ),
    Problem(
        code="KVD1259",
        name="gauge-of-adapters-twice",
        severity=Severity.RISK,
        title="LMCache's server exports one gauge twice, and Prometheus drops one of the two.",
        shows=(),
        said=(r"lmcache_mp_l2_adapters", r"(?i)duplicate sample|same timestamp|\btwice\b|duplicat"),
        releases={"lmcache": ">=0.5,<0.5.3"},
        sure=False,
        cause="The parts that store to L2 and that prefetch from it both register `lmcache_mp.l2_adapters`. The cache "
        "works; only that number in Prometheus is the one of either of them.",
        now="nothing, and no alert on lmcache_mp_l2_adapters",
        good="LMCache 0.5.3 or newer",
        threads=(_LMCACHE + "pull/4216",),
    ),
    Problem(
        code="KVD1260",
        name="prompt-below-a-large-chunk",
        severity=Severity.SLOW,
        title="An `lmcache server` with a large --chunk-size stores nothing: the prompts are shorter than one chunk.",
        shows=(),
        said=(
            r"\blmcache server\b[^\n]*--chunk-size[ =](?:[3-9]\d\d|\d{4,})\b",
            r"(?is)\A.{0,1600}?(?:\bhits?(?: tokens| ?-?rate)?\b[^\n.]{0,40}\b0(?:\.0+)?%?(?![\w%]|\.\d)"
            r"|\b(?:no|never|zero|0) (?:\w+ ){0,3}hits?\b)",
            r"(?i)(?:\b(?:zero|no|0) (?:\w+ ){0,3}(?:blocks|chunks|objects|memory)\b|\bnothing is stored\b"
            r"|not found, skipping touch)",
        ),
        sure=False,
        cause="Only whole chunks of --chunk-size tokens are stored, and the sizes that hybrid models need (544 for "
        "Qwen3.5) are longer than a line of chat. Then no store is made, the server knows no session of the request "
        "(`not found, skipping touch`, which is harmless), and its L1 stays empty. If the prompts are longer, stores "
        "fail: the server's own log says so.",
        now="one prompt of three times --chunk-size tokens, twice: the second one hits (vLLM's own prefix cache first: "
        "--no-enable-prefix-caching to see it)",
        good="prompts of several chunks; a smaller --chunk-size only as a multiple of vLLM's block size for this model",
        threads=(_LMCACHE + "issues/4094",),
    ),
)
