"""Problems without a line of their own: wrong answers, set-ups that do nothing, imports that are cut off."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_OF_LMCACHE = r"(?i)lmcache"

PROBLEMS = (
    Problem(
        code="KVD1316",
        name="images-share-kv",
        severity=Severity.WRONG,
        title="Prompts with the same text and different images share KV: the answer is about another image.",
        shows=(),
        said=(
            _OF_LMCACHE,
            r"(?i)multi-?modal|\bvision\b|image_pad|image_url|\bmm[ _]hash|[\w.]-VL\b",
            r"(?i)collision|hallucinat|wrong|incorrect|shar(?:e|ing) the same|other image|different images",
        ),
        releases={"lmcache": "<0.5.5"},
        cause="The placeholder tokens of all images are the same. LMCacheMPConnector before 0.5.3 keys by them alone, "
        "so that images do not count; LMCacheConnectorV1 from 0.3.2 to 0.5.4 puts 16 bits of the image's hash in their "
        "place (integration/vllm/utils.py, hex_hash_to_int16), before that nothing.",
        now="no --kv-transfer-config for models with images, or LMCache 0.5.5 or newer; empty the stores, whose keys "
        "are the old ones",
        fixed={"lmcache": "0.5.5"},
        sure=False,
        threads=(_LMCACHE + "issues/4086", _LMCACHE + "issues/690"),
    ),
    Problem(
        code="KVD1318",
        name="adapters-share-kv",
        severity=Severity.WRONG,
        title="Requests with different LoRA adapters share KV: LMCache's key does not name the adapter.",
        shows=(),
        said=(_OF_LMCACHE, r"(?i)\blora\b", r"(?i)adapter", r"(?i)\bkeys?\b|keying|wrong|incorrect|cross-adapter"),
        cause="LMCache keys by the model's name, the tokens and the layout, in every release up to 0.5.6. vLLM's own "
        "prefix cache has the adapter in its keys.",
        now='KVFIX="fix plus=KVF017,KVF111" (opt-in: chunks of requests with an adapter get other keys); without kvfix '
        "LMCacheMPConnector with a `cache_salt` of its own for each adapter in the requests, or no LMCache in engines "
        "with --enable-lora",
        good="no release of LMCache up to 0.5.6: keep kvfix (KVF017 in process, KVF111 with an lmcache server)",
        sure=False,
        threads=(_LMCACHE + "issues/2960", _LMCACHE + "issues/2961"),
    ),
    Problem(
        code="KVD1320",
        name="connector-of-v0-configured",
        severity=Severity.RISK,
        title="LMCacheConnector is configured: the connector of vLLM's old engine, which no longer exists.",
        shows=(),
        said=(
            r"kv_connector\\?[\"']?\s*[:=]\s*\\?[\"']?LMCacheConnector\b",
            r"(?i)kv[-_]transfer",
            r"(?i)\bnot\b|n't\b|\bno\b|fail|error|crash",
        ),
        cause="`LMCacheConnector` belongs to vLLM's V0 engine and to LMCache 0.2. The V1 engine does not take it, and "
        "what was documented for it (LMCACHE_USE_EXPERIMENTAL, lmcache_vllm) is gone.",
        now='--kv-transfer-config \'{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}\' with vLLM 0.11 or '
        "newer and LMCache 0.3.9 or newer",
        good="vLLM 0.11.2 or newer with LMCacheConnectorV1 or LMCacheMPConnector",
        sure=False,
        threads=(_LMCACHE + "issues/445",),
    ),
    Problem(
        code="KVD1322",
        name="nothing-comes-back-from-cachegen",
        severity=Severity.SLOW,
        title="What was stored with the serializer cachegen is not found, not loaded, or not the same.",
        shows=(),
        said=(
            # Without one seed the keys of several engines differ, whatever the serializer does (KVD1206).
            r"(?is)\A(?:(?!.*\b(?:two|2|another|second) (?:\w+ )?(?:vllm|engines?|instances?)\b)|(?=.*pythonhashseed))"
            r".*cachegen",
            r"(?i)remote_url|mooncake|redis|lm://",
            r"(?i)n't (?:\w+ )*?(?:retriev|hit|load|use|work|match)|not (?:retriev|hit|load|work)|wrong|accura|garbl",
        ),
        cause="CacheGen quantizes the KV and writes it in a form of its own: it rounds by its design, and it knows "
        "few layouts. With `naive` the bytes are written as they are.",
        now="remote_serde: naive (LMCACHE_REMOTE_SERDE=naive) in each engine, an empty store, and restart",
        good="remote_serde: naive, in every release",
        sure=False,
        threads=(_LMCACHE + "issues/689",),
    ),
    Problem(
        code="KVD1324",
        name="groups-of-other-shapes-in-nixl-store",
        severity=Severity.SLOW,
        title="A model with several KV groups and an `lmcache server` with a NIXL store: loads from L2 fail.",
        shows=(),
        said=(_OF_LMCACHE, r"\bL2\b", r"(?i)nixl", r"(?i)hybrid|sliding.window|gpt-oss|kv groups?"),
        releases={"lmcache": ">=0.5.1"},
        cause="With --separate-object-groups (the default of 0.5.1 and 0.5.2) each window size has objects of its own "
        "shape, and the NIXL store registers the shape of the first group only.",
        now="lmcache server ... --no-separate-object-groups, an empty L2, and restart",
        fixed={"lmcache": "0.5.3"},
        sure=False,
        threads=("https://github.com/ROCm/rocm-aic/issues/100",),
    ),
    Problem(
        code="KVD1326",
        name="lmcache-cannot-be-imported",
        severity=Severity.CRASH,
        title="LMCache, or vLLM's connector to it, cannot be imported.",
        shows=(),  # where the traceback ends in the body of a module (findings/described.py)
        cause="The traceback's last line decides. `undefined symbol`: LMCache's c_ops was built for another torch. `No "
        "module named 'vllm...'` or `cannot import name`: releases of vLLM and LMCache that are months apart. `No "
        "module named` another: a package that LMCache needs. `lib....so`: another CUDA.",
        now="python -c 'import torch, lmcache.c_ops, lmcache.integration.vllm.vllm_v1_adapter' in this container "
        "prints that line alone; then an LMCache of the same weeks as this vLLM (pip install --no-deps lmcache==...), "
        "or the image lmcache/vllm-openai of that release",
        good="a pair of releases from docs/matrix.json, or LMCache's own image",
        sure=False,
        threads=(
            "https://github.com/LMCache/LMCache/issues/585",
            "https://github.com/LMCache/LMCache/issues/1455",
        ),
    ),
    Problem(
        code="KVD1334",
        name="router-out-of-memory",
        severity=Severity.CRASH,
        title="The router of vLLM's production stack restarts: it has less memory than it takes.",
        shows=(),
        said=(
            # In one line: pods of engines and routers are listed together.
            r"(?i)\brouter\b[^\n]{0,120}(?:crash.?loop|\boom\b|oomkilled|keeps restarting)"
            r"|(?:crash.?loop|\boom\b|oomkilled)[^\n]{0,120}\brouter\b",
            r"(?i)production.stack|vllm[-_ ]router",
        ),
        cause="`kubectl describe pod` says OOMKilled where it is this. The chart's default limit is below what the "
        "router needs to start, and with routing by prefix its tree of prefixes grows without a bound.",
        now="routerSpec.resources: {requests: {memory: 2Gi}, limits: {memory: 4Gi}} in the chart's values; where it "
        "grows on, routingLogic: session or roundrobin in place of prefixaware",
        good="a chart with a higher limit (pull request 804), and no routing by prefix while its tree is unbounded",
        sure=False,
        threads=(
            "https://github.com/vllm-project/production-stack/issues/782",
            "https://github.com/vllm-project/production-stack/issues/687",
        ),
    ),
    Problem(
        code="KVD1336",
        name="nothing-stored-as-described",
        severity=Severity.SLOW,
        title="LMCache stores nothing, as far as the description says.",
        shows=(),
        said=(
            _OF_LMCACHE,
            r"(?i)\b(?:no|nothing|never|not)(?: \w+){0,5} (?:offload|stored|saved|written|created|keys?\b|files?\b)"
            r"|\bnever (?:stores|saves|writes)\b|\b(?:does|do|did) not (?:seem to )?(?:store|save|write)\b"
            r"|\b(?:stays?|remains?|is(?: always)?) empty\b"
            r"|n't (?:\w+ ){0,3}(?:offload|store|save|write)",
            r"(?i)disk|nvme|\bssd\b|redis|store|storage|offload",
        ),
        cause="In this order. From 0.3.11 on a prompt of fewer tokens than `chunk_size` (256) is not stored: "
        "`save_unfull_chunk` is false by default. No connector runs (`Created v1 connector` is missing), or LMCache "
        "has not read the file. `kv_role` is kv_consumer. The place has no room: `max_local_disk_size` in GB. Tokens "
        "of the answer are not stored without `save_decode_cache`.",
        now="a prompt of more than `chunk_size` tokens (or save_unfull_chunk: true, LMCACHE_SAVE_UNFULL_CHUNK=true); "
        "then the worker's line `Stored ... out of total ... tokens` must come",
        good="prompts of more than a chunk, and a configuration that LMCache logs",
        sure=False,
        threads=(_LMCACHE + "issues/2535",),
    ),
    Problem(
        code="KVD1352",
        name="store-starts-after-the-engine",
        severity=Severity.CRASH,
        title="vLLM starts before the remote store of LMCache is up.",
        shows=(),
        said=(
            _OF_LMCACHE,
            r"(?i)remote|cache.?server|lmcache_server|redis",
            r"(?i)\bbootstrap\b|not (?:yet )?(?:up|ready)|before (?:the )?(?:\w+ ){0,2}(?:server|storage|store|redis)",
            r"(?i)crash|fail|error|cannot",
        ),
        cause="LMCache connects when it starts. A store that does not answer then ends the worker, or leaves the "
        "engine without it, by release; nothing in a chart orders the pods.",
        now="an initContainer of the vLLM pod: until nc -z STORE PORT; do sleep 2; done; or restart the vLLM pods once "
        "the store is up",
        good="the same, in the chart, with a readiness probe on the store",
        sure=False,
        threads=("https://github.com/vllm-project/production-stack/issues/310",),
    ),
)
