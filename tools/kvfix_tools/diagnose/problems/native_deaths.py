"""Libraries of C and C++ that end the process, or that do not fit the Python package that calls them."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_VLLM = "https://github.com/vllm-project/vllm/"

PROBLEMS = (
    Problem(
        code="KVD940",
        name="ucx-needs-avx",
        severity=Severity.CRASH,
        title="The UCX library inside nixl's wheel ends the process: this machine's CPU has no AVX.",
        shows=(Logged("UCX library was compiled with <flags> but CPU does not support it"),),
        sentence="UCX was compiled with {flags}, which the CPU does not show",
        cause="vLLM imports nixl at the start where it is installed, whether a connector uses it or not, and UCX exits "
        "with SIGSEGV. Mostly the CPU has AVX, and the virtual machine's CPU model (`x86-64-v2-AES`, `kvm64`, "
        "`qemu64`) hides it.",
        now="the virtual machine's CPU model `host` (Proxmox: `qm set VMID --cpu host`; libvirt: "
        '`<cpu mode="host-passthrough"/>`), restart it; without NIXL: pip uninstall -y nixl nixl-cu12 nixl-cu13',
        good="a CPU model with AVX; no release of nixl's wheel does without",
        threads=(f"{_VLLM}issues/52885", "https://github.com/ai-dynamo/nixl/issues/2119"),
    ),
    Problem(
        code="KVD1049",
        name="nixl-libfabric-ends-the-process",
        severity=Severity.CRASH,
        title="A plugin of nixl asks for the machine's NUMA nodes, finds none, and ends the process.",
        shows=(Died("request to allocate mask for invalid number"),),
        sure=False,
        cause="The line is libnuma's: it exits where /sys/devices/system/node is empty or does not fit. With nixl it "
        "is the LIBFABRIC plugin of nixl 1.0.0, which is loaded also for UCX: `python -c 'from nixl._api "
        'import nixl_agent; nixl_agent("a")\'` prints the same line then.',
        now="move the plugin away: `mv $(find / -name libplugin_LIBFABRIC.so -path '*nixl*' 2>/dev/null) /tmp/`, "
        "restart; or `pip install 'nixl<1.0'`",
        good="nixl 1.1.0 or newer, which vLLM asks for since June 2026",
        threads=(f"{_VLLM}issues/39521",),
    ),
    Problem(
        code="KVD941",
        name="rocm-memory-fault",
        severity=Severity.CRASH,
        title="A kernel read or wrote GPU memory that is not mapped, and ROCm ended the process.",
        shows=(Died("Memory access fault by GPU"),),
        sure=False,
        cause="The process that prints it decides. `lmcache server`: it works with an IPC event or memory that its "
        "worker has given up, or block numbers of another layout. An engine: a connector's copy with wrong block "
        "numbers, or vLLM's own kernel. The last lines of that process name the operation.",
        now="`AMD_SERIALIZE_KERNEL=3 HIP_LAUNCH_BLOCKING=1` names the kernel; try it without --kv-transfer-config: if "
        "it still dies it is vLLM; with LMCacheMPConnector the engine's own process (LMCacheConnectorV1) has no IPC",
        good="no release is known to be right; the thread has what was tried on MI300",
        threads=(f"{_LMCACHE}pull/4640",),
    ),
    Problem(
        code="KVD942",
        name="nixl-older-than-vllm",
        severity=Severity.CRASH,
        title="The installed nixl is older than this vLLM, which hands it an argument that it does not take.",
        shows=(
            Failed(
                kind="TypeError", text="nixl_agent_config.__init__() got an unexpected keyword argument '<argument>'"
            ),
        ),
        sentence="nixl_agent_config does not take {argument}",
        cause="vLLM 0.11 and newer hand `num_threads` (nixl 0.6.0 or newer), vLLM 0.15 and newer `capture_telemetry` "
        "too (nixl 0.7.1 or newer). pip does not see it: vLLM does not depend on nixl.",
        now="pip install -U nixl (CUDA 13: nixl-cu13) in the engine's environment on every node, restart",
        good="nixl of the same month as vLLM, the same on prefill and decode",
        threads=("https://github.com/ray-project/ray/pull/57201",),
    ),
    Problem(
        code="KVD943",
        name="nixl-plugin-of-another-nixl",
        severity=Severity.CRASH,
        title="NIXL loads a plugin that was built for another nixl, and has no transport.",
        shows=(
            Logged("ailed to load plugin from <path>.so: undefined symbol: <symbol>"),
            Failed(text="ailed to load plugin from <path>.so: undefined symbol: <symbol>"),
        ),
        sentence="{path}.so",
        cause="Two nixl are there: the wheel in site-packages, and one that was built into the image "
        "(/usr/local/nixl, /opt/nvidia/nvda_nixl), whose folder NIXL_PLUGIN_DIR or LD_LIBRARY_PATH names.",
        now="unset NIXL_PLUGIN_DIR, take that nixl out of LD_LIBRARY_PATH, pip install --force-reinstall nixl (CUDA "
        "13: nixl-cu13), restart",
        good="one nixl in the image: the wheel, or the one that was built, with its own Python package",
        threads=("https://github.com/ray-project/ray/pull/57201",),
    ),
    Problem(
        code="KVD945",
        name="worker-silent-engine-gives-up",
        severity=Severity.HANG,
        title="A worker did not answer within vLLM's time limit, and EngineCore gave up.",
        shows=(
            Failed(kind="TimeoutError", text="RPC call to <method> timed out"),
            Failed(kind="TimeoutError", within="shm_broadcast.py:acquire_read"),
            Failed(kind="TimeoutError", within="shm_broadcast.py:dequeue", source="self.acquire_read("),
        ),
        sure=False,
        cause="The worker stands in a step: in a hook of the connector (a retrieve that does not come, a lock between "
        "two CUDA processes), in NCCL or RDMA with another rank, or in a compilation. The log does not show where: "
        "the stacks of the workers do. VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS (300) is the limit.",
        now="next time, before the limit: `kvfix dump PID` or `py-spy dump --pid PID` of every worker and of the "
        "LMCache server, then kvfix-diagnose on that; try once without --kv-transfer-config: if it still hangs it is "
        "no connector",
        good="what the stacks show; a larger VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS only for slow compilations",
        threads=(f"{_LMCACHE}issues/4123",),
    ),
    Problem(
        code="KVD946",
        name="kvbm-of-another-dynamo",
        severity=Severity.CRASH,
        title="Dynamo's KV connector asks for the block manager, which the installed Dynamo does not have.",
        shows=(
            Failed(kind="ImportError", text="cannot import name '<name>' from 'dynamo.llm'"),
            Failed(kind="ModuleNotFoundError", text="No module named 'dynamo.llm.vllm_integration"),
            Failed(kind="ModuleNotFoundError", text="No module named 'kvbm"),
        ),
        sure=False,
        cause="Up to Dynamo 0.6 the block manager was compiled into ai-dynamo only with --enable-kvbm, which the wheel "
        "of PyPI was not; since then it is a package of its own, `kvbm`. Else ai-dynamo and ai-dynamo-runtime are of "
        "different releases.",
        now='pip install kvbm==<your Dynamo\'s release>, and "kv_connector":"DynamoConnector",'
        '"kv_connector_module_path":"kvbm.vllm_integration.connector" in --kv-transfer-config; or NVIDIA\'s image',
        good="ai-dynamo, ai-dynamo-runtime and kvbm of one release that has kvbm on PyPI",
        threads=("https://github.com/ai-dynamo/dynamo/issues/3952",),
    ),
    Problem(
        code="KVD947",
        name="context-was-terminated",
        severity=Severity.RISK,
        title="A thread of LMCache still listened while its ZeroMQ context was closed.",
        shows=(
            Logged("loop: Context was terminated"),
            Logged("error response: Context was terminated"),
        ),
        sure=False,
        cause="The engine is ending, and this thread goes on in its loop: it says so again and again, which is "
        "harmless. `hcomm_onesided` and other channels of LMCache-Ascend do so before its pull 187 (March 2026). Why "
        "the engine ends stands before the first of these lines.",
        now="nothing has to change; an error before the first of these lines would be why the engine ends, and where "
        "there is none somebody ended it",
        good="an LMCache-Ascend with pull 187, whose loop ends with the context; what the earlier line says",
        threads=("https://github.com/LMCache/LMCache-Ascend/pull/187",),
    ),
    Problem(
        code="KVD985",
        name="compiled-kernel-out-of-range",
        severity=Severity.CRASH,
        title="A kernel that torch.compile made reads beyond a table, and the CUDA context is lost.",
        shows=(Died("Assertion `index out of bounds"),),
        sure=False,
        cause="An index of this step is not below the number in the assertion. Where that number is the model's "
        "max_position_embeddings, a prompt is longer than its table of positions: the rope scaling was not taken "
        "over. Where it is the size of the vocabulary, a token id is wrong. No connector computes in such a kernel.",
        now="--max-model-len not above the number in the assertion; if it still dies, try it without "
        "--kv-transfer-config, and with --enforce-eager, whose traceback names the operation",
        good="rope scaling in config.json of the model, and a vLLM that logs the max_model_len that results",
        threads=("https://github.com/LMCache/LMCache/issues/2262",),
    ),
    Problem(
        code="KVD1301",
        name="rust-code-panicked",
        general=True,
        severity=Severity.CRASH,
        title="Code in Rust gave up over a state that it holds for impossible (a panic).",
        shows=(Died("thread '<name>' panicked at"),),
        cause="The file behind `panicked at` says whose code it was: lib/llm, lib/runtime or lib/bindings is Dynamo "
        "(block_manager: KVBM), .cargo/registry a library that it uses; the message behind it, or in the next line, is "
        "the reason. A panic ends its thread, not always the process: an engine whose connector's thread is gone waits "
        "for it without an end.",
        now="what the message names (an address that refuses, a setting that is missing, memory that is not there); "
        "RUST_BACKTRACE=1 at the next start shows who called it; restart the process in any case",
        good="report the message and that backtrace to the project that the file belongs to",
        sure=False,
    ),
    Problem(
        code="KVD1305",
        name="peer-silent-on-the-fabric",
        severity=Severity.CRASH,
        title="The network card gave up on a peer that acknowledged nothing (UCX).",
        shows=(Logged("Transport retry count exceeded on <device>"),),
        sentence="on {device} nothing was acknowledged",
        cause="The card sent again as often as it may and heard nothing: the peer's process died or restarted, or the "
        "path between these two cards drops packets (RoCE without PFC or with another MTU, a GID of another network, "
        "cards of different rails). If the peer's log has an error before this line, it is the peer; if it goes on "
        "working, it is the path.",
        now="restart both engines together if the peer had restarted; else ib_write_bw between these two cards, "
        "`UCX_NET_DEVICES=<card>:1` with cards that reach each other, UCX_IB_GID_INDEX as show_gids has it; tonight "
        "`UCX_TLS=tcp,cuda_copy,cuda_ipc`",
        good="a fabric on which ib_write_bw passes between every two cards of prefill and decode",
        sure=False,
    ),
)
