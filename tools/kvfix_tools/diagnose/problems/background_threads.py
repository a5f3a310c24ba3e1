"""Errors that a background thread of a connector logs, and goes on: what that thread does, and what is lost by it."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_P2P = "lmcache/v1/storage_backend/p2p_backend.py"
_PD = "lmcache/v1/storage_backend/pd_backend.py"
_MOONCAKE = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
_ENGINE = "lmcache/v1/cache_engine.py"
_ALLOCATOR = "lmcache/v1/memory_allocators/tensor_memory_allocator.py"

PROBLEMS = (
    Problem(
        code="KVD255",
        name="fails-while-it-ends",
        severity=Severity.RISK,
        title="A part of the connector failed while the process was ending: a consequence, not the cause.",
        shows=(
            Logged("Error closing lmcache_worker: <error>", _ENGINE),
            Logged("Error closing storage_manager: <error>", _ENGINE),
            Logged("Error closing cache engine: <error>", _ENGINE),
            Logged("Error shutting down stats logger: <error>", _ENGINE),
            Logged("close operation timed out after <seconds>s. Continuing with shutdown", "lmcache/v1/manager.py"),
            Logged("destroy timed out after 15s. Continuing with shutdown", "lmcache/v1/manager.py"),
            Logged("Error destroying cache engine: <error>", "lmcache/v1/manager.py"),
            Logged("Error closing backend <backend>", "lmcache/v1/storage_backend/storage_manager.py"),
            Logged("Error stopping event loop: <error>", "lmcache/v1/storage_backend/storage_manager.py"),
            Logged(
                "Exception during connector <connector> shutdown.",
                "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py",
            ),
        ),
        releases={"lmcache": ">=0.5"},
        cause="The process was asked to end, or was ending because of another error. What these parts still had to "
        "store may be lost; KV in memory is gone anyway.",
        now="nothing for this line; look for an earlier error if the engine was not asked to end",
        good="nothing to do",
    ),
    Problem(
        code="KVD256",
        name="periodic-thread-fails",
        severity=Severity.SLOW,
        title="A thread of LMCache that does the same thing every few seconds failed at it.",
        shows=(
            Logged("Error in PeriodicThread <thread>: <error>", "lmcache/v1/periodic_thread.py"),
            Logged("IrrecoverableException in PeriodicThread <thread>: <error>", "lmcache/v1/periodic_thread.py"),
        ),
        releases={"lmcache": ">=0.4"},
        sentence="{thread}: {error}",
        cause="It tries again at its next turn, but after an IrrecoverableException it ends. Its name says what is "
        "missing meanwhile: a health check, a heartbeat, statistics, the pin monitor. The error is its own cause.",
        now="what the error names; if it comes only once, nothing",
        good="what ends the error",
        sure=False,
    ),
    Problem(
        code="KVD257",
        name="health-check-fails",
        severity=Severity.SLOW,
        title="LMCache's health check failed: until it succeeds, LMCache neither stores nor loads.",
        shows=(
            Logged("Health check <check> raised exception: <error>", "lmcache/v1/health_monitor/base.py"),
            Logged("Health check <check> raised IrrecoverableException", "lmcache/v1/health_monitor/base.py"),
            Logged("Irrecoverable error in health monitor: <error>", "lmcache/v1/health_monitor/base.py"),
        ),
        releases={"lmcache": ">=0.4"},
        cause="The check asks a store whether it answers. If it raises, the store's client could not even ask: wrong "
        "address, missing credentials, a connection that was closed. After an irrecoverable error it is not asked "
        "again before a restart.",
        now="check the store at the address of remote_url from this container; restart the engine after an "
        "irrecoverable error",
        good="a store that is reachable before the engine starts",
    ),
    Problem(
        code="KVD258",
        name="allocator-counts-differ",
        severity=Severity.LEAK,
        title="LMCache's memory allocator found that its own counts do not add up.",
        shows=(
            Logged("Memory allocator size is inconsistent", _ALLOCATOR),
            Logged("Memory allocator has non-coalesced blocks", _ALLOCATOR),
            Logged("This implies a bug in the memory allocator", _ALLOCATOR),
        ),
        releases={"lmcache": ">=0.5"},
        cause="Free and allocated bytes are not the size of the heap: an object was freed twice, or freed while in "
        "use. Memory that is handed out from now on may overlap with a chunk.",
        now="restart the engine: what is cached cannot be trusted. KVFIX=check kvfix run -- CMD says which release of "
        "a pin came twice",
        good="report it with `kvfix-diagnose LOG --issue FILE.md`; see the findings of pins and reference counts",
    ),
    Problem(
        code="KVD259",
        name="prefiller-asks-in-vain",
        severity=Severity.HANG,
        title="The decoder of LMCache's PD mode could not answer a prefiller that asks for memory or for cached keys.",
        shows=(
            Logged("Failed to process mem alloc loop: <error>", _PD),
            Logged("Cache query recv failed: <error>", _PD),
            Logged("Failed to process cache query: <error>", _PD),
        ),
        releases={"lmcache": ">=0.5.2"},
        sentence="{error}",
        cause="The decoder's thread logs the error and sends no answer. The prefiller waits in its REQ socket for it: "
        "its transfers stand still from then on (pd_backend.py 0.5.6:978, :1035).",
        now="restart this prefiller and decoder together; the same LMCache release on both; the error names the rest",
        good="no release up to 0.5.6 answers with the error",
    ),
    Problem(
        code="KVD260",
        name="peer-load-fails",
        severity=Severity.SLOW,
        title="KV could not be fetched from another instance (P2P): the request computes it itself.",
        shows=(
            Logged("Error during P2P batched lookup and get operation for lookup_id <id>: <error>", _P2P),
            Logged("Error during P2P batched lookup and put operation: <error>", _P2P),
            Logged("Error during P2P get operation for lookup_id <id>: <error>", _P2P),
            Logged("Max retry count reached for lookup_id <id>", _P2P),
        ),
        releases={"lmcache": ">=0.5.2"},
        cause="The peer has ended or was restarted with other memory, its port cannot be reached from here, or it has "
        "evicted the chunks meanwhile. The controller goes on naming it until its heartbeat is missed.",
        now="p2p_host of each instance an address that the others reach; p2p_init_ports and p2p_lookup_ports open; "
        "the same LMCache release everywhere",
        good="the configuration; nothing, if it stops after a restart of a peer",
        sure=False,
    ),
    Problem(
        code="KVD261",
        name="mooncake-prefill-cannot-send",
        severity=Severity.HANG,
        title="The prefill engine could not send a request's KV to the decode engine with Mooncake.",
        shows=(
            Logged("Error processing Mooncake xfer request: <error>", _MOONCAKE),
            Logged("Error in _sender_worker: <error>", _MOONCAKE),
            Logged("Error in Mooncake sender thread: <error>. Exiting thread.", _MOONCAKE),
            Logged("pulling kv_caches for <requests> failed: <error>", _MOONCAKE),
        ),
        connectors=("MooncakeConnector", "MultiConnector"),
        sentence="{error}",
        cause="The decode engine gets the error for this request and its load fails. After `Exiting thread` the "
        "prefill engine answers no decode engine any more: all wait for it (mooncake_connector.py 0.32.0:1467, :1484).",
        now="after `Exiting thread`: restart the prefill engine. Else what the error names: the same "
        "--tensor-parallel-size, --block-size and model on both sides, ports open both ways",
        good='"kv_load_failure_policy":"recompute" in --kv-transfer-config of decode, and what the error names',
        sure=False,
    ),
    Problem(
        code="KVD262",
        name="gds-file-too-short",
        severity=Severity.SLOW,
        title="A chunk's file in gds_path is shorter than the chunk: it is computed again.",
        shows=(
            Logged(
                "Error loading <path>: got only <bytes> bytes out of <size>, ignoring",
                "lmcache/v1/storage_backend/gds_backend.py",
            ),
            Logged(
                "File <path> is too small: size=<size>, but need at least <bytes>",
                "lmcache/v1/storage_backend/gds_backend.py",
            ),
        ),
        releases={"lmcache": ">=0.5"},
        cause="The file was written by a process that died meanwhile, by one with another chunk_size or dtype, or the "
        "disk was full.",
        now="stop the engine, empty gds_path, start it; df -h on it",
        good="a folder of its own for each model, dtype and chunk_size",
    ),
    Problem(
        code="KVD263",
        name="gds-metadata-of-another-release",
        severity=Severity.SLOW,
        title="Files in gds_path are of another release of LMCache.",
        shows=(
            Logged("Unsupported metadata version for <path>", "lmcache/v1/storage_backend/gds_backend.py"),
            Logged(
                "Failed to read metadata file <path> during GDS start; raising the error to fail startup",
                "lmcache/v1/storage_backend/gds_backend.py",
            ),
        ),
        releases={"lmcache": ">=0.5"},
        cause="Each file has its metadata in front, in a version of its own. Those of another version are left out; "
        "a file that cannot be read at all ends the start.",
        now="empty gds_path, or name another folder for this release",
        good="a folder for each release",
    ),
    Problem(
        code="KVD264",
        name="experimental-feature-missing-at-the-server",
        severity=Severity.CRASH,
        title="The connector asks for an experimental feature that the LMCache server was not started with.",
        shows=(
            Failed(
                text="Connector enables <feature> but server does not",
                at="lmcache/integration/vllm/experimental/dispatcher.py",
            ),
        ),
        releases={"lmcache": ">=0.5.5"},
        sentence="{feature}",
        cause="Both sides name their experimental features; the connector's have to be among the server's "
        "(dispatcher.py 0.5.6:137).",
        now="the same feature in the server's options (lmcache server --help, `experimental`), or out of "
        "kv_connector_extra_config",
        good="the same list on both sides",
    ),
    Problem(
        code="KVD265",
        name="transfer-before-registration",
        severity=Severity.CRASH,
        title="A worker wants to load or store, and has not registered its KV cache with the LMCache server.",
        shows=(
            Failed(
                text="Transfer context is not initialized. Call register_kv_caches()",
                at="lmcache/integration/vllm/vllm_multi_process_adapter.py",
            ),
        ),
        releases={"lmcache": ">=0.5"},
        cause="The registration failed or is still going on; its error stands above in the worker's log, and in the "
        "server's. After a restart of the server each worker has to register again.",
        now="the server's log: `Error handling operation register_kv_cache...`; start the server first, then vLLM",
        good="what the server's log names",
    ),
    Problem(
        code="KVD266",
        name="hit-is-no-multiple-of-the-chunk",
        severity=Severity.CRASH,
        title="The number of hit tokens is no multiple of the chunk that this side counts with.",
        shows=(
            Failed(text="The number of LMCache hit tokens should be a multiple of the LMCache chunk size."),
            Failed(text="The number of tokens should be greater than or equal to the number of LMCache hit tokens."),
        ),
        cause="Connector and server count with chunks of different sizes (the server was restarted with another "
        "--chunk-size), or vLLM has cut the hit, for a preempted request or with speculative decoding.",
        now="the same --chunk-size at each start of the server; restart vLLM after the server's was changed; kvfix run "
        "-- CMD for the cut hits of vLLM",
        good="one --chunk-size, and vLLM started after the server",
        sure=False,
    ),
    Problem(
        code="KVD267",
        name="engine-driven-store-refused",
        severity=Severity.SLOW,
        title="The LMCache server refused chunks that a worker copied to it: they are not stored.",
        shows=(
            Logged(
                "Engine-driven pickle store chunk shape mismatch", "lmcache/v1/multiprocess/modules/server_transfer.py"
            ),
            Logged("Engine-driven pickle store incomplete", "lmcache/v1/multiprocess/modules/server_transfer.py"),
            Logged("Engine-driven pickle store is missing chunk", "lmcache/v1/multiprocess/modules/server_transfer.py"),
        ),
        releases={"lmcache": ">=0.5.5"},
        cause="The shape that the worker registered is not that of its chunks: another release of LMCache, or workers "
        "of two models with the same name at one server.",
        now="the same LMCache release for worker and server; a server of its own, or another "
        "--served-model-name, for each model",
        good="one release on both sides",
        sure=False,
    ),
    Problem(
        code="KVD268",
        name="lookup-cannot-be-read",
        severity=Severity.SLOW,
        title="A rank could not answer a lookup: the request counts as a miss, or waits for the time of a lookup.",
        shows=(
            Logged(
                "Error decoding JSON in lookup request: <error>", "lmcache/v1/lookup_client/lmcache_lookup_client.py"
            ),
            Logged(
                "Error decoding UTF-8 in lookup request: <error>", "lmcache/v1/lookup_client/lmcache_lookup_client.py"
            ),
            Logged("Error processing lookup request: <error>", "lmcache/v1/lookup_client/lmcache_lookup_client.py"),
            Logged(
                "Error processing response from worker: <error>",
                "lmcache/v1/lookup_client/lmcache_async_lookup_client.py",
            ),
        ),
        releases={"lmcache": ">=0.5"},
        sentence="{error}",
        cause="The rank's LMCache raised while it looked the keys up; the error names why. Scheduler and ranks of two "
        "releases of LMCache, after an update of one pod only, look so too.",
        now="what the error names; the same image for all ranks",
        good="what ends the error",
        sure=False,
    ),
    Problem(
        code="KVD269",
        name="mooncake-store-refuses-the-buffer",
        severity=Severity.CRASH,
        title="Mooncake's store could not be set up: its configuration or LMCache's buffer was refused.",
        shows=(
            Logged(
                "Buffer registration error: <error>", "lmcache/v1/storage_backend/connector/mooncakestore_connector.py"
            ),
            Logged(
                "Configuration loading failed: <error>",
                "lmcache/v1/storage_backend/connector/mooncakestore_connector.py",
            ),
            Logged(
                "An error occurred while loading the configuration: <error>",
                "lmcache/v1/storage_backend/connector/mooncakestore_connector.py",
            ),
        ),
        releases={"lmcache": ">=0.5"},
        sentence="{error}",
        cause="MOONCAKE_CONFIG_PATH or the extra_config of LMCache lacks a field that Mooncake wants "
        "(local_hostname, metadata_server, master_server_address, protocol), or with RDMA the buffer in host memory "
        "may not be registered (memlock, no device of that name).",
        now="protocol: tcp once: if that starts, it is RDMA: ulimit -l unlimited, device_name from ibv_devices",
        good="the configuration",
        sure=False,
    ),
    Problem(
        code="KVD270",
        name="grammar-refuses-a-token",
        severity=Severity.WRONG,
        title="A request with structured output has a token that its grammar does not allow: vLLM ended it.",
        shows=(Logged("Unexpected: grammar rejected tokens <tokens> for request", "vllm/v1/core/sched/scheduler.py"),),
        releases={"vllm": ">=0.15"},
        sentence="a token was not allowed by the grammar",
        cause="The mask of the step and the grammar's state differ. It happens with drafts or asynchronous scheduling, "
        "and when the model reads wrong KV; without structured output the same fault is silent.",
        now="the same request without the connector, with the prefix cache off: if it still comes, it is not the KV. "
        "Else --no-async-scheduling, then without --speculative-config",
        good="what that comparison shows; kvfix run --mode check -- CMD sees wrong KV that the connector delivers",
        sure=False,
    ),
)
