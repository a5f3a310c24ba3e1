"""MoRIIOConnector: models and pairs that it refuses, messages of the wrong side, tasks that fail by themselves."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_MORIIO = "vllm/distributed/kv_transfer/kv_connector/v1/moriio/"
_CONNECTOR = _MORIIO + "moriio_connector.py"
_ENGINE = _MORIIO + "moriio_engine.py"
_LAYOUT = _MORIIO + "moriio_layout.py"
_PULLS = "https://github.com/vllm-project/vllm/pull/"

PROBLEMS = (
    Problem(
        code="KVD037",
        name="moriio-prefix-cache-of-decode",
        severity=Severity.CRASH,
        title="Decode of MoRIIOConnector has blocks of the prompt already, and cannot pair the rest with prefill's.",
        shows=(
            Failed(kind="ValueError", text="local_block_ids and remote_block_ids must have the same length: <counts>"),
            Failed(kind="AssertionError", text="local_block_ids and remote_block_ids must have the same length"),
            Failed(
                kind="AssertionError", source="assert len(local_block_ids) == len(remote_block_ids)", through="moriio"
            ),
        ),
        cause="READ mode, and a prefix cache hit on decode: it allocates blocks for what is missing only (0 when all "
        "is there), while prefill names all of the prompt's. Before vLLM 0.32 the two lists must be as long.",
        now="`--no-enable-prefix-caching` on decode (prefill keeps its own); restart decode",
        good="upgrade to vLLM 0.32.0, which reads only what decode lacks",
        threads=(_PULLS + "48471",),
    ),
    Problem(
        code="KVD038",
        name="moriio-longer-than-prefill",
        severity=Severity.CRASH,
        title="Decode of MoRIIOConnector has more blocks for a request than prefill named.",
        shows=(
            Failed(
                kind="ValueError", text="local_block_ids longer than remote_block_ids: <local> > <remote>", at=_LAYOUT
            ),
            Failed(kind="ValueError", text="local block id <id> is outside [0, <count>)", at=_LAYOUT),
            Failed(kind="ValueError", text="remote block id <id> is outside [0, <count>)"),
        ),
        releases={"vllm": ">=0.32"},
        cause="The two engines cut the prompt into other blocks (--block-size), decode reserved blocks for draft "
        "tokens, or it got another prompt than prefill computed.",
        now="the same --block-size, --speculative-config and chat template on both sides; a router that hands decode "
        "the very request of prefill; restart the one that died",
        good="one set of options for both sides",
    ),
    Problem(
        code="KVD039",
        name="moriio-model-refused",
        severity=Severity.CRASH,
        title="MoRIIOConnector does not serve this model in this mode.",
        shows=(
            Failed(kind="NotImplementedError", text="MoRIIO only supports sliding-window hybrid models", at=_CONNECTOR),
            Failed(kind="NotImplementedError", text="MoRIIO WRITE mode does not support hybrid KV cache"),
            Failed(kind="NotImplementedError", text="MoRIIO with speculative decoding is not yet", at=_CONNECTOR),
            Failed(
                kind="NotImplementedError", text="heterogeneous-TP mamba/KDA transfer is not supported yet", at=_LAYOUT
            ),
            Failed(kind="ValueError", text="Unsupported MoRIIO <kind> cache shape for layer", at=_LAYOUT),
            Failed(kind="ValueError", text="Unsupported MoRIIO K/V cache shape for layer", at=_LAYOUT),
            Failed(kind="ValueError", text="Ambiguous MoRIIO kernel-block K/V cache shape for layer", at=_LAYOUT),
            Failed(kind="ValueError", text="MoRIIO KDA", at=_LAYOUT),
        ),
        releases={"vllm": ">=0.32"},
        cause="Hybrid models (sliding window, Mamba, KDA) go in READ mode only, without speculative decoding in "
        "WRITE mode, with the same tensor parallel size on both sides where there is Mamba; cache shapes must have "
        "the block size where it is expected. The message names the rule.",
        now='"kv_connector_extra_config": {"read_mode": true} on both sides for hybrid models, equal '
        "--tensor-parallel-size; or --disable-hybrid-kv-cache-manager (not for Mamba); shapes: --block-size 16 or 64, "
        "another --attention-backend; then restart both",
        good="a model and mode that it takes; no release up to 0.33.0 takes more",
    ),
    Problem(
        code="KVD040",
        name="moriio-message-of-the-wrong-side",
        severity=Severity.HANG,
        title="An engine of MoRIIOConnector got a message that is meant for the other role, or that it cannot read.",
        shows=(
            Failed(kind="AssertionError", text="Only prefill can get block messages", at=_ENGINE),
            Failed(kind="AssertionError", text="Only decode can get WRITE completion messages", at=_ENGINE),
            Failed(kind="AssertionError", text="Only prefill can get transfer release messages", at=_ENGINE),
            Failed(kind="MoRIIOError", text="Unhandled message format: <what>", at=_ENGINE),
            Failed(kind="MoRIIOError", text="Unhandled structured message type: <what>", at=_ENGINE),
            Failed(kind="HandshakeError", text="nexpected frame! received_frame"),
            Failed(kind="HandshakeError", text="handshake failed, unexpected msg type", at=_CONNECTOR),
            Failed(
                kind="ValueError", text="Malformed zmq_address <address>: expected", at=_MORIIO + "moriio_common.py"
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="The address in the request id or in kv_transfer_params (host, handshake port, notify port) is another "
        "engine's than the router means: two engines of one host share handshake_port or notify_port (each rank takes "
        "the next number), roles are mixed up at the router, or the sides are of different vLLM releases.",
        now="handshake_port and notify_port of engines on one host apart by more than their ranks; kv_role as the "
        "router believes; one vLLM release on both sides and the router made for it; restart both",
        good="ports of its own for each engine",
    ),
    Problem(
        code="KVD041",
        name="moriio-write-task-failed",
        severity=Severity.HANG,
        title="Prefill of MoRIIOConnector could not write a request's KV, and counts it as done.",
        shows=(
            Logged("Write task failed for request <request>, marking done", at=_ENGINE),
            Logged("Deferred write task failed for request <request>, marking done", at=_ENGINE),
            Failed(kind="KeyError", text="Remote allocation info missing for transfer <transfer>", at=_ENGINE),
        ),
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="The exception behind the line decides. Decode learns nothing of it in WRITE mode and waits for its "
        "time limit, or for ever. `Remote allocation info missing`: decode's blocks came under another transfer id, "
        "or the request was aborted there.",
        now="look at the exception of the first such line (transport: KVD673; sizes: KVD671); restart decode if "
        'requests wait there; `"kv_connector_extra_config": {"read_mode": true}` on both sides reports failed reads '
        "to vLLM",
        good="READ mode with vLLM 0.32.0 or newer, which reports what did not come",
    ),
    Problem(
        code="KVD042",
        name="moriio-router-not-reached",
        severity=Severity.HANG,
        title="An engine of MoRIIOConnector cannot tell the router that it is there.",
        shows=(
            Logged("MoRIIO discovery heartbeat send failed", at=_MORIIO + "moriio_heartbeat.py"),
            Failed(kind="RuntimeError", text="MoRIIO discovery heartbeat exited with code <code>"),
        ),
        releases={"vllm": ">=0.32"},
        cause="proxy_ip and proxy_ping_port of kv_connector_extra_config: no router listens there, or the port is "
        "closed. The engine works; the router sends it nothing, or drops it after a while.",
        now="nc -vz PROXY_IP PROXY_PING_PORT from this node; start the router first; proxy_ip an address that this "
        "node reaches",
        good="a router that is up before the engines",
    ),
    Problem(
        code="KVD043",
        name="moriio-memory-not-registered",
        severity=Severity.CRASH,
        title="mori cannot register the KV cache with the network card.",
        shows=(
            Failed(kind="MoRIIOError", text="Failed to register local memory: <reason>", at=_ENGINE),
            Failed(kind="ValueError", text="shared KV backing too small for page-aligned MR"),
        ),
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="RDMA to an AMD GPU needs the driver's peer memory or dma-buf, the card's device files, and memory "
        "that may be locked; xgmi needs the GPUs of one node to see each other.",
        now="container with --device /dev/infiniband --device /dev/kfd --device /dev/dri --cap-add IPC_LOCK --ulimit "
        'memlock=-1; "backend": "xgmi" in kv_connector_extra_config on one node, to see whether it is the card',
        good="the image of vLLM for ROCm on hosts with the card's driver",
    ),
)
