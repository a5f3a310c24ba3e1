"""NIXL as LMCache's storage (`enable_nixl_storage`, --l2-adapter nixl_store): pools, buffers, files."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_CONFIG = "lmcache/v1/config.py"
_NIXL = "lmcache/v1/storage_backend/nixl_storage_backend.py"
_CPU = "lmcache/v1/storage_backend/local_cpu_backend.py"
_L2 = "lmcache/v1/distributed/l2_adapters/nixl_store_l2_adapter.py"

PROBLEMS = (
    Problem(
        code="KVD183",
        name="nixl-storage-settings-refused",
        severity=Severity.CRASH,
        title="NIXL storage does not start: its buffer or its pool does not fit the other settings.",
        shows=(
            Failed(
                kind="RuntimeError", text="nixl_buffer_device=cpu requires a LocalCPUBackend staging buffer", at=_NIXL
            ),
            Failed(kind="RuntimeError", text="LocalCPUBackend must use MixedMemoryAllocator", at=_NIXL),
            Failed(kind="ValueError", text="does not support multiple nixl_path entries", at=_NIXL),
            Failed(kind="ValueError", text="is smaller than one chunk (<chunk> bytes); cannot initialize NIXL CPU"),
            Failed(kind="ValueError", text="metadata required for NIXL CPU mode", at=_CPU),
            Failed(kind="ValueError", text="nixl_buffer_device='cpu' is not supported in the scheduler role"),
            Failed(kind="RuntimeError", text="NIXL storage CPU buffer requires pinned memory"),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.4.7"},
        cause="With nixl_buffer_device: cpu NIXL and the CPU cache share one pool of whole chunks: max_local_cpu_size "
        "must hold at least one, local_cpu stays on, and enable_scheduler_bypass_lookup is off. nixl_pool_size: 0 "
        "(dynamic files) takes one nixl_path.",
        now="max_local_cpu_size: 20, enable_scheduler_bypass_lookup: false, one nixl_path; or nixl_buffer_device: "
        "cuda with nixl_buffer_size as a multiple of a chunk; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD179",
        name="nixl-storage-backend-not-known",
        severity=Severity.CRASH,
        title="nixl_backend names a plugin that LMCache cannot use as a store.",
        shows=(
            Failed(kind="ValueError", text="Unsupported NIXL backend: <name>", at=_NIXL),
            Failed(kind="AssertionError", text="Invalid NIXL backend & device combination"),
            Failed(kind="ValueError", text="Invalid NIXL backend & device combination"),
        ),
        connectors=_IN_PROCESS,
        cause="Stores are GDS, GDS_MT, POSIX, HF3FS (files) and OBJ (S3); newer releases know AZURE_BLOB and "
        "DOCA_MEMOS. GDS, GDS_MT and OBJ take nixl_buffer_device: cpu or cuda, all others cpu. UCX is a transport, no "
        "store.",
        now="extra_config: {enable_nixl_storage: true, nixl_backend: POSIX, nixl_path: /mnt/nvme/kv/, nixl_pool_size: "
        "1024} and nixl_buffer_device: cpu; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD184",
        name="nixl-storage-write-rolled-back",
        severity=Severity.SLOW,
        title="NIXL storage could not write chunks: they are taken back and computed again.",
        shows=(
            Logged("mem_to_storage failed for <count> keys; rolling back", _NIXL),
            Logged("async mem_to_storage transfer failed for <count> keys", _NIXL),
            Logged("async mem_to_storage post failed for <count> keys", _NIXL),
            Logged("mem_to_storage handle acquisition failed for <count> keys", _NIXL),
            Logged("NIXL batched put could not be scheduled for <count> key(s); skipping best-effort offload", _NIXL),
        ),
        sentence="{count} chunks were not written",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.5.5"},
        sure=False,
        cause="The traceback below it is NIXL's: NIXL_ERR_BACKEND with files: no room, no rights, no O_DIRECT on this "
        "file system (use_direct_io); with OBJ: endpoint, bucket or credentials in nixl_backend_params; NOT_FOUND: "
        "the pool's files were deleted while it ran.",
        now="df -h and ls -ld on nixl_path; extra_config: {use_direct_io: false}; with OBJ aws s3 ls --endpoint-url "
        "URL; restart",
        good="a file system of its own for nixl_path, which no one else cleans",
    ),
    Problem(
        code="KVD185",
        name="l2-nixl-settings-refused",
        severity=Severity.CRASH,
        title="The server's NIXL L2 lacks a setting, and the server does not start.",
        shows=(
            Failed(kind="ValueError", text="backend_params must include 'file_path'", at=_L2),
            Failed(kind="ValueError", text="backend_params must include 'use_direct_io'", at=_L2),
            Failed(kind="ValueError", text="nixl_native requires"),
            Failed(kind="RuntimeError", text="nixl_native requires the optional C++ extension"),
        ),
        releases={"lmcache": ">=0.4.2"},
        cause="Backends on files (POSIX, GDS, GDS_MT, HF3FS) need file_path and use_direct_io in backend_params, as "
        "strings. nixl_native needs an extension that the wheels on PyPI do not have, and an L1 in host memory.",
        now='--l2-adapter \'{"type": "nixl_store", "backend": "POSIX", "backend_params": {"file_path": "/mnt/kv", '
        '"use_direct_io": "false"}, "pool_size": 1024}\'',
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD180",
        name="l2-nixl-pool-full",
        severity=Severity.SLOW,
        title="The server's NIXL L2 has no free place for a chunk.",
        shows=(Failed(kind="RuntimeError", text="Insufficient NIXL storage capacity", at=_L2),),
        releases={"lmcache": ">=0.5.6"},
        cause="pool_size is no number of chunks: it counts pages of --l1-align-bytes, with file_size files of so many "
        "bytes, and a chunk takes its bytes / --l1-align-bytes of them. All are made at the start, and without an "
        "eviction block nothing makes room.",
        now='in the adapter\'s JSON a larger "pool_size" and "eviction": {"eviction_policy": "LRU", '
        '"trigger_watermark": 0.8, "eviction_ratio": 0.2}; restart the server',
        good="pool_size times --l1-align-bytes (or file_size) as large as the disk allows, with eviction",
    ),
    Problem(
        code="KVD1098",
        name="nixl-store-failure-kills",
        severity=Severity.CRASH,
        title="NIXL's storage failed to write chunks, and the error went on to vLLM, which died of it.",
        shows=(
            Failed(kind="nixlBackendError", within="nixl_storage_backend.py:batched_submit_put_task"),
            Failed(kind="nixlInvalidParamError", within="nixl_storage_backend.py:batched_submit_put_task"),
            Failed(kind="nixlNotFoundError", within="nixl_storage_backend.py:batched_submit_put_task"),
        ),
        sentence="a write to NIXL's storage failed, in the step's own thread",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.5.4"},
        replaces=("KVD554", "KVD570"),
        cause="With nixl_pool_size: 0 (dynamic) and without nixl_async_put the step waits for the write, and its error "
        "is raised through wait_for_save. Why it failed stands before it, in the store's own line: no room or rights "
        "in nixl_path, O_DIRECT, endpoint or credentials of OBJ, a device that is gone.",
        now="extra_config: {nixl_async_put: true}, which only logs the failure; or enable_nixl_storage: false; restart",
        fixed={"lmcache": "0.5.4"},
        threads=("https://github.com/LMCache/LMCache/pull/3956",),
    ),
    Problem(
        code="KVD1602",
        name="nixl-storage-pool-empty",
        severity=Severity.SLOW,
        title="The pool of NIXL storage has no free place for a chunk that is to be written.",
        shows=(Failed(kind="AssertionError", source="len(self.indices) > 0", at=_NIXL),),
        sentence="no place is free in the pool",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.5.5"},
        cause="nixl_pool_size is the number of chunks it holds. A put counts the free places and evicts what it lacks, "
        "but takes its places later, in another thread: two puts in a row count the same places, and where the chunks "
        "are pinned or in use fewer are evicted than are needed. The chunks of this put are not stored.",
        now="a larger nixl_pool_size in extra_config: well above the chunks of all prompts that run at the same time "
        "(1024 prompts of 8192 tokens at chunk_size 256: 32768); restart",
        good="a pool that is large for what is stored at the same time, whatever the release",
        replaces=("KVD184",),
    ),
    Problem(
        code="KVD1642",
        name="nixl-storage-chunk-stored-already",
        severity=Severity.SLOW,
        title="NIXL storage is to write a chunk that another request has just written.",
        shows=(Failed(kind="AssertionError", source="assert key not in self.key_dict", at=_NIXL),),
        sentence="a chunk of the put is stored already",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.5.5"},
        cause="Two requests with the same prompt store at the same time: the second asked before the first had ended, "
        "and writes after it. Its put is rolled back; the chunk of the first stays, the others of this put are stored "
        "with the next request that has them. No KV is wrong.",
        now="nothing, if it is rare; a router that sends requests of one prefix one after another avoids it",
        good="no release up to 0.5.6 leaves such a chunk out alone",
        replaces=("KVD184",),
    ),
    Problem(
        code="KVD1604",
        name="nixl-storage-lacks-a-setting",
        severity=Severity.CRASH,
        title="enable_nixl_storage is on, and a setting that it needs is missing.",
        shows=(
            Failed(kind="AssertionError", source='self.extra_config.get("nixl_backend") is not None', at=_CONFIG),
            Failed(kind="AssertionError", source='self.extra_config.get("nixl_pool_size") is not None', at=_CONFIG),
            Failed(kind="AssertionError", source="self.extra_config.get('nixl_backend') is not None"),
            Failed(kind="AssertionError", source="self.extra_config.get('nixl_pool_size') is not None"),
        ),
        sentence="nixl_backend or nixl_pool_size is not set",
        connectors=_IN_PROCESS,
        cause="Both stand in extra_config, next to enable_nixl_storage, and not at the top of the file; "
        "nixl_buffer_size and nixl_buffer_device stand at the top.",
        now="extra_config: {enable_nixl_storage: true, nixl_backend: POSIX, nixl_pool_size: 1024, nixl_path: "
        "/mnt/nvme/kv/} and at the top nixl_buffer_device: cpu; without a shared pool (before 0.4.7) also "
        "nixl_buffer_size: 1073741824; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1606",
        name="l2-nixl-file-size-odd",
        severity=Severity.CRASH,
        title="The files of the server's NIXL L2 hold no whole number of pages.",
        shows=(Failed(kind="ValueError", text="file_size (<size>) must be a multiple of page_size (<page>)", at=_L2),),
        sentence="file_size {size} is no multiple of {page}",
        releases={"lmcache": ">=0.4.2"},
        cause="A page is --l1-align-bytes of the server; file_size in backend_params is bytes. Without file_size a "
        "file is one page.",
        now='in the adapter\'s JSON "backend_params": {"file_size": "1073741824", ...} as a multiple of the page, or '
        "no file_size; restart the server",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1608",
        name="l2-nixl-eviction-without-delete",
        severity=Severity.CRASH,
        title="The server's NIXL L2 has an eviction block, and its storage cannot delete.",
        shows=(
            Failed(
                kind="ValueError",
                text="<storage> storage does not support eviction",
                at="lmcache/v1/distributed/l2_adapters/nixl_native_l2_adapter.py",
            ),
        ),
        releases={"lmcache": ">=0.5.6"},
        cause="Only NIXL plugins on files can delete what they have written; those on objects (OBJ) cannot.",
        now='the adapter\'s JSON without "eviction", and a lifecycle rule of the bucket; or "backend": "POSIX"; '
        "restart the server",
        good="eviction by the bucket's own rule for objects",
    ),
)
