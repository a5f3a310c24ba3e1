"""Loads and stores between a worker and the LMCache server that one of them refuses."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"

PROBLEMS = (
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
        code="KVD1276",
        name="event-of-the-other-process-is-gone",
        severity=Severity.CRASH,
        title="A worker or the LMCache server opens a CUDA event of the other, and that event no longer exists.",
        shows=(
            Failed(text="CUDA error: invalid argument", within="streams.py:from_ipc_handle"),
            Failed(text="CUDA error: invalid argument", within="event_ipc.py:import_event"),
        ),
        connectors=("LMCacheMPConnector", "MultiConnector"),
        sure=False,
        cause="The handle of an event is good as long as the process that made it keeps the event, and only where both "
        "share /dev/shm. Up to 0.4.6 the worker keeps none of those that it hands to the server; up to 0.5.5 the "
        "server none of its own.",
        now="the same /dev/shm for both (hostIPC: true in Kubernetes, docker run --ipc host); "
        "LMCACHE_MP_TRANSFER_MODE=engine_driven for vLLM (LMCache 0.4.7 and newer) needs no event",
        good="LMCache 0.5.6 on both sides (0.4.7 keeps the worker's events, 0.5.6 the server's too)",
        threads=(
            _LMCACHE + "issues/3236",
            _LMCACHE + "pull/3245",
            _LMCACHE + "pull/4550",
            _LMCACHE + "pull/5280",
        ),
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
        code="KVD194",
        name="server-answer-timed-out",
        severity=Severity.CRASH,
        title="The LMCache server sent no answer to an operation in time, and vLLM's process ended at it.",
        shows=(
            Failed(text="Future result not available within timeout"),
            Failed(text="CUDAMessagingFuture result not available within timeout"),
            Failed(text="DeviceMessagingFuture result not available within timeout"),
        ),
        releases={"lmcache": ">=0.3.10"},
        cause="The frame that called says for what: register_kv_caches at the start, else a store, load or lookup. The "
        "server does not answer when its handler fails (its own log has `Error handling ...` with the reason), when no "
        "server listens at lmcache.mp.host and lmcache.mp.port, or when its workers are all busy (--max-workers).",
        now="the server's log at this time: the traceback there is the cause (at a registration: GPU not visible, "
        '--ipc host missing, another release of LMCache); `"lmcache.mp.mq_timeout": 300` in kv_connector_extra_config '
        "if it is only slow; then the server first, vLLM after it",
        good="what the server's log names, put right; LMCache 0.5.6, in which a server that is gone costs only the "
        "cache",
        sure=False,
        threads=(_LMCACHE + "issues/3326",),
    ),
    Problem(
        code="KVD192",
        name="engine-driven-copy-fails",
        severity=Severity.SLOW,
        title="A worker could not copy chunks to or from the LMCache server (engine_driven).",
        shows=(
            Logged("Failed to submit async engine-driven store"),
            Logged("Async engine-driven commit_store failed for request_id=<request>"),
            Logged("Async engine-driven store failed for request_id=<request>"),
            Logged("Failed to scatter retrieved CPU context chunks"),
            Logged("Failed waiting for an in-flight store"),
            Logged("Engine-driven pickle store reserved an object without a tensor"),
        ),
        releases={"lmcache": ">=0.4.7"},
        sure=False,
        cause="The traceback below it says why: the server was restarted (its shared memory is gone, and a view into "
        "it may even end the worker without a traceback), the GPU has no memory for the copy, or the server refused "
        "the chunk (its log). Stores are lost; a load that fails is computed again.",
        now='restart vLLM after each restart of the server when /dev/shm is used; "lmcache.mp.mp_transfer_mode": '
        '"lmcache_driven" where worker and server share the GPU (--ipc host, same devices)',
        good="lmcache_driven on one machine; a server that is not restarted under running engines",
        threads=(_LMCACHE + "issues/4069",),
    ),
    Problem(
        code="KVD1074",
        name="server-touches-memory-that-is-gone",
        severity=Severity.CRASH,
        title="The LMCache server copied from or to GPU memory of a worker that is no longer there.",
        shows=tuple(
            Failed(text="an illegal memory access was encountered", within=f"{file}.py:{function}")
            for file in ("lmcache_driven_transfer", "gpu_transfer", "multiprocess/server")
            for function in ("store", "retrieve")
        ),
        sentence="the server's own copy met an illegal address",
        replaces=("KVD788",),
        cause="The server works on KV memory that its workers share with it (CUDA IPC). The worker ended or freed it, "
        "or a request names blocks beyond what it registered (another --block-size, KV groups, a vLLM that was "
        "restarted while the server went on). From then on this process cannot use the GPU: all stores and loads fail.",
        now="restart the LMCache server, then vLLM, in this order; if it comes back let the engine copy: `lmcache "
        'server --supported-transfer-mode engine_driven` and "lmcache.mp.mp_transfer_mode":"engine_driven" in '
        "kv_connector_extra_config (LMCache 0.5.0 or newer)",
        good="the same LMCache on both sides, and the server restarted with vLLM; engine_driven where it happens all "
        "the same",
        sure=False,
    ),
)
