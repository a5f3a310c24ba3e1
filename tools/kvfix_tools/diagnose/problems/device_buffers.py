"""Staging memory of GPUDirect Storage and of NIXL's storage backend that is full."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_BACKENDS = "lmcache/v1/storage_backend"
_NIXL, _GDS = f"{_BACKENDS}/nixl_storage_backend.py", f"{_BACKENDS}/gds_backend.py"

PROBLEMS = (
    Problem(
        code="KVD841",
        name="gds-buffer-full",
        severity=Severity.SLOW,
        title="The GPU buffer of GPUDirect Storage is full: chunks are neither stored nor loaded.",
        shows=(
            Logged("GDS allocation failed after <attempts> attempt(s). Returning None.", _GDS),
            Logged("GDS batched allocation failed after <attempts> attempt(s). Returning None.", _GDS),
        ),
        said=(
            r"(?i)\bgds(?:backend)?\b",
            r"(?i)\b(?:pool|buffer|tier)\b",
            r"(?i)\bfills? up|\bis full|exhaust|n't evict|not (?:\w+ )?evict",
            r"(?i)\bdrop|partial|fewer|not stored|fail",
        ),
        sentence="no memory in the GDS buffer after {attempts} attempts",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.4.3"},
        cause="What goes to and from the file system passes through gds_buffer_size (MiB of GPU memory; "
        "cufile_buffer_size before 0.4.4), which does not evict. Loads that come short follow.",
        now="gds_buffer_size: 8192 (MiB; LMCache 0.4.3: cufile_buffer_size), fewer requests at once (--max-num-seqs), "
        "enable_async_loading: false",
        good="no release of the in-process GDS backend evicts; the multi-process server has its own (--gds-l1-path)",
        threads=(_LMCACHE + "issues/3207",),
    ),
    Problem(
        code="KVD842",
        name="gds-load-without-memory",
        severity=Severity.SLOW,
        title="A load through GPUDirect Storage got no GPU buffer, and comes short.",
        shows=(
            Logged("Memory allocation failed during sync disk load.", _GDS),
            Logged("Memory allocation failed during get_blocking for"),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.4.3"},
        cause="gds_buffer_size (MiB of GPU memory) is full with what other requests load or store.",
        now="gds_buffer_size: 8192 (MiB), fewer requests at once (--max-num-seqs), and restart",
        good="a gds_buffer_size for all prompts that load at once; no release changes that",
        threads=(_LMCACHE + "issues/969", _LMCACHE + "issues/3207"),
    ),
    Problem(
        code="KVD843",
        name="nixl-buffer-full",
        severity=Severity.SLOW,
        title="NIXL's storage backend has no memory to load into: the load comes short.",
        shows=(Logged("Failed to allocate memory, consider increasing the `nixl_buffer_size` value", _NIXL),),
        sentence="nixl_buffer_size is full",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.4.5"},
        cause="What is loaded passes through nixl_buffer_size (bytes, on nixl_buffer_device); it is full with chunks "
        "that other requests load or store.",
        now="double nixl_buffer_size (bytes), and restart",
        good="a nixl_buffer_size for all prompts that load at once; no release changes that",
    ),
    Problem(
        code="KVD844",
        name="nixl-load-asserts-memory",
        severity=Severity.CRASH,
        title="NIXL's storage backend has no memory to load into, and the worker dies.",
        shows=(
            Failed(kind="AssertionError", within="nixl_storage_backend.py:_nixl_transfer_async"),
            Failed(kind="AssertionError", source="assert None not in obj_list"),
        ),
        sentence="a chunk got no memory, or could not be read",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.4.5"},
        cause="nixl_buffer_size was full, or an object was gone; these releases assert that neither happens.",
        now="double nixl_buffer_size (bytes), and restart",
        fixed={"lmcache": "0.4.5"},
        threads=(_LMCACHE + "pull/2024",),
    ),
    Problem(
        code="KVD845",
        name="nixl-shared-pool-pinned",
        severity=Severity.SLOW,
        title="All pages of the CPU pool that NIXL shares are pinned: the load comes short.",
        shows=(Logged("Failed to allocate from the NIXL/LocalCPUBackend shared pool", _NIXL),),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.4.7"},
        cause="With nixl_buffer_device: cpu NIXL reads into LMCache's own CPU pool, and other requests hold all of it.",
        now="a larger max_local_cpu_size (GB for each worker), and restart",
        good="a max_local_cpu_size for all prompts that load at once; no release changes that",
    ),
    Problem(
        code="KVD846",
        name="nixl-pool-full",
        severity=Severity.SLOW,
        title="NIXL's pool of objects is full and nothing may be evicted: chunks are not stored.",
        shows=(Logged("No eviction candidates found. Backend under pressure.", _NIXL),),
        connectors=_IN_PROCESS,
        cause="nixl_pool_size (extra_config) is the number of chunks that the pool holds; all of them are pinned or "
        "being written.",
        now="a larger nixl_pool_size in extra_config, and restart",
        good="keep it so: the set-up was wrong, and no release changes that; nixl_pool_size: 0 makes objects as they "
        "are needed",
    ),
    Problem(
        code="KVD426",
        name="gds-files-not-readable",
        severity=Severity.SLOW,
        title="Files of GPUDirect Storage cannot be read: what they hold is computed again.",
        shows=(
            Logged("Unsupported metadata version for <path>, ignoring", _GDS),
            Logged("[GDS]: Permission Denied for PID <process> on <path>, returning None", _GDS),
            Logged("Failed to read metadata file <path>: ", _GDS),
        ),
        sentence="{path}",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.4.3"},
        cause="Unsupported version: an LMCache with another format wrote the file. Permission denied: another user did "
        "(a container as root), or the folder is mounted read-only. Failed to read: the file is cut off or "
        "was deleted while it was read.",
        now="an empty gds_path for this release (rm -rf its contents while vLLM is down), owned by the user of vLLM",
        good="keep it so: the set-up was wrong, and no release reads another's format",
    ),
    Problem(
        code="KVD153",
        name="transfer-buffer-has-no-block",
        severity=Severity.HANG,
        title="A buffer of equal blocks (P/D transfer, NIXL storage) is full.",
        shows=(Logged("Failed to allocate memory for <what> because no free blocks is available"),),
        said=(
            r"(?i)fail\w* to allocate|allocation fail|no (?:free )?memory",
            r"pd_buffer_size",
            r"(?i)enable_pd|pd_role",
        ),
        sure=False,
        cause="These are the buffers of P/D (`pd_buffer_size`, earlier `nixl_buffer_size`) and of NIXL storage. "
        "Decode gives a block back when the request has loaded it: a buffer smaller than the prompts that are on "
        "their way, or a request that prefill sent and decode never asked for, keeps it full. If it is full while no "
        "request runs, blocks leak.",
        now="on the receiver a larger pd_buffer_size (bytes; LMCACHE_PD_BUFFER_SIZE=4294967296 for 4 GiB; "
        "earlier nixl_buffer_size), fewer requests at once (--max-num-seqs); full and idle: restart "
        "decode",
        good="a buffer of twice the KV of all prompts at once",
        threads=("https://github.com/LMCache/LMCache/issues/1339", "https://github.com/LMCache/LMCache/issues/2365"),
    ),
)
