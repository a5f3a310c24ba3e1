"""Clients of the LMCache server in vLLM: registration, transfer modes, releases, a start that failed."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_MP = ("LMCacheMPConnector", "MultiConnector")
_COPY = "vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration/multi_process_adapter.py"

PROBLEMS = (
    Problem(
        code="KVD273",
        name="vllm-copy-takes-a-failed-load-for-done",
        severity=Severity.WRONG,
        title="A load from the LMCache server failed, and vLLM's own copy of the adapter reports it as done.",
        shows=(Logged("Something went wrong when processing the retrieve request for request_id=<request>", _COPY),),
        sentence="its load failed, and is reported as done",
        connectors=_MP,
        cause="The copy in vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration names no failed blocks "
        "(multi_process_adapter.py 0.32.0:648): the request reads what lies in its blocks. Wrong text.",
        now="LMCache's own connector: kv_connector_module_path lmcache.integration.vllm.lmcache_mp_connector, of "
        "LMCache 0.5.5 or newer on both sides; a larger --l1-size-gb, so that chunks stay until they are loaded",
        good="LMCache 0.5.5 or newer with its own connector",
    ),
    Problem(
        code="KVD274",
        name="vllm-copy-store-failed",
        severity=Severity.SLOW,
        title="The LMCache server answered that a store has failed: this KV is not in the cache, the request is right.",
        shows=(Logged("Something went wrong when processing the store request for request_id=<request>", _COPY),),
        sentence="its store failed at the server",
        connectors=_MP,
        cause="The server knows: the worker is not registered, its blocks do not fit the layout that it registered, or "
        "the copy failed.",
        now="the server's log at this time, with `kvfix-diagnose ENGINE.log SERVER.log`; restart vLLM if the server "
        "was restarted without it",
        good="what the server's log names",
    ),
    Problem(
        code="KVD904",
        name="worker-returns-without-context",
        severity=Severity.HANG,
        title="After a restart of the server a worker cannot register again: its thread has no CUDA context.",
        shows=(
            Failed(kind="RuntimeError", within="_reregister_kv_caches_callback", text="cuMemGetAddressRange failed"),
        ),
        sentence="the worker's heartbeat cannot share its memory again",
        connectors=_MP,
        releases={"lmcache": "==0.5.5"},
        cause="With isolated IPC the worker's memory is exported by driver calls, and the heartbeat's thread has no "
        "current CUDA context: it fails at every heartbeat.",
        now="restart vLLM (the first registration works); or lmcache.mp.isolated_ipc: false and --no-isolated-ipc with "
        "a shared /dev/shm",
        fixed={"lmcache": "0.5.6"},
        threads=(_LMCACHE + "issues/5168",),
    ),
    Problem(
        code="KVD905",
        name="worker-cannot-return",
        severity=Severity.HANG,
        title="After a restart of the server a worker cannot register again; it goes on without the cache.",
        shows=(
            Logged("Failed to re-register KV caches after server recovery; will retry on next heartbeat"),
            Logged("Unexpected error during KV cache re-registration; will retry on next heartbeat"),
            Logged("Failed to re-register dispatcher after server recovery; will retry on next heartbeat"),
        ),
        connectors=_MP,
        releases={"lmcache": "!=0.5.5"},
        cause="`Failed to re-register`: the server answers pings and not the registration, whose handler failed: its "
        "own log says why. `Unexpected error`: the traceback below it, in the worker.",
        now="restart vLLM; look into the server's log for `Error handling` of the same time",
        good="the same release of LMCache, 0.5.6 or newer, on both sides",
        sure=False,
        threads=(_LMCACHE + "issues/4642", _LMCACHE + "issues/3208"),
    ),
    Problem(
        code="KVD907",
        name="server-keeps-gpu-memory",
        severity=Severity.CRASH,
        title="vLLM finds too little free GPU memory: the LMCache server still maps that of a worker that died.",
        shows=(
            Failed(
                kind="ValueError",
                text="Free memory on device <device> (<free> GiB) on startup is less than desired GPU memory "
                "utilization",
            ),
            Failed(text="CUDA-capable device(s) is/are busy or unavailable"),
        ),
        said=(
            r"(?i)lmcache server|\bMP\b|LMCacheMPConnector",
            r"(?i)\bVRAM\b|GPU memory|\bIPC[- ]mapp|mapped KV",
            r"(?i)\bretain|\bkeeps?\b|\bpinned\b|(?:never|not) (?:\w+ )?(?:decreas|releas|freed?|clean)",
            r"(?i)\bcrash|sigkill|\bdie[sd]?\b|\bkilled\b|terminated|deleted|rolling update|redeploy",
        ),
        connectors=("LMCacheMPConnector",),
        cause="A worker that ended without UNREGISTER leaves its KV pool mapped in the server until the server reaps "
        "it: after 2 minutes (0.5.0 and newer; an hour if it had no request yet), or never. nvidia-smi shows the "
        "server's process with tens of GB. Without a running server it is another process on the GPU.",
        now="nvidia-smi --query-compute-apps=pid,used_memory --format=csv; restart the LMCache server, then vLLM",
        good="no release drops the memory at once (0.5.6): --worker-registration-grace-seconds 120 shortens the hour",
        sure=False,
        threads=(
            _LMCACHE + "issues/4014",
            _LMCACHE + "issues/5265",
            _LMCACHE + "issues/4631",
            _LMCACHE + "issues/4287",
        ),
    ),
    Problem(
        code="KVD908",
        name="chunk-not-whole-blocks",
        severity=Severity.CRASH,
        title="The server's chunk size is not a multiple of vLLM's block size, and vLLM does not start.",
        shows=(
            Failed(kind="AssertionError", text="LMCache chunk size should be a multiple of vLLM block size"),
            Failed(kind="ValueError", text="LMCache chunk size <chunk> must be a multiple of"),
        ),
        connectors=_MP,
        cause="A chunk must hold whole blocks. Hybrid models (Mamba, GDN) have blocks of odd sizes (544, 640, 1056 "
        "tokens); vLLM logs `Setting attention block size to N tokens`, and this message names N in newer releases.",
        now="lmcache server --chunk-size N, with N that block size (or a multiple); one server for each such model",
        good="keep it so: no release agrees on it by itself yet (0.5.6; LMCache pull request 5222 is open)",
        threads=(_LMCACHE + "issues/4782", _LMCACHE + "issues/5217"),
    ),
    Problem(
        code="KVD910",
        name="client-and-server-differ",
        severity=Severity.HANG,
        title="Client and server are of different releases of LMCache: requests have other arguments.",
        shows=(
            Failed(kind="ValueError", text="Payload count mismatch for request <operation>"),
            Failed(kind="ValueError", text="Payload count does not match expected count"),
            Failed(kind="ValidationError", within="mq.py:_main_loop"),
            Failed(kind="ValidationError", within="mq.py:_call_handler"),
            Failed(kind="ValueError", text="this server requires clients that send IPCCacheServerKey.num_kv_readers"),
            Logged("Payload count mismatch for request"),
            Logged("Payload count does not match expected count"),
            Logged("Invalid ZMQ operation identifier"),
            Logged("Malformed response: expected at least"),
            Logged("Handler signature does not match for"),
        ),
        said=(
            r"(?i)\bRequestType\b|MessageQueue(?:Client|Server)",
            r"(?i)mismatched pair|adjacent releases|version skew|different releases|newer protocol",
            r"(?i)time ?out|strand|hang|decod",
        ),
        cause="The messages between vLLM's container and the server's change with nearly every release; 0.5.6 even "
        "names operations in another way.",
        now="pip show lmcache in both containers, and the same release in both; restart the server, then vLLM",
        good="the same release of LMCache on both sides (image tags lmcache/vllm-openai and lmcache/standalone alike)",
    ),
    Problem(
        code="KVD911",
        name="transfer-mode-without-groups",
        severity=Severity.CRASH,
        title="This transfer mode cannot handle a model with several kinds of caches.",
        shows=(
            Failed(kind="RuntimeError", text="transfer does not support hybrid KV cache groups"),
            Failed(kind="ValueError", text="engine-driven transfer does not support multiple KV transfer groups now"),
        ),
        sentence="engine_driven transfers take one group of layers only",
        connectors=_MP,
        cause="engine_driven transfers (non-GPU in older releases) copy by one list of blocks; hybrid, sliding-window "
        "and sparse models have several.",
        now="LMCACHE_MP_TRANSFER_MODE=lmcache_driven for vLLM and --supported-transfer-mode auto for the server, which "
        "then needs the GPUs and --ipc host",
        good="no release can yet (0.5.6): lmcache_driven for such models",
    ),
    Problem(
        code="KVD912",
        name="transfer-mode-not-for-device",
        severity=Severity.CRASH,
        title="lmcache_driven transfers do not work on this device.",
        shows=(
            Failed(kind="ValueError", text="MP transfer mode 'lmcache_driven' is not <why> for device type"),
            Failed(kind="ValueError", text="MP transfer mode 'handle' is not <why> for device type"),
            Failed(kind="RuntimeError", text="does not support interprocess event"),
            Failed(kind="RuntimeError", text="does not support event IPC."),
            Failed(kind="RuntimeError", text="Multiprocess IPC requires CUDA."),
            Logged("Multiprocess IPC requires CUDA."),
        ),
        connectors=_MP,
        cause="The server would have to open the device's memory and events, which this platform does not offer.",
        now="LMCACHE_MP_TRANSFER_MODE=engine_driven for vLLM and --supported-transfer-mode auto for the server "
        "(LMCache 0.5.0 and newer; 0.4.7 calls it data)",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD914",
        name="store-not-prepared",
        severity=Severity.HANG,
        title="The server did not answer when a worker wanted to store: the worker's step waited for it.",
        shows=(
            Failed(text="PREPARE_STORE timed out for instance_id=<instance> after <seconds>s"),
            Logged("PREPARE_STORE timed out for instance_id=<instance> after <seconds>s"),
        ),
        sentence="worker {instance} waited {seconds} s",
        connectors=_MP,
        cause="The server is gone, busy, or its handler failed at the request (its own log: `Error in blocking "
        "handler`, often a worker that it has forgotten).",
        now="read the server's log of that time; restart the server, then vLLM; `lmcache.mp.mq_timeout: 30` keeps the "
        "wait short",
        good="no release answers a failed handler yet (0.5.6)",
        sure=False,
    ),
    Problem(
        code="KVD918",
        name="server-autostart-fails",
        severity=Severity.CRASH,
        title="The LMCache server that vLLM starts by itself ended before it was ready.",
        shows=(
            Failed(kind="ConnectionError", text="Auto-started LMCache MP server exited before becoming healthy"),
            Failed(kind="ConnectionError", text="Auto-started LMCache MP server is not active"),
        ),
        connectors=_MP,
        releases={"lmcache": ">=0.5.6"},
        cause="Its own lines, above in the same log, say why: an argument that it does not know, a port that is in "
        "use, or too little memory for its L1.",
        now="start the command of this message by hand and read its first ERROR; or start `lmcache server` yourself "
        "before vLLM with lmcache.mp.autostart: false",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD919",
        name="degraded-engine-dies",
        severity=Severity.CRASH,
        title="LMCache failed to start, announced to go on without the cache, and kills the engine at the first step.",
        shows=(
            Failed(
                kind="AssertionError",
                within="vllm_v1_adapter.py:start_load_kv",
                source="assert self.lmcache_engine is not None",
            ),
            Failed(
                kind="AssertionError",
                within="vllm_v1_adapter.py:save_kv_layer",
                source="assert self.lmcache_engine is not None",
            ),
            Failed(
                kind="AssertionError",
                within="vllm_v1_adapter.py:wait_for_save",
                source="assert self.lmcache_engine is not None",
            ),
        ),
        said=(r"(?i)degraded", r"start_load_kv|save_kv_layer|wait_for_save", r"(?i)\bassert", r"(?i)lmcache"),
        sentence="there is no cache engine in this process",
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        releases={"lmcache": ">=0.3.14,<0.5.1"},
        cause="The start failed (`System will operate in degraded mode`, at the beginning of the log: that line has "
        "the reason), and the worker's hooks assert an engine all the same.",
        now="put right what the `degraded mode` line says; until then start vLLM without --kv-transfer-config",
        fixed={"lmcache": "0.5.1"},
        threads=("https://github.com/vllm-project/vllm/issues/44249", _LMCACHE + "pull/3487"),
    ),
    Problem(
        code="KVD923",
        name="cache-engine-not-started",
        severity=Severity.HANG,
        title="LMCache failed to start in a process, which goes on without it.",
        shows=(
            Logged("LMCacheEngine marked as init failed: <error>", "lmcache/v1/cache_engine.py"),
            Logged("LMCacheEngine marked as init failed: ", "lmcache/v1/cache_engine.py"),
        ),
        quotes=True,
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        releases={"lmcache": ">=0.3.14"},
        cause="The error after the colon decides (a traceback from 0.4.3 on: its last line). An empty one is an "
        "assertion without a text; with enable_controller it is a missing lmcache_instance_id, controller_pull_url, "
        "controller_reply_url or lmcache_worker_ports.",
        now="put right what it says and restart; until then start vLLM without --kv-transfer-config",
        good="keep it so: the set-up was wrong, and no release changes that",
        announces=True,
        sure=False,
        threads=(_LMCACHE + "issues/2854", _LMCACHE + "issues/2907"),
    ),
    Problem(
        code="KVD924",
        name="heartbeat-too-slow",
        severity=Severity.RISK,
        title="The worker's heartbeat is so slow that the server may drop a live worker between two of them.",
        shows=(
            Logged(
                "lmcache.mp.heartbeat_interval is <interval>s, so 3 x heartbeat_interval (<three>s) exceeds the MP "
                "server's"
            ),
        ),
        sentence="a heartbeat every {interval} s",
        connectors=_MP,
        releases={"lmcache": ">=0.5.0"},
        cause="The server reaps a worker after --worker-reap-timeout-seconds (120) of silence.",
        now="lmcache.mp.heartbeat_interval: 10 in kv_connector_extra_config, or --worker-reap-timeout-seconds of at "
        "least three intervals for the server",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
)
