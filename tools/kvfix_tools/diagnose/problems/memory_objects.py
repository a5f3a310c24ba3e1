"""Life of a chunk in LMCache's memory: pins, counts of references, loads that fail, layer by layer."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_ENGINE = "lmcache/v1/cache_engine.py"
_DISK = "lmcache/v1/storage_backend/local_disk_backend.py"

PROBLEMS = (
    Problem(
        code="KVD801",
        name="listed-chunk-without-memory",
        severity=Severity.CRASH,
        title="A chunk that a lookup listed has no memory when it is loaded, and the worker dies.",
        shows=(
            # The file is named so up to 0.3.13; in later releases it is KVD115.
            Failed(kind="AssertionError", source="assert memory_obj.tensor is not None", through="/gpu_connector.py"),
            Failed(kind="AssertionError", source="assert memory_obj_tensor is not None", through="/gpu_connector.py"),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.13"},
        replaces=("KVD802",),
        cause="`remote_url` decides. mooncakestore:// (0.3.10 to 0.3.12): after a batched put both the connector and "
        "the wrapper around it take a reference off, though one was added: the chunk is freed while the CPU cache "
        "lists it. Without Mooncake: the load got no memory to read the chunk into (`Failed to allocate` before it), "
        "or the chunk was evicted or released since the lookup (enable_async_loading).",
        now="with Mooncake local_cpu: false (LMCACHE_LOCAL_CPU=False); else a larger max_local_cpu_size and "
        "enable_async_loading: false; restart",
        good="LMCache 0.3.13 or newer: Mooncake's chunks are counted right, and a load without memory comes short; "
        "enable_async_loading only with kvfix (KVF013)",
        sure=False,
        threads=(
            _LMCACHE + "issues/2238",
            _LMCACHE + "issues/2368",
            _LMCACHE + "issues/2240",
            _LMCACHE + "issues/1060",
        ),
    ),
    Problem(
        code="KVD802",
        name="invalid-chunk-read",
        severity=Severity.WRONG,
        title="A chunk that LMCache lists has been freed already.",
        shows=(Logged("Trying to access an invalidated MemoryObj", "lmcache/v1/memory_management.py"),),
        connectors=_IN_PROCESS,
        cause="Its references were counted down once too often, or it was evicted between lookup and load. The "
        "settings decide. enable_async_loading: chunks that are fetched and then not used are released twice (KVF013). "
        "use_layerwise: layers are evicted while others of the chunk are loaded, and `copy_(): ... not NoneType` "
        "follows (KVD819). A remote_url of mooncakestore:// with LMCache 0.3.10 to 0.3.12: each put frees it (KVD801).",
        now="the one of these that is set: enable_async_loading: false (or kvfix run -- CMD, KVF013), use_layerwise: "
        "false, with Mooncake local_cpu: false; and restart",
        good="LMCache 0.3.13 or newer for Mooncake; up to 0.5.6 no release counts right with enable_async_loading "
        "(KVF013) or use_layerwise under load: leave them off",
        sure=False,
        threads=(_LMCACHE + "pull/2772", _LMCACHE + "issues/5090", _LMCACHE + "issues/951"),
    ),
    Problem(
        code="KVD803",
        name="chunk-freed-twice",
        severity=Severity.WRONG,
        title="The references of a chunk were counted below zero: it is freed while others use it.",
        shows=(
            Logged(
                "Ref count of MemoryObj <chunk>is negative: <count>.Double free occurred somewhere.",
                "lmcache/v1/memory_management.py",
            ),
        ),
        sentence="the chunk at {chunk} has {count} references",
        cause="The chunk's address tells: -1 is a chunk decoded by cachegen, which is in no pool, and the line is "
        "harmless. Any other address: with enable_async_loading it is KVF013; with Mooncake in LMCache 0.3.10 to "
        "0.3.12 it is KVD801. Another request may get the memory while it is read.",
        now="enable_async_loading: false; with remote_serde: cachegen and address -1 nothing is to be done",
        good="no release of LMCache up to 0.5.6 counts right with enable_async_loading: keep kvfix (KVF013)",
        sure=False,
        threads=(_LMCACHE + "issues/1365", _LMCACHE + "issues/5005", _LMCACHE + "pull/2559"),
    ),
    Problem(
        code="KVD804",
        name="chunk-collected-while-used",
        severity=Severity.RISK,
        title="Python's garbage collector frees chunks that were never released; a thread may deadlock over it.",
        shows=(
            Logged(
                "MemoryObj at <chunk> is being garbage collected with ref_count=<references>, pin_count=<pins>.",
                "lmcache/v1/memory_management.py",
            ),
        ),
        sentence="the chunk at {chunk} had {references} references and {pins} pins",
        releases={"lmcache": ">=0.3.14"},
        cause="The chunk's last user forgot it without releasing it: a load that was given up, or a request that ended "
        "during its lookup. It is freed in its destructor, which takes a lock that the thread may hold (KVF025).",
        now="kvfix run -- CMD (KVF025)",
        good="no release of LMCache is right yet (0.5.6): keep kvfix (KVF025)",
    ),
    Problem(
        code="KVD806",
        name="fetched-chunk-evicted",
        severity=Severity.HANG,
        title="A chunk was evicted while an asynchronous lookup fetched it, and the lookup is never answered.",
        shows=(Failed(kind="KeyError", text="CacheEngineKey(", within="prefetch_all_done_callback"),),
        connectors=_IN_PROCESS,
        cause="The fetch takes chunks from the CPU cache without asking whether they are still there; the error ends "
        "the task that would answer, so the scheduler waits until lookup_timeout_ms is over.",
        now="enable_async_loading: false, or a larger max_local_cpu_size, and restart",
        good="no release of LMCache is right yet (0.5.6): leave enable_async_loading at false",
    ),
    Problem(
        code="KVD816",
        name="async-lookup-fails",
        severity=Severity.SLOW,
        title="A worker fails at every lookup that the scheduler asks for; each request waits, and hits nothing.",
        shows=(
            Logged(
                "Error processing request from scheduler:",
                "lmcache/v1/lookup_client/lmcache_async_lookup_client.py",
            ),
        ),
        replaces=("KVD211",),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.10"},
        cause="The error after the colon decides. Empty: an assertion without a text; with decode context parallelism "
        "(workers are named ..._DCP0) that is because LMCacheConnectorV1 does not support it.",
        now="enable_async_loading: false; with --decode-context-parallel-size: leave it out, and restart",
        good="with decode context parallelism LMCacheMPConnector of LMCache 0.5.5 or newer; else by the error",
        sure=False,
        threads=(_LMCACHE + "issues/1732",),
    ),
    Problem(
        code="KVD817",
        name="async-event-missing",
        severity=Severity.CRASH,
        title="A load asks for chunks that no asynchronous lookup has fetched, and the worker dies.",
        shows=(
            Failed(
                kind="AssertionError",
                text="of type <kind> is not done or not found.",
                at="lmcache/v1/event_manager.py",
            ),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.9.post1"},
        cause="The lookup's result was handed out or cleaned up already: the request was preempted and loads again, or "
        "its lookup was given up (`is still waiting for async lookup` before it). Which, the lines of this request "
        "tell.",
        now="enable_async_loading: false, and restart",
        good="no release of LMCache is known to be right (0.5.6 asserts it too): leave enable_async_loading at false",
        sure=False,
    ),
    Problem(
        code="KVD818",
        name="more-tokens-than-slots-at-load",
        severity=Severity.CRASH,
        title="A load has more token ids than slots, or fewer, and the worker dies.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert len(tokens) == len(slot_mapping)",
                at="lmcache/integration/vllm/vllm_v1_adapter.py",
            ),
        ),
        sentence="the tracker counts other tokens than the request has slots for",
        connectors=_IN_PROCESS,
        cause="The request was preempted or a load of it failed: its tracker kept the tokens of before and has the "
        "blocks of after, or its list of blocks was extended twice (KVF014, KVF022, KVF023).",
        now="kvfix run -- CMD; without it fewer preemptions: a higher --gpu-memory-utilization, a lower --max-num-seqs",
        good="no release of LMCache is right yet: 0.5.6 with kvfix (KVF022, KVF023)",
        sure=False,
        threads=(_LMCACHE + "issues/1361",),
    ),
    Problem(
        code="KVD820",
        name="backend-answers-nothing",
        severity=Severity.CRASH,
        title="A store that reported the chunks gives none of them, and the worker dies.",
        shows=(Failed(kind="AssertionError", text="Failed to get memory objects from storage backend", at=_ENGINE),),
        sentence="the store that was to give the chunks gave nothing at all",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.13"},
        cause="The store lost its connection or its chunks between lookup and load; an empty answer is asserted not to "
        "happen.",
        now="unset remote_url (or the store that failed) and restart; the WARNING before it says what went wrong",
        fixed={"lmcache": "0.3.13"},
    ),
    Problem(
        code="KVD821",
        name="mask-not-aligned",
        severity=Severity.CRASH,
        title="What vLLM has itself does not end at a chunk, and the load is refused.",
        shows=(
            Failed(
                kind="ValueError",
                text="The number of Falses in the mask is not a multiple of the chunk size.",
                at="lmcache/v1/token_database.py",
            ),
        ),
        sentence="vLLM's own part of the prompt ends within a chunk",
        connectors=_IN_PROCESS,
        cause="The part that vLLM has itself must be cut to whole chunks before LMCache is asked. Releases before "
        "0.3.9 did not do it everywhere; in newer ones another caller of LMCache gives such a mask, or the processes "
        "have other chunk sizes.",
        now="chunk_size: 256 and the same file for every process (LMCACHE_CONFIG_FILE); --no-enable-prefix-caching",
        good="LMCache 0.3.9 or newer, whose adapter cuts the mask to whole chunks",
        sure=False,
        threads=(_LMCACHE + "issues/727",),
    ),
    Problem(
        code="KVD822",
        name="remote-lookup-timed-out",
        severity=Severity.SLOW,
        title="A remote store answers an asynchronous lookup or fetch too late, and it is given up.",
        shows=(
            Logged("batched_async_contains timed out", "lmcache/v1/storage_backend/remote_backend.py"),
            Logged("batched_get_non_blocking timed out", "lmcache/v1/storage_backend/remote_backend.py"),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.10"},
        cause="The store needs longer than blocking_timeout_secs (10 seconds unless set) for the chunks of one "
        "request. What was fetched so far is not released in every case.",
        now="blocking_timeout_secs: 30, or enable_async_loading: false, and restart; look at the store's own load",
        good="a store, or a network, that brings a prompt's chunks in time; no release changes that",
        threads=(_LMCACHE + "issues/3381", _LMCACHE + "pull/1960"),
    ),
    Problem(
        code="KVD824",
        name="fetch-fails",
        severity=Severity.SLOW,
        title="What an asynchronous lookup had fetched failed on its way: the load is left out and computed again.",
        shows=(Logged("Error popping event for request <request>: <error>", _ENGINE),),
        sentence="request {request}: {error}",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.10.post1"},
        quotes=True,
        cause="The error at the end is of the store that fetched (remote, disk, P2P). The scheduler had counted the "
        "hit.",
        now="look at that store; enable_async_loading: false where it fails often, and restart",
        good="keep it so: no release fetches again",
        sure=False,
    ),
    Problem(
        code="KVD826",
        name="chunk-without-pool",
        severity=Severity.RISK,
        title="A chunk that is in no pool was given up. The line speaks of a leak; there is none.",
        shows=(
            Logged(
                "Parent allocator is None when trying to free MemoryObj.This could cause memory leak",
                "lmcache/v1/memory_management.py",
            ),
        ),
        sentence="the chunk's memory is torch's own, and goes with it",
        cause="Chunks that CacheGen has decoded (remote_serde: cachegen, the controller's decompress) hold a tensor of "
        "their own and no place in the CPU buffer, so there is nothing to give back.",
        now="nothing; to be rid of the line remote_serde: naive (LMCACHE_REMOTE_SERDE=naive)",
        good="harmless in every release",
        sure=False,
        threads=(_LMCACHE + "issues/1704",),
    ),
    Problem(
        code="KVD475",
        name="release-of-fetched-chunks-fails",
        severity=Severity.LEAK,
        title="Chunks that were fetched for a lookup could not be released: their memory may stay taken.",
        shows=(
            Logged("Error during cleanup_memory_objs for lookup_id=<id>: <error>", "lmcache/v1/cache_engine.py"),
            Logged("Error releasing memory object: <error>", "lmcache/v1/cache_engine.py"),
        ),
        sentence="{error}",
        releases={"lmcache": ">=0.3.10"},
        quotes=True,
        sure=False,
        cause="With enable_async_loading chunks are fetched before the request runs; when it is aborted they are "
        "released. The error is the fetch's own (the store failed), or a chunk that is gone already.",
        now="what the error names; if the pool fills up: restart, enable_async_loading: false",
        good="LMCache 0.5.6 with kvfix run -- CMD; else enable_async_loading: false",
    ),
)
