"""The LMCache server (multi-process mode) and its clients: registration, handlers that fail, IPC, shared memory."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem, Stuck

_MP = ("LMCacheMPConnector", "MultiConnector")
_LMCACHE = "https://github.com/LMCache/LMCache/"

PROBLEMS = (
    Problem(
        code="KVD921",
        name="server-stands-while-unmapping",
        severity=Severity.HANG,
        title="The whole server stands still while it unmaps a worker's GPU memory.",
        shows=(Stuck("lmcache_driven_transfer.py:_release_entries"),),
        said=(r"_release_entries\b", r"(?i)\bhang|\bstuck\b|stands still|\bGIL\b|deadlock"),
        releases={"lmcache": ">=0.5.2"},
        cause="Dropping the memory of a worker that was reaped or has unregistered waits for the GPU. In LMCache 0.5.2 "
        "to 0.5.4 it holds Python's global lock meanwhile, so the server answers no client; from 0.5.5 on only this "
        "thread waits, and the memory stays.",
        now="restart the LMCache server, then vLLM; --worker-reap-timeout-seconds 0 keeps the server from reaping live "
        "workers",
        good="LMCache 0.5.5 or newer: the server goes on (the memory may still stay until it is restarted)",
        threads=(_LMCACHE + "issues/4676",),
    ),
    Problem(
        code="KVD922",
        name="rocm-event-blocks",
        severity=Severity.HANG,
        title="vLLM stands still while it opens the server's event: on ROCm that call does not return.",
        shows=(Stuck("streams.py:from_ipc_handle"), Stuck("event_ipc.py:import_event")),
        connectors=_MP,
        cause="With lmcache_driven transfers the worker opens an event of the server's process after each load. On "
        "ROCm the call blocks for ever, with Python's global lock held: no request moves, though /health says 200.",
        now="export LMCACHE_MP_TRANSFER_MODE=engine_driven for vLLM (LMCache 0.4.7 and newer), "
        "--supported-transfer-mode auto for the server, and restart both",
        good="no release of LMCache is right on ROCm yet (0.5.6): engine_driven; on CUDA it is another fault",
        sure=False,
        threads=(_LMCACHE + "issues/4419",),
    ),
    Problem(
        code="KVD902",
        name="server-sees-no-gpu",
        severity=Severity.HANG,
        title="The server cannot see the worker's GPU, and the worker's registration is never answered.",
        shows=(
            Failed(kind="RuntimeError", text="Device UUID <device> not found in the discovered devices"),
            Logged("Device UUID <device> not found in the discovered devices"),
        ),
        sentence="the server does not see the GPU {device}",
        said=(r"(?i)lmcache", r"(?i)device uuid\b[^\n]{0,80}?not (?:be )?found"),
        cause="With lmcache_driven transfers the server opens the worker's GPU memory: its container has no GPU, or "
        "others (NVIDIA_VISIBLE_DEVICES, Kubernetes gives each container its own).",
        now="the server's container with --gpus all (Kubernetes: NVIDIA_VISIBLE_DEVICES=all, no nvidia.com/gpu of its "
        "own) and --ipc host; or LMCACHE_MP_TRANSFER_MODE=engine_driven for vLLM and --supported-transfer-mode auto",
        good="keep it so: the set-up was wrong, and no release changes that",
        threads=(_LMCACHE + "issues/4186", _LMCACHE + "pull/4202"),
    ),
    Problem(
        code="KVD920",
        name="server-does-not-know-worker",
        severity=Severity.HANG,
        title="The server does not know the worker that stores or loads, and sends it no answer.",
        shows=(
            Failed(kind="AssertionError", text="KV cache not registered for GPU ID <worker>"),
            Failed(kind="ValueError", text="No GPU context registered for instance ID <worker>"),
            Failed(kind="ValueError", text="context not registered (or reaped) for instance ID <worker>"),
            Failed(kind="ValueError", text="non-CUDA context not registered for instance ID <worker>"),
            Logged("KV cache not registered for GPU ID <worker>"),
            Logged("No GPU context registered for instance ID <worker>"),
        ),
        sentence="worker {worker} is not registered with the server",
        said=(
            r"(?i)lmcache",
            r"(?i)\b(?:MP|multi-?process)\b|lmcache server|LMCacheMPConnector",
            r"(?i)server (?:\w+ )?restart|restart\w*(?: \w+){0,3} (?:lmcache|server)\b|\breap|\bidle\b",
            r"(?i)re-?connect|re-?regist|not registered|requires? (?:a )?(?:vllm|engine) restart"
            r"|no registered gpu context",
        ),
        cause="The server was restarted while vLLM went on (a new one knows no worker), or it dropped the worker: a "
        "line `Reaped ... instance` before this one says so (KVD210). A worker begins its heartbeats with its first "
        "store or load: one that serves nothing for --worker-registration-grace-seconds (3600; an idle data parallel "
        "rank) is dropped alive. The number is the worker's, no GPU's.",
        now="restart vLLM (its workers register anew); from now on the server first, then vLLM; for workers that idle "
        "`lmcache server --worker-registration-grace-seconds 31536000`, or --worker-reap-timeout-seconds 0",
        good="LMCache 0.5.5 or newer on both sides: the server refuses, and answers; workers register again after a "
        "missed heartbeat from 0.4.5 on; idle workers are dropped in every release up to 0.5.6",
        threads=(_LMCACHE + "pull/2884", _LMCACHE + "issues/4715", _LMCACHE + "issues/4642", _LMCACHE + "issues/3448"),
    ),
    Problem(
        code="KVD903",
        name="server-lacks-mla-of-sglang",
        severity=Severity.HANG,
        title="SGLang's memory of an MLA model cannot be registered with the server.",
        shows=(
            Failed(kind="ValueError", text="is undefined for the fused format <format>"),
            Logged("is undefined for the fused format <format>"),
        ),
        sentence="the server asks for a block size that {format} does not have",
        releases={"lmcache": ">=0.5.0,<0.5.5"},
        cause="SGLang's MLA pool is one tensor for each layer with blocks and slots in one dimension; the server's "
        "detector has no case for it and takes another format.",
        now="SGLang with LMCache in its own process (no server) for MLA models",
        fixed={"lmcache": "0.5.5"},
        threads=(_LMCACHE + "issues/4793",),
    ),
    Problem(
        code="KVD906",
        name="gpu-memory-not-shared",
        severity=Severity.HANG,
        title="The worker's GPU memory cannot be shared with the server.",
        shows=(
            Failed(kind="RuntimeError", text="cudaIpcOpenMemHandle failed: <error>"),
            Failed(kind="RuntimeError", text="cudaIpcGetMemHandle failed: <error>"),
            Logged("cudaIpcOpenMemHandle failed: <error>"),
            Logged("cudaIpcGetMemHandle failed: <error>"),
        ),
        sentence="CUDA says {error}",
        cause="Get (in the worker): the memory is not of cudaMalloc: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
        "or vLLM's sleep mode. Open (in the server): other containers without a common IPC name space, another GPU or "
        "driver, MIG, or a handle that this process opened already.",
        now="unset PYTORCH_CUDA_ALLOC_CONF, no --enable-sleep-mode; both containers with --ipc host --gpus all, the "
        "same CUDA; or LMCACHE_MP_TRANSFER_MODE=engine_driven for vLLM and --supported-transfer-mode auto for the "
        "server",
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
        threads=(_LMCACHE + "issues/3326",),
    ),
    Problem(
        code="KVD909",
        name="model-not-registered",
        severity=Severity.SLOW,
        title="The server is asked about a model that no worker has registered: every lookup is a miss.",
        shows=(
            Logged("No GPU context found for model <model> with world size <size> during lookup"),
            Logged("No group layout descs found for model <model> with world size <size> during lookup"),
        ),
        sentence="no worker has registered {model} with world size {size}",
        cause="The server was restarted and the workers have not come back (they do after a missed heartbeat, from "
        "0.4.5 on; a restart faster than a heartbeat is not noticed), the worker was reaped, or scheduler and workers "
        "use another server or world size (an MLA model over P2P: LMCache issue 4894). In a build of LMCache's main "
        "of May 2026 one of two engines of the same model that ends takes the description of both with it; no release "
        "does (pull request 3451).",
        now="restart vLLM after the server; the same lmcache.mp.host and lmcache.mp.port for scheduler and workers; an "
        "MLA model over P2P: upgrade LMCache on both nodes, a restart changes nothing",
        good="the same release of LMCache, 0.5.5 or newer, on both sides; P2P with MLA models is not right in 0.5.4",
        sure=False,
        threads=(
            _LMCACHE + "issues/4894",
            _LMCACHE + "pull/2884",
            _LMCACHE + "issues/4642",
            _LMCACHE + "issues/3448",
            _LMCACHE + "pull/3451",
        ),
    ),
    Problem(
        code="KVD915",
        name="server-store-fails",
        severity=Severity.SLOW,
        title="The server failed while it copied KV to or from the GPU; the request goes on without the cache.",
        shows=(
            Logged("Cannot store keys due to exception"),
            Logged("Cannot retrieve keys due to exception"),
            Logged("Cannot retrieve keys: "),
            Logged("Exception occurred while processing read prefetched results"),
        ),
        cause="The traceback below this line says what; often a CUDA error, after which the server's process is no "
        "good any more, or blocks that are not where they were registered. Before LMCache 0.5.5 the client takes a "
        "failed load for done (KVD301).",
        now="restart the server, then vLLM: after a CUDA error the server's process is of no use any more; with "
        "LMCache before 0.5.5 restart vLLM at once (its answers may be wrong), and report the traceback: "
        "`kvfix-diagnose LOG --issue FILE.md`",
        good="LMCache 0.5.5 or newer, which recomputes after a failed load; the failure itself is in the traceback",
        announces=True,
        sure=False,
        threads=(_LMCACHE + "issues/3388",),
    ),
    Problem(
        code="KVD916",
        name="session-recreated",
        severity=Severity.SLOW,
        title="A store or load came for a request whose session the server had ended.",
        shows=(
            Failed(kind="ValueError", text="get_hashes end (<end>) exceeds the session's <tokens> token(s)"),
            Logged("get_hashes end (<end>) exceeds the session's <tokens> token(s)"),
        ),
        sentence="asked for {end} tokens, the session has {tokens}",
        releases={"lmcache": ">=0.5.5"},
        cause="The request ended or was aborted, and its last store arrived after END_SESSION: a new session without "
        "tokens was made for it. The store is left out.",
        now="nothing where it is rare (aborted requests); else the same release of LMCache on both sides",
        good="LMCache 0.5.5 refuses it where older ones stored under wrong keys",
        sure=False,
    ),
    Problem(
        code="KVD917",
        name="address-in-use",
        severity=Severity.CRASH,
        title="A port or socket that LMCache wants to open is taken by another process.",
        shows=(
            Failed(kind="ZMQError", text="Address already in use", within="lmcache/"),
            Failed(kind="ZMQError", text="Address already in use (addr='<address>lmcache_rpc_port_<port>"),
            Logged("Address already in use (addr='<address>lmcache_rpc_port_<port>"),
        ),
        cause="A server or vLLM from before still runs (`Killed` parents leave workers behind), or two engines on one "
        "host have the same port: lmcache_rpc_port, lmcache.mp.port, internal_api_server_port_start, p2p_init_ports. "
        "In nixl_connector or pd_backend: ranks of one engine with one nixl_receiver_port (tensor parallel).",
        now="ss -ltnp | grep PORT, end the old process; a lmcache_rpc_port of its own for each engine in "
        "kv_connector_extra_config; pd_peer_init_port and pd_peer_alloc_port with one port for each rank",
        good="keep it so: the set-up was wrong, and no release changes that",
        sentence="the address is in use",
        threads=(_LMCACHE + "issues/961",),
    ),
    Problem(
        code="KVD952",
        name="server-cannot-map-gpu-memory",
        severity=Severity.HANG,
        title="The server sees the GPU, but cannot map the worker's memory on it: the registration fails.",
        shows=(
            Failed(text="mapping of buffer object failed", within="to_tensor"),
            Failed(text="MapBufferObjectFailed", within="to_tensor"),
        ),
        sure=False,
        cause="The handle names a file /dev/shm/cuda.shm.* of the worker's (mode 600), which the server opens. It "
        "fails if the two containers do not share one /dev/shm (no hostIPC, no hostPath), if they run as different "
        "users (vLLM as nobody, the server as root), and with GPUs that Kubernetes gives by DRA (CDI, "
        "NVIDIA_VISIBLE_DEVICES=void), whatever is shared.",
        now="ls -l /dev/shm/cuda.shm.* in the server's container: none: hostPath /dev/shm (or hostIPC: true) in both "
        "pods; another owner: the same runAsUser in both; DRA: LMCACHE_MP_TRANSFER_MODE=engine_driven for vLLM and "
        "--supported-transfer-mode auto for the server (0.4.7 or newer), which need no CUDA IPC",
        good="0.5.5 or newer: lmcache server --isolated-ipc and lmcache.mp.isolated_ipc: true, which need no common "
        "/dev/shm; with DRA no release is known to be right (issue 4534)",
        threads=(_LMCACHE + "issues/4534", _LMCACHE + "pull/3862", _LMCACHE + "issues/4394"),
    ),
    Problem(
        code="KVD953",
        name="isolated-ipc-needs-tight-caches",
        severity=Severity.CRASH,
        title="With isolated IPC LMCache cannot hand over caches whose blocks are padded.",
        shows=(
            Failed(
                kind="ValueError",
                text="RawCudaIPCWrapper requires a tensor that is contiguous (possibly after permutation); got "
                "shape=<shape> stride=",
            ),
        ),
        sentence="a cache of the shape {shape} is not contiguous",
        releases={"lmcache": ">=0.5.5"},
        connectors=_MP,
        cause="For hybrid models vLLM pads blocks; isolated IPC describes a cache by its beginning and shape alone.",
        now='without --isolated-ipc, and without "lmcache.mp.isolated_ipc" in kv_connector_extra_config; both '
        "containers then share /dev/shm (Docker: --ipc host, Kubernetes: hostIPC: true)",
        good="no release is right yet (0.5.6 is so)",
        threads=(_LMCACHE + "issues/5097",),
    ),
    Problem(
        code="KVD1252",
        name="request-never-looked-up",
        severity=Severity.RISK,
        title="A request ends at the server without a lookup of whole chunks.",
        shows=(Logged("Session <session> has no lookup ipc key, skipping touch"),),
        sentence="no chunk of the request was looked up or stored",
        releases={"lmcache": ">=0.4.4"},
        connectors=_MP,
        sure=False,
        cause="A prompt shorter than one chunk is not looked up, and then this line is harmless. If every request has "
        "it, long ones too, the engine never asks: its registration failed, or its KV is of a layout that is not "
        "cached; the engine's first lines tell.",
        now="one prompt longer than two chunks, twice: without the line it is the short prompts (a smaller "
        "--chunk-size for them); with it look for the engine's first error or warning",
        good="nothing for short prompts: no release is silent about them (0.5.6)",
        threads=(_LMCACHE + "issues/5097", _LMCACHE + "pull/5122"),
    ),
    Problem(
        code="KVD1072",
        name="zmq-address-is-ipv6",
        severity=Severity.CRASH,
        title="LMCache's ZeroMQ sockets know IPv4 only, and were given an IPv6 address.",
        shows=(
            Failed(kind="ZMQError", text="No such device (addr='tcp://[<address>"),
            Failed(kind="ZMQError", text="No such device (addr='tcp://::<address>"),
            Failed(kind="ZMQError", text="Invalid argument (addr='tcp://[<address>"),
        ),
        cause="pyzmq makes sockets for IPv4 unless zmq.IPV6 is set, and LMCache does not set it (server, controller, "
        "P/D and P2P channels). `--host '*'` starts, but listens on IPv4 only.",
        now="an IPv4 address: server and vLLM in one pod with `lmcache server --host 127.0.0.1` and "
        '"lmcache.mp.host":"tcp://127.0.0.1"; across pods a dual-stack network, and its IPv4 address on both sides',
        good="no release of LMCache up to 0.5.6 sets zmq.IPV6 (issue 5043)",
        threads=("https://github.com/LMCache/LMCache/issues/5043",),
    ),
)
