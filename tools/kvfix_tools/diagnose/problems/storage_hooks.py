"""LMCache in process: what a storage backend raises leaves the hook in the worker's step, and ends the engine."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_LMCACHE = "https://github.com/LMCache/LMCache/"
_BACKENDS = "lmcache/v1/storage_backend"
#: What LMCache asks of a chunk's memory.
_OF_MEMORY = (
    "tensor", "metadata", "meta", "get_size", "get_shape", "byte_array", "raw_data", "ref_count_up", "ref_count_down",
    "pin", "unpin", "parent", "get_physical_size", "get_memory_format",
)  # fmt: skip

PROBLEMS = (
    Problem(
        code="KVD358",
        name="chunk-has-no-memory",
        severity=Severity.CRASH,
        title="LMCache uses the memory of a chunk for which there was none.",
        shows=tuple(
            Failed(kind="AttributeError", text=f"'NoneType' object has no attribute '{name}'", through="/lmcache/")
            for name in _OF_MEMORY
        ),
        connectors=_IN_PROCESS,
        sure=False,
        cause="Most often the CPU buffer was full, so the allocation gave None, and the code that asked did not look "
        "(`Failed to allocate` or `no memory is available` stands before it, at DEBUG in older releases). Else the "
        "chunk was evicted or deleted between lookup and load.",
        now="a larger max_local_cpu_size (LMCACHE_MAX_LOCAL_CPU_SIZE, GB for each worker; nixl_buffer_size or "
        "pd_buffer_size in bytes where these are used), fewer requests at once (--max-num-seqs), and restart",
        good="LMCache 0.3.10 or newer, which look at the answer in the loads from disk and remote stores",
        threads=(_LMCACHE + "issues/940",),
    ),
    Problem(
        code="KVD359",
        name="nixl-storage-fails-in-the-step",
        severity=Severity.CRASH,
        title="LMCache's NIXL storage could not write or read, and the engine died of it.",
        shows=(
            Failed(kind="nixlBackendError", within="nixl_storage_backend.py:post_blocking"),
            Failed(kind="nixlBackendError", within="nixl_storage_backend.py:post_async"),
            Failed(kind="nixlBackendError", within="nixl_storage_backend.py:_run_sync_mem_to_storage"),
            Failed(
                kind="RuntimeError",
                text="NIXL transfer failed",
                within="nixl_storage_backend.py:post_blocking",
                at=f"{_BACKENDS}/nixl_storage_backend.py",
            ),
        ),
        connectors=_IN_PROCESS,
        sentence="the storage below NIXL failed",
        cause="The file system, object store or device below NIXL (nixl_backend: POSIX, GDS, OBJ, DOCA_MEMOS ...) "
        "failed; its own line stands before this. A synchronous store runs in wait_for_save, where no one catches it.",
        now="df -h and dmesg for nixl_path, the store's own log; to go on meanwhile: enable_nixl_storage: false in "
        "extra_config",
        good="a store that does not fail; LMCache 0.5.4 or newer, which only warns of a store that failed",
        releases={"lmcache": ">=0.3.9"},
        threads=(_LMCACHE + "pull/3956",),
    ),
    Problem(
        code="KVD360",
        name="mooncake-local-buffer-too-small",
        severity=Severity.SLOW,
        title="Mooncake's client has no local buffer free for a chunk: it is not stored, or not read.",
        shows=(
            Logged("Failed to allocate buffer for <operation> operation"),
            Logged("Failed to allocate buffer for get"),
            Logged("Failed to allocate buffer for put"),
        ),
        cause="Each put and get in flight takes local_buffer_size of this process for its data. A chunk here "
        "is chunk_size tokens of all layers; several are put at once.",
        now="a larger \"local_buffer_size\" in Mooncake's configuration or LMCache's extra_config (bytes, for each "
        "worker): at least 32 times the size in the line; or 'save_chunk_meta: false' in extra_config, which puts "
        "without that copy",
        good="the larger local_buffer_size",
        sure=False,
        threads=(_LMCACHE + "issues/1224",),
    ),
    Problem(
        code="KVD361",
        name="gds-backend-without-unpin",
        severity=Severity.CRASH,
        title="The GDS backend of this LMCache does not implement what a lookup calls.",
        shows=(
            Failed(kind="NotImplementedError", within="gds_backend.py:unpin"),
            Failed(kind="NotImplementedError", within="gds_backend.py:pin"),
            Failed(kind="NotImplementedError", within="weka_gds_backend.py:unpin"),
            Failed(kind="NotImplementedError", within="weka_gds_backend.py:pin"),
        ),
        connectors=_IN_PROCESS,
        cause="From 0.3.2 on each request's lookup is ended with unpin; the GDS and Weka backends of the builds of "
        "July 2025 raise there.",
        now="pip install --no-deps lmcache==0.3.9.post2 (for this torch), or without gds_path and weka_path; restart",
        fixed={"lmcache": "0.3.9"},
        releases={"lmcache": "<0.3.9"},
        threads=(_LMCACHE + "issues/1114",),
    ),
)
