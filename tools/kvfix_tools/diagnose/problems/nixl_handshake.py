"""NixlConnector: NIXL and UCX at the start, and the handshake of decode and prefill."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_PULLS = "https://github.com/vllm-project/vllm/pull"
_LMCACHE = "https://github.com/LMCache/LMCache/issues"
_BASE_WORKER = f"{_V1}/nixl/base_worker.py"

PROBLEMS = (
    Problem(
        code="KVD550",
        name="nixl-handshake-unanswered",
        severity=Severity.HANG,
        title="The prefill engine does not answer the NIXL handshake, so decode cannot fetch its KV.",
        shows=(Failed(kind="Again", text="Resource temporarily unavailable", within="_nixl_handshake"),),
        replaces=("KVD156", "KVD570"),
        cause="Nothing answers in 5 seconds on the host and port that prefill handed out: prefill is down or "
        "restarting, its VLLM_NIXL_SIDE_CHANNEL_HOST is still the default `localhost`, or the port is closed. Every "
        "data parallel rank has its own: VLLM_NIXL_SIDE_CHANNEL_PORT (5600) + rank.",
        now="on each prefill node `export VLLM_NIXL_SIDE_CHANNEL_HOST=<its address as decode sees it>`, open its "
        "VLLM_NIXL_SIDE_CHANNEL_PORT, restart prefill; `nc -vz HOST PORT` from decode shows whether it is "
        'open. `"kv_load_failure_policy": "recompute"` on decode answers requests meanwhile',
        good="the set-up: host and port of prefill reachable from every decode node; no release changes that",
        threads=(
            f"{_PULLS}/26171",
            f"{_PULLS}/41863",
        ),
    ),
    Problem(
        code="KVD551",
        name="nixl-other-engine-answers",
        severity=Severity.HANG,
        title="The NIXL handshake reaches another engine than the one that did the prefill.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="Remote NIXL agent engine ID mismatch. Expected <expected>,received <got>.",
                at=_BASE_WORKER,
            ),
        ),
        sentence="expected engine {expected}, reached {got}",
        replaces=("KVD156", "KVD570"),
        cause="Two engines hand out the same host and port, mostly because VLLM_NIXL_SIDE_CHANNEL_HOST is not set and "
        "`localhost` is decode itself; or prefill was restarted, and the request still names the engine before it.",
        now="`export VLLM_NIXL_SIDE_CHANNEL_HOST=<this node's own address>` on every node, another "
        "VLLM_NIXL_SIDE_CHANNEL_PORT for each engine of one host, restart them; right after a restart of prefill: send "
        "the requests again",
        good="the set-up: each engine with a host and port of its own; no release changes that",
        threads=(f"{_ISSUES}/27083",),
    ),
    Problem(
        code="KVD552",
        name="nixl-configurations-differ",
        severity=Severity.HANG,
        title="Prefill and decode are configured differently, and the NIXL handshake refuses.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="NIXL compatibility hash mismatch. Local: <local>, Remote: <remote>.",
                at=_BASE_WORKER,
            ),
            Failed(kind="RuntimeError", text="NIXL compatibility hash mismatch"),  # as a sentence quotes it
        ),
        releases={"vllm": ">=0.15"},
        replaces=("KVD156", "KVD570"),
        sure=False,
        cause="One of what is hashed differs: vLLM's release, the model as --model says it (a local path too), dtype, "
        "--kv-cache-dtype, the attention backend; from 0.20 the hybrid KV cache manager, on at one side and off at the "
        "other (a second connector in MultiConnector or PdConnector that cannot take it turns it off), and until 0.26 "
        "`enable_cross_layers_blocks`, which in a MultiConnector counts only if all of its connectors ask for it; "
        "from 0.32 the draft model, and NixlPushConnector against NixlConnector.",
        now="`VLLM_LOGGING_LEVEL=DEBUG` prints the parts (`NIXL compatibility hash`). Same image, --model, --dtype, "
        "--kv-cache-dtype, --attention-backend, --speculative-config and kv_connector_extra_config; one side with "
        "two connectors: on both `--disable-hybrid-kv-cache-manager`, no `enable_cross_layers_blocks`. "
        "Only the path differs: "
        '`"kv_connector_extra_config": {"enforce_handshake_compat": false}` on both',
        good="one image and one set of options for prefill and decode; no release changes that",
        threads=(
            "https://github.com/ai-dynamo/dynamo/issues/10027",
            "https://github.com/ai-dynamo/dynamo/pull/12821",
        ),
    ),
    Problem(
        code="KVD553",
        name="nixl-handshake-of-other-release",
        severity=Severity.HANG,
        title="Decode cannot read prefill's NIXL handshake: they are of different vLLM releases.",
        shows=(
            Failed(kind="RuntimeError", text="Failed to decode NixlHandshakePayload", at=_BASE_WORKER),
            Failed(kind="RuntimeError", text="Failed to decode NixlAgentMetadata", at=_BASE_WORKER),
        ),
        releases={"vllm": ">=0.15"},
        replaces=("KVD156", "KVD570"),
        cause="The content of the handshake changes from release to release; the other side runs another one.",
        now="the same vLLM release (the same image) on prefill and decode; after a rolling update restart the older "
        "side",
        good="roll prefill and decode over together; no release reads another one's handshake",
    ),
    Problem(
        code="KVD554",
        name="nixl-peer-not-connected",
        severity=Severity.HANG,
        title="NIXL cannot connect to the other engine's memory.",
        shows=(
            Failed(kind="nixlBackendError", text="NIXL_ERR_BACKEND", within="add_remote_agent"),
            Failed(kind="nixlUnknownError", within="add_remote_agent"),
            Failed(kind="nixlUnknownError", within="add_remote_nixl_metadata"),
        ),
        sure=False,
        replaces=("KVD156", "KVD570"),
        cause="UCX found no way to the peer. The line `UCX  ERROR` just before decides: no common transport (UCX_TLS "
        "or UCX_NET_DEVICES differ), an unreachable NIC, or UCX or nixl of different releases on the two sides. On AWS "
        "EFA: vLLM takes UCX unless `backends` says otherwise.",
        now='AWS EFA: `"kv_connector_extra_config": {"backends": ["LIBFABRIC"]}` on both sides. Else the same nixl, '
        "UCX_TLS and UCX_NET_DEVICES on both, best unset; without RDMA `UCX_TLS=tcp,cuda_copy,cuda_ipc`; containers "
        "with `--network host --ipc host --device /dev/infiniband`",
        good="the set-up of the transport; `UCX_LOG_LEVEL=info` shows which one is taken",
        threads=(
            f"{_ISSUES}/50765",
            "https://github.com/ai-dynamo/dynamo/issues/306",
        ),
    ),
    Problem(
        code="KVD555",
        name="nixl-memory-not-registered",
        severity=Severity.CRASH,
        title="NIXL cannot register memory with its backend, and the engine does not start.",
        shows=(
            Failed(kind="nixlBackendError", text="NIXL_ERR_BACKEND", within="register_memory"),
            # Dynamo's vLLM of 2025, where the worker's own traceback is not there.
            Failed(kind="nixlBackendError", within="llm_engine.py:_initialize_nixl"),
        ),
        sure=False,
        cause="The `UCX` line just before decides. `transports 'cuda_ipc','cuda_copy' are not available`, or memory of "
        "the CPU is registered and the GPU's is not: UCX without CUDA (that of nixl's own wheels of spring 2025, 0.1 "
        "and 0.2, too). `ibv_reg_mr ... failed`: the NIC cannot reach "
        "GPU memory (nvidia_peermem, memlock). Neither, and "
        "--pipeline-parallel-size > 1 with vLLM before 0.11.2: registered under the wrong device number.",
        now="`pip install --force-reinstall nixl` of the image's CUDA (CUDA 13: nixl-cu13), no other UCX in "
        "LD_LIBRARY_PATH; containers with `--ulimit memlock=-1 --device /dev/infiniband`; without RDMA "
        "`UCX_TLS=tcp,cuda_copy,cuda_ipc`; `--pipeline-parallel-size 1`",
        good="nixl and UCX built for this CUDA; pipeline parallel with NixlConnector: no release of vLLM is right for "
        "both roles yet",
        threads=(
            f"{_ISSUES}/22430",
            "https://github.com/vllm-project/aibrix/issues/1433",
            f"{_LMCACHE}/605",
            "https://github.com/ai-dynamo/dynamo/issues/1108",
        ),
    ),
    Problem(
        code="KVD556",
        name="ucx-without-cuda",
        severity=Severity.CRASH,
        title="UCX has no CUDA support here, so NIXL cannot move GPU memory.",
        shows=(
            Logged("transports 'cuda_ipc','cuda_copy' are not available"),
            Logged("transports 'cuda_copy','cuda_ipc' are not available"),
            Logged("transport 'cuda_copy' is not available"),
            Logged("transport 'cuda_ipc' is not available"),
            Logged("VRAM memory is detected as host"),
        ),
        cause="The UCX that NIXL loaded was built without CUDA, or its CUDA modules were not found: another UCX "
        "(HPC-X, /opt/ucx) stands first in LD_LIBRARY_PATH, or the wheel's modules are not where it looks.",
        now="take other UCX out of LD_LIBRARY_PATH; `pip install --force-reinstall nixl-cu12` (CUDA 13: nixl-cu13); if "
        "it stays: `export UCX_MODULE_DIR=` the folder of libuct_cuda.so in site-packages/nixl*.libs/ucx",
        good="one UCX with CUDA on the path, the one of the nixl wheel",
        threads=(
            f"{_LMCACHE}/605",
            "https://github.com/ai-dynamo/nixl/issues/1628",
        ),
    ),
    Problem(
        code="KVD557",
        name="ucx-of-another-release",
        severity=Severity.CRASH,
        title="NIXL runs with another UCX than it was built for.",
        shows=(Logged("UCP API version is incompatible: required >= <need>, actual <have>"),),
        sentence="needs UCX {need}, loaded is {have}",
        cause="A UCX of the system or of HPC-X is found before the one that NIXL brings; transfers then fail or crash.",
        now="`unset LD_LIBRARY_PATH` of HPC-X and /usr/lib UCX (or put the nixl wheel's *.libs folder first), restart "
        "both engines",
        good="remove the older UCX from the image",
        threads=(
            "https://github.com/ai-dynamo/dynamo/issues/418",
            f"{_ISSUES}/32375",
        ),
    ),
    Problem(
        code="KVD558",
        name="ucx-nic-cannot-register",
        severity=Severity.CRASH,
        title="The RDMA device cannot register memory.",
        shows=(Logged("ibv_reg_mr(address=<address>, length=<length>, access=<access>) failed: <reason>"),),
        sentence="{length} bytes: {reason}",
        sure=False,
        cause="`Bad address`: the NIC cannot see GPU memory, because nvidia_peermem is not loaded, or the KV cache is "
        "in memory that cannot be registered (--enable-sleep-mode with vLLM before 0.15). `Cannot allocate memory`: "
        "the memlock limit, or the NIC's table is full.",
        now="`modprobe nvidia_peermem` on the host; container with `--ulimit memlock=-1 --device /dev/infiniband`; no "
        "--enable-sleep-mode with vLLM before 0.15; without RDMA `UCX_TLS=tcp,cuda_copy,cuda_ipc`",
        good="nvidia_peermem (or dma-buf) and memlock on every node; vLLM 0.15.1 for sleep mode",
        threads=(f"{_PULLS}/29569",),
    ),
    Problem(
        code="KVD559",
        name="nixl-not-installed",
        severity=Severity.CRASH,
        title="NIXL cannot be imported, and NixlConnector does not start.",
        shows=(
            Failed(kind="RuntimeError", text="NIXL is not available", at=_BASE_WORKER),
            Failed(kind="RuntimeError", text="NIXL is not available", at="lmcache/v1/transfer_channel/nixl_channel.py"),
        ),
        cause="The package is missing, or its import fails although pip lists it: built for another CUDA, a library of "
        "it is missing, or it is in another environment.",
        now='`python -c "import nixl._api"` in the engine\'s environment shows why; `pip install nixl` (CUDA 13: '
        "nixl-cu13; ROCm: nixl_rocm for vLLM 0.32), restart",
        good="an image with nixl for its CUDA",
        threads=("https://github.com/ai-dynamo/dynamo/issues/3054",),
    ),
    Problem(
        code="KVD560",
        name="nixl-plugin-not-found",
        severity=Severity.CRASH,
        title="NIXL does not find the plugin of its transport.",
        shows=(
            Logged("createBackend: unsupported backend '<backend>'"),
            Logged("getPluginParams: backend '<backend>' not found"),
            Failed(kind="KeyError", text="'UCX'"),
            Failed(kind="RuntimeError", text="Worker failed with error ''UCX''"),
        ),
        cause="libplugin_<backend>.so is not in NIXL's plugin folder, or one of the libraries that it needs is "
        "missing. On ROCm PyPI's nixl is the wrong package: its UCX is built for CUDA.",
        now="`ldd` on libplugin_<backend>.so names what is missing; `export NIXL_PLUGIN_DIR=` its folder; else "
        '`pip install --force-reinstall nixl`. `"kv_connector_extra_config": {"backends": ["UCX"]}` takes the'
        " default. On ROCm no reinstall helps: `pip uninstall nixl`, and an image with rixl (vLLM 0.15 to 0.26) or "
        "nixl_rocm (0.32) and a UCX that was built for ROCm",
        good="a nixl wheel with that plugin; on ROCm the build of UCX and NIXL in vLLM's docker/Dockerfile.rocm, which "
        "vllm/vllm-openai-rocm has since pull request 41634 (May 2026)",
        threads=(
            "https://github.com/ai-dynamo/nixl/issues/1561",
            f"{_ISSUES}/41814",
            f"{_ISSUES}/29530",
            f"{_ISSUES}/41637",
        ),
    ),
    Problem(
        code="KVD561",
        name="nixl-port-taken",
        severity=Severity.HANG,
        title="The port of the NIXL handshake is taken, and the engine waits for its listener for ever.",
        shows=(
            Failed(
                kind="ZMQError", text="Address already in use (addr='<address>')", within="_nixl_handshake_listener"
            ),
        ),
        sentence="{address} is taken",
        cause="Two engines of this host (prefill and decode, or data parallel ranks) use the same "
        "VLLM_NIXL_SIDE_CHANNEL_PORT; each takes port + data parallel rank. Before vLLM 0.11 the default 5557 is also "
        "the port of KV events.",
        now="another VLLM_NIXL_SIDE_CHANNEL_PORT for each engine of the host (5600, 5700, ...), restart",
        good="the set-up: ports that do not overlap; no release changes that",
        threads=(
            f"{_ISSUES}/20965",
            f"{_ISSUES}/25059",
        ),
    ),
    Problem(
        code="KVD562",
        name="nixl-handshake-kills-worker",
        severity=Severity.CRASH,
        title="A worker dies when NIXL takes up another engine's memory.",
        shows=(
            Died(within="nixl/_api.py:add_remote_agent"),
            Died(within="nixl_cu12/_api.py:add_remote_agent"),
            Died(within="nixl_cu13/_api.py:add_remote_agent"),
            Died(within="nixlAgent::loadRemoteMD"),
            Died(within="loadRemoteMD"),
            Died(within="ucp_ep_rkey_unpack"),
        ),
        said=(
            r"loadRemoteMD|add_remote_agent|ucp_ep_rkey_unpack",
            r"(?i)seg(?:mentation )?faults?|sigsegv|core dumped",
        ),
        sure=False,
        cause="NIXL or UCX crashes in the handshake: mostly after the peer was restarted under the same address while "
        "the old connection was known (`status -80 (Endpoint timeout)` before it), else two different UCX in one "
        "process.",
        now="restart both engines together, the crashed one last; no UCX of the system in LD_LIBRARY_PATH",
        good="a nixl newer than 1.3.2 (nixl issue 1986 is closed; 1.3.2 is reported to have it still)",
        threads=(
            f"{_ISSUES}/49238",
            "https://github.com/ai-dynamo/nixl/issues/1986",
            "https://github.com/smg-project/smg/issues/2503",
        ),
    ),
    Problem(
        code="KVD156",
        name="nixl-handshake-failed-before-0-15",
        severity=Severity.CRASH,
        title="The NIXL handshake failed, in a release whose decode engine may die of it.",
        shows=(Logged("Handshake with <engine> failed"),),
        sentence="with {engine}",
        connectors=("NixlConnector",),
        named=True,
        releases={"vllm": "<0.15"},
        sure=False,
        cause="The last line of the traceback below decides: `zmq.error.Again` no answer came from prefill's side "
        "channel, `NIXL_ERR_BACKEND` no way for UCX, an assertion: block size, heads or layout do not fit.",
        now="VLLM_NIXL_SIDE_CHANNEL_HOST of prefill the address that decode reaches (a pod's IP, not localhost), "
        "VLLM_NIXL_SIDE_CHANNEL_PORT open; the same model, --block-size and layout; restart",
        good="the set-up that the exception names; vLLM 0.26.0 or newer, which goes on after it",
        threads=("https://github.com/volcano-sh/kthena/issues/503",),
    ),
)
