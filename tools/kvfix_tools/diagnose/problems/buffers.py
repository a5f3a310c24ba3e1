"""Memory that is full: the CPU cache, staging buffers, PD buffers, disk and device pools, the server's L1."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem, ended_by

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_BACKENDS = "lmcache/v1/storage_backend"
_CPU, _DISK = f"{_BACKENDS}/local_cpu_backend.py", f"{_BACKENDS}/local_disk_backend.py"

PROBLEMS = (
    Problem(
        code="KVD834",
        name="pd-receiver-refuses",
        severity=Severity.WRONG,
        title="The decoder had no place for a request's chunks, and prefill broke its transfer off.",
        shows=(Logged("Receiver allocation failed for key", f"{_BACKENDS}/pd_backend_async.py"),),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.4.5"},
        cause="The decoder's log of the same time has the reason: its PD buffer is full, or too small for the prompt.",
        now="a larger pd_buffer_size in the configuration of both prefill and decode, and restart both",
        good="a pd_buffer_size for all requests at once; no release changes that",
    ),
    Problem(
        code="KVD836",
        name="buffer-not-whole-chunks",
        severity=Severity.CRASH,
        title="A paged buffer is not a whole number of chunks, and LMCache does not start.",
        shows=(
            Failed(kind="AssertionError", text="Buffer size <size> must be a multiple of align bytes <chunk>"),
            Logged("Buffer size <size> must be a multiple of align bytes <chunk>"),
        ),
        sentence="the buffer has {size} bytes, a chunk of this model {chunk}",
        connectors=_IN_PROCESS,
        cause="Paged memory (PD, P2P) is divided into chunks of this model's size; older releases do not round it "
        "down.",
        now="pd_buffer_size (bytes; P2P: max_local_cpu_size) = a multiple of the align bytes in the line",
        good="LMCache 0.4.3 or newer rounds pd_buffer_size down; 0.3.10 or newer max_local_cpu_size with P2P",
        threads=(_LMCACHE + "issues/1909", _LMCACHE + "pull/2694"),
    ),
    Problem(
        code="KVD838",
        name="disk-load-without-memory",
        severity=Severity.CRASH,
        title="A load from disk got no CPU memory to read into, and the worker dies.",
        shows=(
            Failed(kind="AssertionError", text="Memory allocation failed during disk load.", at=_DISK),
            Logged("Memory allocation failed during disk load.", _DISK),
        ),
        said=(
            r"(?i)fail\w* to allocate|allocation fail|(?:cannot|can ?not|can't) be allocated",
            r"(?i)\b(?:load|read|retriev|get)[^.\n]{0,60}(?:\b|local_)disk|disk[ _]?(?:load|read|backend)",
            r"(?i)lmcache",
        ),
        sentence="the CPU pool is full, and what is read from disk goes through it",
        connectors=_IN_PROCESS,
        cause="What is read from disk passes through the same CPU pool as what is stored; all in it is pinned or being "
        "written, so nothing may be evicted.",
        now="a larger max_local_cpu_size, local_cpu: true, and fewer requests at once (--max-num-seqs)",
        good="LMCache 0.3.9 or newer waits for memory here (KVD402 where it waits for ever); a max_local_cpu_size "
        "above the prompts at once ends it",
        threads=(_LMCACHE + "issues/969", _LMCACHE + "issues/559"),
    ),
    Problem(
        code="KVD839",
        name="disk-lock-kept",
        severity=Severity.HANG,
        title="An asynchronous load from disk failed and keeps the lock of the disk cache: every later access hangs.",
        shows=(
            Logged("Memory allocation failed during async disk load", _DISK),
            Failed(kind="AssertionError", text="Memory allocation failed during async disk load"),
            Failed(kind="AssertionError", text="not found in disk cache after pinning", at=_DISK),
        ),
        connectors=_IN_PROCESS,
        cause="batched_get_non_blocking returns, or raises, between acquire() and release() of disk_lock. The CPU pool "
        "was full, or the chunk was evicted after it was pinned.",
        now="restart vLLM with enable_async_loading: false, or without local_disk",
        good="no release of LMCache is right yet (0.5.6 leaves the lock): enable_async_loading: false with local_disk",
        threads=(_LMCACHE + "pull/3893", _LMCACHE + "issues/2502"),
    ),
    Problem(
        code="KVD840",
        name="disk-cache-full",
        severity=Severity.SLOW,
        title="The disk cache is full and nothing in it may be evicted: chunks are not stored.",
        shows=(
            Logged("No eviction candidates found. Disk space under pressure.", _DISK),
            Logged("Insufficient evictable disk cache space for <key>: need"),
            Logged("exceeding disk cache capacity <size> bytes"),
        ),
        connectors=_IN_PROCESS,
        cause="max_local_disk_size (GB, for each worker) is too small for what is pinned or being written at once, or "
        "smaller than a single chunk. It was 0 unless set.",
        now="max_local_disk_size: 100 (GB for each worker; LMCACHE_MAX_LOCAL_DISK_SIZE=100), and restart",
        good="a disk cache several times the CPU cache; no release changes that",
    ),
    Problem(
        code="KVD847",
        name="no-memory-for-remote-chunk",
        severity=Severity.SLOW,
        title="A chunk was fetched from a remote store and there is no CPU memory to put it into.",
        shows=(
            Logged("Failed to allocate memory during remote receive"),
            Logged("Failed to allocate memory during batched remote receive"),
            Logged("Batch-get aborted: unable to allocate any buffers."),
        ),
        connectors=_IN_PROCESS,
        replaces=("KVD1090",),
        cause="What comes from redis, lm, valkey or Mooncake passes through the CPU pool (max_local_cpu_size), and all "
        "of that is pinned or being written.",
        now="a larger max_local_cpu_size (GB for each worker), local_cpu: true, and restart",
        good="a max_local_cpu_size for all prompts that load at once; no release changes that",
        threads=(_LMCACHE + "issues/391",),
    ),
    Problem(
        code="KVD848",
        name="cpu-cache-leaks",
        severity=Severity.LEAK,
        title="The CPU cache is full and chunks are not stored; old releases do not free all that they pin or load.",
        shows=(
            Logged("Failed to allocate memory for the KV cache."),
            Logged("Failed to allocate memory for tensor(<shape>) because no memory is available"),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.9"},
        said=(
            r"(?i)lmcache",
            r"(?i)\bleak",
            r"(?i)\bhits?\b|not (?:be )?stored|cpu[ _]offload|local_cpu",
            r"(?<![.\d])0\.(?:1\.\d|2\.\d|3\.[0-8])(?!\d)|(?i:never unpin|not (?:be )?unpinned|stays? pinned)",
        ),
        cause="Chunks that a lookup pinned and no load took stay pinned for ever in these releases, and so do those "
        "that went to a remote store, so the pool fills up; with `local_disk` chunks that wait for the disk hold it "
        "too, and what is free lies in pieces. A shape of three numbers ([256, 2, 1024]) is a chunk of use_layerwise, "
        "whose loads freed nothing before 0.3.0 (pull request 670). A pool smaller than the prompts at once shows the "
        "same.",
        now="a larger max_local_cpu_size (LMCACHE_MAX_LOCAL_CPU_SIZE=40), no local_disk, use_layerwise: false, and "
        "restart vLLM when it is full",
        good="LMCache 0.3.11 or newer (a reporter saw it gone there); from 0.3.12 on pins run out after five minutes",
        sure=False,
        threads=(
            _LMCACHE + "issues/955",
            _LMCACHE + "issues/969",
            _LMCACHE + "issues/1285",
            _LMCACHE + "issues/1034",
            _LMCACHE + "issues/745",
            _LMCACHE + "issues/1756",
            _LMCACHE + "issues/684",
        ),
    ),
    Problem(
        code="KVD849",
        name="no-cpu-memory-left",
        severity=Severity.CRASH,
        title="reserve_local_cpu_size leaves no memory for LMCache, and it does not start.",
        shows=(Failed(kind="AssertionError", source="assert effective_cpu_size > 0", at=_CPU),),
        sentence="the machine's free memory is less than what is reserved",
        connectors=_IN_PROCESS,
        cause="max_local_cpu_size is cut to the machine's free memory less reserve_local_cpu_size, and nothing is "
        "left: each worker takes its own share.",
        now="reserve_local_cpu_size: 0, a max_local_cpu_size that fits as many times as there are workers, and restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD850",
        name="prompt-larger-than-cpu-pool",
        severity=Severity.HANG,
        title="A prompt has more chunks than the CPU pool holds, and its asynchronous lookup is never answered.",
        shows=(
            Logged("Trying to acquire <chunks> chunks, Cannot acquire more than <most> chunks"),
            Failed(
                kind="ValueError",
                text="Trying to acquire <chunks> chunks, Cannot acquire more than <most> chunks",
                at=f"{_BACKENDS}/storage_manager.py",
            ),
        ),
        sentence="{chunks} chunks are to be fetched, the pool holds {most}",
        connectors=_IN_PROCESS,
        cause="With enable_async_loading all chunks of a request are fetched into the CPU pool at once.",
        now="a larger max_local_cpu_size (it must hold the longest prompt), or enable_async_loading: false",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD851",
        name="layerwise-pool-full",
        severity=Severity.CRASH,
        title="The CPU pool is full, and layerwise stores cannot evict from this kind of pool: the worker dies.",
        shows=(
            Failed(
                kind="AssertionError",
                within="local_cpu_backend.py:batched_allocate",
                source="assert isinstance(self.memory_allocator, MixedMemoryAllocator)",
                at=_CPU,
            ),
        ),
        sentence="the pool is not of the kind from which batches can be evicted",
        connectors=_IN_PROCESS,
        cause="use_layerwise together with enable_p2p or another backend with memory of its own: eviction for a batch "
        "is written for the plain CPU pool only, and is reached when the pool is full for the first time.",
        now="use_layerwise: false (LMCACHE_USE_LAYERWISE=False), or enable_p2p: false, and restart",
        good="no release of LMCache is right yet (0.5.6 asserts it)",
    ),
    Problem(
        code="KVD852",
        name="cpu-pool-of-gds",
        severity=Severity.CRASH,
        title="The CPU cache was given another backend's memory, and dies when it is full.",
        shows=(
            Failed(kind="AssertionError", within="local_cpu_backend.py:allocate"),
            # Of a traceback that ends before its exception: what that function asks for lies in the CPU backend.
            Failed(kind="AssertionError", within="cache_engine.py:store", source="self.storage_manager.allocate("),
        ),
        sentence="the CPU cache has a kind of memory that it cannot evict from",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.9"},
        cause="With gds_path, weka_path, P2P or NIXL these releases hand that backend's allocator to the CPU cache, "
        "which takes a plain pool for granted.",
        now="local_cpu: false (LMCACHE_LOCAL_CPU=False) with gds_path or NIXL storage; enable_async_loading: "
        "false with P2P",
        fixed={"lmcache": "0.3.9"},
        threads=(_LMCACHE + "issues/1330", _LMCACHE + "issues/1482"),
    ),
    Problem(
        code="KVD853",
        name="killed-for-memory",
        severity=Severity.CRASH,
        title="The kernel or Kubernetes killed a process because it used too much memory.",
        shows=(
            Died("OOMKilled"),
            Died("Out of memory: Killed"),
            *ended_by(9),
            Died("Killed"),
            Died("code 137"),
            Died("Code:    137"),
            Died("Code: 137"),
        ),
        cause="A bare `Killed` only says SIGKILL: `dmesg -T | grep -i 'killed process'` or `kubectl describe pod` "
        "tells whether it was for memory. Who was killed decides. A pod of `lmcache_server` (lm://): it never evicts, "
        "in any release. A vLLM pod: max_local_cpu_size is for each worker, so tensor parallel 8 takes eight times "
        "that, pinned, beside the model's own host memory. `lmcache server`: --l1-size-gb.",
        now="max_local_cpu_size (or --l1-size-gb) times the workers at most 70 % of the container's limit; in place of "
        "lmcache_server redis with maxmemory-policy allkeys-lru",
        good="keep it so: the set-up was wrong, and no release changes that; no release of lmcache_server evicts, "
        "`lmcache server` (MP) does",
        sure=False,
        threads=(
            "https://github.com/vllm-project/production-stack/issues/923",
            _LMCACHE + "issues/900",
            _LMCACHE + "issues/3767",
        ),
    ),
    Problem(
        code="KVD854",
        name="server-l1-full",
        severity=Severity.SLOW,
        title="The LMCache server has no room in L1 for what it fetches from L2: hits are lost.",
        shows=(
            Logged(
                "<count> L1 reservations failed with out-of-memory; L1 may be under memory pressure",
                "lmcache/v1/distributed/storage_controllers/prefetch_controller.py",
            ),
        ),
        sentence="{count} chunks found no room in L1",
        releases={"lmcache": ">=0.5.6"},
        cause="L1 is full with chunks that are read or written, or its eviction does not keep up: it starts at "
        "--eviction-trigger-watermark, or its thread is dead (--eviction-policy IsolatedLRU, KVD855).",
        now="a larger --l1-size-gb, or a lower --eviction-trigger-watermark, and restart the server, then vLLM",
        good="an L1 that holds all prompts at once; no release changes that",
    ),
    Problem(
        code="KVD855",
        name="isolated-eviction-dies",
        severity=Severity.LEAK,
        title="The server's eviction thread dies at its first run: L1 fills up, and nothing more is stored.",
        shows=(Failed(kind="ValueError", within="isolated_lru.py:get_eviction_actions"),),
        sentence="--eviction-policy IsolatedLRU cannot evict L1",
        releases={"lmcache": ">=0.4.5"},
        cause="IsolatedLRU evicts for one cache_salt and raises where none is given; L1's thread gives none, and does "
        "not catch it.",
        now="restart the server with --eviction-policy LRU, then vLLM",
        good="no release of LMCache is right yet (0.5.6 does the same): --eviction-policy LRU",
        threads=(_LMCACHE + "issues/4817",),
    ),
    Problem(
        code="KVD856",
        name="cpu-size-zero",
        severity=Severity.CRASH,
        title="max_local_cpu_size is 0, and LMCache does not start.",
        shows=(
            Failed(kind="ValueError", text="both buffer length (0) and count (-1) must not be 0", within="lmcache/"),
        ),
        sentence="the CPU buffer has 0 bytes",
        said=(
            r"(?i)lmcache",
            r"(?i)max_local_cpu_size[\"'`]?\s*[:=]\s*[\"']?0(?:\.0*)?(?![\d.])",
            r"(?i)fail|crash|error|n't start|not start|cannot",
        ),
        connectors=_IN_PROCESS,
        cause="Every backend goes through the CPU buffer, also with local_cpu: false, which only keeps chunks from "
        "staying there. A size of 0 makes an empty buffer.",
        now="take max_local_cpu_size: 0 out (LMCACHE_MAX_LOCAL_CPU_SIZE; the default is 5), or set it to some GB for "
        "each worker; local_cpu: false may stay",
        good="keep it so: no release takes 0",
        threads=(_LMCACHE + "issues/1901", _LMCACHE + "issues/1889", _LMCACHE + "issues/2556"),
    ),
    Problem(
        code="KVD857",
        name="pd-backend-without-cpu-backend",
        severity=Severity.CRASH,
        title="With P/D and local_cpu: false LMCache has no CPU backend, and another backend asks for it.",
        shows=(Failed(kind="UnboundLocalError", text="local_cpu_backend"),),
        sentence="local_cpu_backend is used and was never made",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.10"},
        cause="enable_nixl (enable_pd from 0.3.9 on) with local_cpu: false makes no CPU backend; remote_url, "
        "local_disk, P2P and before 0.3.9 every start then use the name all the same.",
        now="local_cpu: true with max_local_cpu_size: 5 in that configuration file, or without remote_url and "
        "local_disk (0.3.9)",
        fixed={"lmcache": "0.3.10"},
        threads=(_LMCACHE + "issues/1473", _LMCACHE + "issues/1478"),
    ),
)
