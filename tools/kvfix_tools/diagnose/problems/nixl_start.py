"""NixlConnector: what keeps it from starting, or from its first handshake, besides ports, plugins and memory."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem, either

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_ISSUES = "https://github.com/vllm-project/vllm/issues/"
_NIXL = "https://github.com/ai-dynamo/nixl/issues/"
_BACKEND = "NIXL_ERR_BACKEND"

PROBLEMS = (
    Problem(
        code="KVD130",
        name="nixl-backend-not-started",
        severity=Severity.CRASH,
        title="NIXL found its plugin, and UCX in it does not start.",
        shows=(
            Failed(kind="nixlBackendError", text=_BACKEND, source="agent.createBackend("),
            Failed(kind="nixlBackendError", text=_BACKEND, within="nixl/_api.py:create_backend"),
            Failed(kind="nixlBackendError", text=_BACKEND, within="nixl/_api.py:__init__"),
        ),
        sure=False,
        cause="Another UCX than the wheel's own is loaded (the system's, HPC-X, one built without --enable-mt), or "
        "UCX_TLS or UCX_NET_DEVICES names what is not here. A `UCX` line just before decides.",
        now="`unset UCX_TLS UCX_NET_DEVICES NIXL_PLUGIN_DIR`, no other UCX in LD_LIBRARY_PATH, `pip install "
        "--force-reinstall nixl` (CUDA 13: nixl-cu13); a UCX of your own: `./configure --enable-mt "
        "--with-cuda=/usr/local/cuda`; `UCX_LOG_LEVEL=info` shows which one is taken",
        good="one UCX in the image, built with threads and for its CUDA",
        threads=(_NIXL + "96", "https://github.com/ai-dynamo/dynamo/issues/979"),
    ),
    Problem(
        code="KVD131",
        name="nixl-layer-without-kv-group",
        severity=Severity.CRASH,
        title="A layer that shares another layer's KV belongs to no KV group, and NixlConnector dies at start.",
        shows=(
            Failed(
                kind="KeyError",
                within="nixl/worker.py:register_kv_caches",
                source="layer_spec = self._layer_specs[layer_name]",
                at=f"{_V1}/nixl/worker.py",
            ),
        ),
        releases={"vllm": ">=0.20,<0.26"},
        cause="Draft layers (Gemma 4 with MTP) and layers with shared KV have a cache tensor and no spec of their own; "
        "the line names one.",
        now="without --speculative-config on both sides, restart",
        good="vLLM 0.26.0 leaves such layers out and starts; a draft model's KV is then not sent to decode, and its "
        "drafts are bad there (vllm#54926 is open)",
        threads=(_ISSUES + "54926",),
    ),
    Problem(
        code="KVD132",
        name="nixl-notification-not-text",
        severity=Severity.CRASH,
        title="A notification of NIXL's is no text, and the worker dies of it.",
        shows=(
            Failed(kind="UnicodeDecodeError", within="_get_new_notifs"),
            Failed(kind="UnicodeDecodeError", within="get_new_notifs"),
            Failed(kind="UnicodeDecodeError", within="_handle_notif"),
        ),
        cause="vLLM sends `<request>:<size>` with each transfer. NIXL's backend Mooncake gives other bytes back; UCX "
        "gives them as they were sent.",
        now='`"kv_connector_extra_config": {"backends": ["UCX"]}` on both sides, restart; for Mooncake itself '
        "MooncakeConnector",
        good="a backend whose notifications arrive whole",
        threads=(_NIXL + "699",),
    ),
    Problem(
        code="KVD133",
        name="platform-without-kv-shape",
        severity=Severity.CRASH,
        title="The attention backend of this platform does not say what shape its KV has.",
        shows=(
            Failed(kind="NotImplementedError", within="get_kv_cache_shape"),
            Failed(kind="NotImplementedError", within="get_kv_cache_stride_order"),
        ),
        cause="NixlConnector asks the backend for the shape of a block; a plugin for another device (Neuron, XPU, HPU) "
        "has to implement get_kv_cache_shape, and this one raises.",
        now="without --kv-transfer-config the engine runs; a newer release of the platform's plugin, or another "
        "--attention-backend that it has",
        good="a plugin whose backend implements get_kv_cache_shape",
        threads=("https://github.com/vllm-project/vllm-neuron/issues/20",),
    ),
    Problem(
        code="KVD563",
        name="nixl-needs-patched-vllm",
        severity=Severity.CRASH,
        title="Dynamo asks the workers for NIXL in a way that only its own vLLM knows.",
        shows=(Failed(kind="NotImplementedError", text="Method 'initialize_nixl' is not implemented"),),
        cause="Dynamo's disaggregated mode of that time calls a method of its patched vLLM 0.7 (ai_dynamo_vllm); plain "
        "vLLM is installed.",
        now="install the vLLM that belongs to this release of Dynamo: `pip install ai_dynamo_vllm`",
        good="a Dynamo and vLLM of today, with NixlConnector in --kv-transfer-config",
        threads=("https://github.com/ai-dynamo/dynamo/issues/331",),
    ),
    Problem(
        code="KVD378",
        name="nixl-plugin-lacks-a-library",
        severity=Severity.RISK,
        title="A plugin of NIXL does not load: a library that it needs is not here.",
        shows=(
            Logged("Failed to load plugin from <path>: <library>: cannot open shared object file"),
            Logged("Failed to load plugin from <path>: libcudart.so.<release>: cannot open shared object file"),
            Logged("Failed to load plugin from <path>: libcuda.so.1: cannot open shared object file"),
            Logged("Failed to load plugin '<plugin>' from any directory"),
        ),
        sure=False,
        cause="Each plugin is a library with needs of its own: libcuda and libcudart for GDS, GPUNETIO and UCX with "
        "CUDA (missing on machines without NVIDIA cards: then harmless, if it is not the plugin that you use), "
        "libplugin_UCX.so for UCX_MO of nixl before 0.5, libaio, liburing, AWS libraries. Fatal only if `backend ... "
        "not found` or NIXL_ERR_BACKEND follows.",
        now="only UCX is used by vLLM: if it is UCX, ldd on its libplugin_UCX.so names what is missing; export "
        "LD_LIBRARY_PATH with that folder; UCX_MO: pip install --upgrade nixl",
        good="a nixl wheel for this machine's CUDA (nixl-cu12, nixl-cu13), or one built without CUDA where there is "
        "none",
        threads=(
            "https://github.com/ai-dynamo/dynamo/issues/1758",
            "https://github.com/ai-dynamo/nixl/issues/838",
        ),
    ),
    Problem(
        code="KVD1354",
        name="libfabric-rails-differ",
        severity=Severity.CRASH,
        title="NIXL's LIBFABRIC backend cannot read the peer's addresses: the two have another number of rails.",
        shows=(
            *either("Deserialization of tag dest_data_ep_<rail> failed"),
            *either("Failed to deserialize data rail endpoints"),
        ),
        cause="Each side writes one address for each of its EFA devices, and reads as many as it has itself. Prefill "
        "and decode see another number of devices (instance types, devices of the pod), or one process has two agents: "
        "TensorRT-LLM with NIXL_BACKEND and TRTLLM_NIXL_KVCACHE_BACKEND both set.",
        now="fi_info -p efa | grep -c domain: on both sides, and the same vpc.amazonaws.com/efa in both pods; "
        "TensorRT-LLM: unset TRTLLM_NIXL_KVCACHE_BACKEND; until then NIXL's UCX backend",
        good="the same EFA devices in all pods that exchange KV",
        sure=False,
        threads=("https://github.com/NVIDIA/TensorRT-LLM/issues/10024",),
    ),
    Problem(
        code="KVD1500",
        name="nixl-peer-before-two-part-replies",
        severity=Severity.HANG,
        title="Prefill answers the handshake of NixlConnector as older releases of vLLM do, and decode refuses it.",
        shows=(
            Failed(
                kind="AssertionError",
                within="base_worker.py:_nixl_handshake",
                source="assert len(reply_parts) == 2",
                at=f"{_V1}/nixl/base_worker.py",
            ),
        ),
        replaces=("KVD156", "KVD570"),
        releases={"vllm": ">=0.26"},
        cause="vLLM 0.26 sends its clock as a second part of the answer; 0.20 sends one part. Decode counts the parts "
        "before it compares the releases, so no line names them: the prefill at that host and port is older.",
        now="`curl http://PREFILL:8000/version` and the same for decode; one image on both sides; restart both. A "
        "rolling update: both roles of a pair together, and no route from a new decode to an old prefill",
        good="one release of vLLM on prefill and decode",
    ),
    Problem(
        code="KVD1502",
        name="nixl-engine-is-its-own-peer",
        severity=Severity.HANG,
        title="A request names this very engine as the one that has its KV.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Cannot register local engine <engine> as remote.",
                at="vllm/distributed/kv_transfer/kv_connector/utils.py",
            ),
        ),
        sentence="{engine}",
        replaces=("KVD156", "KVD570"),
        releases={"vllm": ">=0.20"},
        cause="remote_engine_id of the request's kv_transfer_params is the engine's own. Either the router sent "
        "prefill and decode of a request to one engine (kv_role kv_both, two names of one service), or two engines "
        "have one engine_id, set in --kv-transfer-config or copied with it.",
        now="take `engine_id` out of --kv-transfer-config on both sides (each start then makes its own); in the "
        "router two separate lists of engines, so that decode is another one than prefill; restart",
        good="an engine_id of its own for each engine",
        sure=False,
    ),
    Problem(
        code="KVD1504",
        name="nixl-not-on-this-platform",
        severity=Severity.CRASH,
        title="NixlConnector does not know the kind of device that this vLLM runs on.",
        shows=(
            Failed(kind="RuntimeError", text="<device> is not supported.", within="base_worker.py:__init__"),
            Failed(kind="RuntimeError", text="<device> is not supported.", within="nixl/worker.py:__init__"),
        ),
        sentence="{device}",
        releases={"vllm": ">=0.11"},
        cause="It serves cuda (ROCm goes by that name), xpu, tpu and cpu. Another one must be added by the platform's "
        "plugin (get_nixl_supported_devices), and this plugin, or its release, does not.",
        now="the connector of that plugin (vllm-ascend: MooncakeConnectorV1), or a release of the plugin that "
        "supports NIXL; pip list | grep vllm",
        good="a plugin that supports NIXL",
        sure=False,
    ),
    Problem(
        code="KVD1506",
        name="nixl-push-stages-of-packed-caches",
        severity=Severity.CRASH,
        title="NixlPushConnector cannot push this model's packed KV cache from several pipeline stages.",
        shows=(
            Failed(
                kind="NotImplementedError",
                text="PP push with packed KV caches requires MLA",
                at=f"{_V1}/nixl/base_worker.py",
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="KV groups that share one block of memory are addressed layer by layer only where every layer is MLA. "
        "This model has other layers among them.",
        now="--pipeline-parallel-size 1 and a larger --tensor-parallel-size on prefill and decode; restart both",
        good="the sizes; 0.33.0 asks for MLA too",
    ),
    Problem(
        code="KVD1508",
        name="nixl-shared-states-through-the-host",
        severity=Severity.CRASH,
        title="NixlConnector cannot stage this model's cache in host memory.",
        shows=(
            Failed(
                kind="NotImplementedError",
                text="NIXL host staging does not preserve CSA-linear shared tensors.",
                at=f"{_V1}/nixl/base_worker.py",
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="kv_buffer_device is cpu. Attention and state of this model lie in one tensor, which the copy in host "
        "memory would take apart.",
        now='`"kv_buffer_device": "cuda"` in --kv-transfer-config on both sides; restart both',
        good="the setting",
    ),
    Problem(
        code="KVD1730",
        name="nixl-mooncake-notification-is-no-text",
        severity=Severity.CRASH,
        title="A notification that NIXL's Mooncake plugin hands back is no text, and NixlConnector decodes it.",
        shows=(),
        said=(r"UnicodeDecodeError|can't decode byte", r"(?i)\bnixl", r"(?i)\bmoonc(?:a?ke)"),
        replaces=("KVD239",),
        connectors=("NixlConnector", "MultiConnector"),
        sure=False,
        cause="NixlConnector reads a notification as `request:ranks` in UTF-8. UCX hands the bytes back as they were "
        "sent; other bytes come from the plugin.",
        now='`"backends": ["UCX"]` in kv_connector_extra_config of both sides, restart',
        good="the same, until a release of nixl is known to be right with Mooncake",
        threads=(_NIXL + "699",),
    ),
)
