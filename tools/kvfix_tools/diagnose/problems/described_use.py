"""Problems of LMCache's use that people describe: a slow store, metrics, hits, the controller."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_STACK = "https://github.com/vllm-project/production-stack/"
_OF_LMCACHE = r"(?i)lmcache"

PROBLEMS = (
    Problem(
        code="KVD1224",
        name="cache-server-by-its-old-name",
        severity=Severity.CRASH,
        title="The cache server is started by a name that LMCache no longer has.",
        shows=(
            Logged("executable file `lmcache_experimental_server` not found in $PATH"),
            Logged('"lmcache_experimental_server": executable file not found in $PATH'),
            Logged("lmcache_experimental_server: command not found"),
            Logged("lmcache_experimental_server: not found"),
        ),
        cause="The operator of vLLM's production stack starts a CacheServer with `lmcache_experimental_server`, its "
        "name in LMCache 0.2. From 0.3.9 on at the latest it is `lmcache_server HOST PORT` (lm://).",
        now="an image with the old name: FROM lmcache/vllm-openai:..., then RUN ln -s /opt/venv/bin/lmcache_server "
        "/opt/venv/bin/lmcache_experimental_server; or in place of the CacheServer a Deployment of one's own with "
        '["/opt/venv/bin/lmcache_server", "0.0.0.0", "8000"]',
        good="an operator that starts lmcache_server",
        threads=(_STACK + "issues/869",),
    ),
    Problem(
        code="KVD1674",
        name="abort-ends-the-engine-as-described",
        severity=Severity.CRASH,
        title="A request is aborted, and EngineCore dies of it.",
        shows=(),
        said=(
            _OF_LMCACHE,
            r"(?i)\babort(?:s|ed|ing|ion)?\b[^\n]{0,30}\b(?:request|retrieve|load)|(?:request|client)\w*[ -]"
            r"(?:is |was |are |that (?:is|are) )?(?:abort|cancel|disconnect)",
            r"(?i)crash\w*|brings? down|\bkill\w*|\bdies\b|AssertionError|EngineDead",
        ),
        cause="Two assertions, told apart by the last frame. `request_finished`: LMCacheConnectorV1 of LMCache "
        "0.4.5 to 0.5.0 asks the scheduler's side for an engine that only workers have (KVD108). "
        "`_update_from_kv_xfer_finished`: a load that was in flight is reported done twice, and vLLM has deleted the "
        "request at the first report (KVD109; LMCacheMPConnector and others).",
        now="kvfix run -- CMD (KVF004, KVF201); or LMCache 0.5.1 or newer, which ends the first",
        good="LMCache 0.5.1 or newer for the first; for the second no release is right yet: keep kvfix (KVF201)",
        sure=False,
        threads=(_LMCACHE + "issues/3688", _LMCACHE + "issues/4185", _LMCACHE + "pull/3340"),
    ),
    Problem(
        code="KVD1226",
        name="controller-knows-no-such-tokens",
        severity=Severity.SLOW,
        title="LMCache's controller answers a lookup with an empty layout: it knows no chunk of these tokens.",
        shows=(),
        said=(r"(?i)/lookup\b|\blookup", r"layout_info\\?[\"']?\s*:\s*\{\s*\}"),
        cause="In this order. The controller hashes the tokens itself: without the same PYTHONHASHSEED as the engines "
        "it gets other keys, and it takes chunks of 256 tokens, whatever `chunk_size` the engines have. The worker has "
        "not registered (`Registering lmcache instance-worker`), or nothing was stored: a prompt shorter than a chunk.",
        now="PYTHONHASHSEED=0 for lmcache_controller and for each engine, chunk_size: 256, enable_controller: true, "
        "and a prompt of more than 256 tokens; the controller first, then the engines",
        good="the same, in each release up to 0.5.6",
        sure=False,
        threads=(_LMCACHE + "issues/1705",),
    ),
    Problem(
        code="KVD1242",
        name="decoder-computes-again",
        severity=Severity.SLOW,
        title="With LMCache's disaggregated prefill the decoder computes the prompt itself.",
        shows=(),
        said=(
            _OF_LMCACHE,
            r"enable_pd|pd_role|kv_(?:consumer|producer)|(?i:disagg\w*)|\b[Pp]/?[Dd]\b|(?i:\b(?:x|\d)p(?:y|\d)d\b)",
            r"(?i)decod\w*[^\n]{0,50}(?:re-?comput|comput\w+ (?:it|every|all|the prompt)|prefills? (?:it|again)"
            r"|performs? prefill|\bmiss(?:ed|es)\b|(?:retrieves?|hits?) (?:nothing|no)\b"
            r"|(?:not|n't|never) (?:\w+ )?(?:hit|retriev|reus|us))|decoder[^\n]{0,20}\n[^\n]{0,60}hit tokens: 0",
        ),
        cause="In this order. The request goes to the decoder without the proxy, or before the prefiller's notice "
        "(`pd_proxy_host`, `pd_proxy_port`), or with another prompt (the first token added). The two hash with "
        "different seeds. The decoder's buffer is full (`pd_buffer_size`; `Failed to allocate memory "
        "object`): what does not arrive is computed.",
        now="PYTHONHASHSEED=0 on both sides; every request through LMCache's disagg_proxy_server.py; a larger "
        "pd_buffer_size. Then kvfix-diagnose with the logs of prefiller and decoder together: the decoder's line "
        "`LMCache hit tokens` says what it was given",
        good="the same, in each release up to 0.5.6",
        sure=False,
    ),
    Problem(
        code="KVD1250",
        name="looked-up-whole-stored-by-layer",
        severity=Severity.SLOW,
        title="With use_layerwise and enable_async_loading no lookup ever hits.",
        shows=(),
        said=(
            r"(?i)enable_async_loading\W{1,6}true",
            r"(?i)use_layerwise\W{1,6}true",
            r"(?i)\b(?:0|zero|no|never)\b[- ](?:\w+ ){0,2}hits?\b"
            r"|\bhit[ _]?(?:tokens?|rate)\W{1,4}(?:is )?(?:0|zero)\b",
        ),
        releases={"lmcache": "<0.4.6"},
        cause="Layerwise stores write a key for each layer of a chunk; the asynchronous lookup of these releases asks "
        "for the key of the whole chunk, which no store has (cache_engine.py, async_lookup_and_prefetch).",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), or enable_async_loading: false "
        "(LMCACHE_ENABLE_ASYNC_LOADING=False), and restart",
        fixed={"lmcache": "0.4.6"},
        threads=(_LMCACHE + "pull/3252",),
    ),
    Problem(
        code="KVD1792",
        name="preempted-request-not-loaded",
        severity=Severity.WRONG,
        title="A request that was preempted does not load what LMCache has for it.",
        shows=(),
        said=(
            _OF_LMCACHE,
            r"(?is)\A(?!.*(?:assert|crash|traceback|\bdies\b)).*\bpreempt",
            r"(?i)(?:not|n't|never|skips?|instead of)\b[^\n.]{0,30}(?:retriev|load|reus|hit|look)|re-?comput|reload",
        ),
        cause="Before 0.3.10 LMCacheConnectorV1 promises it a hit that no step loads: vLLM counts it as computed, its "
        "text is wrong, and wrong KV is stored (KVF014). From 0.3.10 on it is looked up and loaded. "
        "LMCacheMPConnector promises it nothing in every release up to 0.5.6 (pulls 4612 and 5248 are open): it is "
        "computed again, and right.",
        now="LMCache 0.3.10 or newer, or kvfix run -- CMD (KVF014), and empty stores that were filled before; fewer "
        "preemptions: a smaller --max-num-seqs, a larger --gpu-memory-utilization",
        good="LMCacheConnectorV1 of LMCache 0.3.10 or newer with kvfix (KVF022, KVF023 for what is left of it up to "
        "0.5.6); no release of LMCacheMPConnector loads it",
        sure=False,
        threads=(_LMCACHE + "issues/1969", _LMCACHE + "pull/4612"),
    ),
    Problem(
        code="KVD1246",
        name="answers-are-not-stored",
        severity=Severity.RISK,
        title="LMCache stores prompts, and not the tokens that the model generates.",
        shows=(),
        said=(
            _OF_LMCACHE,
            r"(?i)\b(?:not|never|n't) (?:cached?|stored?|saved?|offload\w*) (?:\w+ )?(?:answers?|responses?|outputs?\b|"
            r"generated|decoded?\b)",
        ),
        cause="`save_decode_cache` is false by default: chunks are stored as they are computed from a prompt. In the "
        "next turn of a conversation the answer is a part of the prompt, and is stored then.",
        now="save_decode_cache: true (LMCACHE_SAVE_DECODE_CACHE=true), and restart; LMCacheMPConnector: "
        '"lmcache.mp.save_decode_cache": true from 0.5.6 on, before it always does. Whole chunks only',
        good="nothing has to change",
        sure=False,
    ),
    Problem(
        code="KVD1248",
        name="hits-get-fewer",
        severity=Severity.SLOW,
        title="The hit rate of LMCache falls with time, or from turn to turn.",
        shows=(),
        said=(
            _OF_LMCACHE,
            r"(?i)\bhit(?:s| ?-?rate| ratio)?\b[^\n.]{0,30}"
            r"\b(?:drops?|falls?|declin\w+|decreas\w+|goes down|degrad\w+)",
        ),
        cause="In this order. The cache is full, and chunks are evicted before they come again: the least recently "
        "used go first, so that turns of many conversations push each other out. The prompt of a later turn does not "
        "begin as the one before: a template that takes out earlier reasoning (<think>), a date, tools in another "
        "order. Stores fail (`Failed to allocate`), or the store was given up.",
        now="max_local_cpu_size (--l1-size-gb) for the tokens of all conversations at once, or a second store behind "
        "it (local_disk, an L2); compare two turns' token ids (/tokenize of both prompts) up to the first difference",
        good="room for what comes again, and prompts that only grow at their end",
        sure=False,
    ),
    Problem(
        code="KVD1228",
        name="store-is-slower-than-the-gpu",
        severity=Severity.SLOW,
        title="A hit in a remote store of LMCache takes longer than to compute the prompt.",
        shows=(),
        said=(
            _OF_LMCACHE,
            r"(?i)remote_url|lmcache_remote_url|\bredis\b|\bvalkey\b|lm://|s3://|lmcache_server",
            r"(?i)slower than|slower (?:on|with|when) (?:a )?(?:hit|cache)|(?:latency|TTFT|time)[^\n]{0,60}longer"
            r"|longer than (?:the )?(?:first|without|prefill|re-?comput)",
        ),
        cause="A token has 2 x layers x KV heads x head size x bytes of KV: 0.13 MB (Llama 8B), 0.26 MB (Qwen2.5 32B), "
        "0.33 MB (Llama 70B), so that 20,000 tokens are 2.6 to 6.6 GB. A GPU computes some thousand tokens a second; a "
        "Redis or lm:// server on TCP brings some 100 MB a second, in chunks one after another in older releases.",
        now="what is used again into the machine's own memory: local_cpu: true and a max_local_cpu_size that holds it "
        "(it is asked first); --kv-cache-dtype fp8 halves the bytes; else a store by RDMA (Mooncake). The worker's "
        "line `Retrieved ... tokens` has size, cost and throughput: tokens divided by cost against the prefill's",
        good="a store whose throughput is above the prefill's tokens a second times the bytes of a token",
        sure=False,
        threads=(_LMCACHE + "issues/914",),
    ),
    Problem(
        code="KVD1236",
        name="counters-of-loads-stay-at-zero",
        severity=Severity.RISK,
        title="LMCache's counters of hit tokens stay at 0 although its lookups hit.",
        shows=(),
        said=(
            _OF_LMCACHE,
            r"num_(?:vllm_)?hit_tokens(?:_total)?",
            r"(?i)(?:\bis|stays?|remains?|reports?|always|shows?)\b[^\n]{0,24}\b(?:0|zero)\b",
        ),
        cause="num_hit_tokens and num_vllm_hit_tokens count where a load takes place (cache_engine.py, "
        "vllm_v1_adapter.py), num_lookup_hits where a lookup answers. While vLLM's own prefix cache has what LMCache "
        "hits (`need to load` is 0 or below), nothing is loaded, and only the lookups count.",
        now="a panel of num_lookup_hits / num_lookup_tokens for LMCache, vllm:prefix_cache_hits for vLLM; loads show "
        "with --no-enable-prefix-caching, or after more tokens than the GPU holds",
        good="LMCache 0.3.15 for num_vllm_hit_tokens, which then counts every request with a hit; else nothing has to "
        "change",
        sure=False,
        threads=(_STACK + "issues/818", _LMCACHE + "issues/2574"),
    ),
    Problem(
        code="KVD1238",
        name="packed-layout-mixes-kv",
        severity=Severity.WRONG,
        title="LMCacheConnectorV1 takes the packed K and V of vLLM 0.26 and newer apart wrongly: hits give wrong text.",
        shows=(),
        said=(
            _OF_LMCACHE,
            r"(?i)corrupt|wrong|incorrect|garbled|gibberish",
            r"(?i)\bpacked\b|\bfused\b|44455|kv[- ]cache layout|issues/4463",
        ),
        releases={"vllm": ">=0.26"},
        cause="vLLM 0.26 and newer have K and V of a head next to each other. LMCache in vLLM's process takes that for "
        "one plane of wider rows, and moves half of the KV, to wrong places. No line tells of it.",
        now="kvfix run -- CMD (KVF020), or LMCacheMPConnector with an `lmcache server`; empty local_disk and remote "
        "stores that were filled so",
        good="no release of LMCacheConnectorV1 is right yet (0.5.6): keep kvfix (KVF020)",
        sure=False,
        threads=(
            "https://github.com/ai-dynamo/dynamo/issues/14416",
            _LMCACHE + "issues/4463",
            _LMCACHE + "issues/4614",
            "https://github.com/vllm-project/vllm/issues/52617",
        ),
    ),
)
