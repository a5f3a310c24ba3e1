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
            Failed(kind="NotImplementedError", text="MoRIIO WRITE mode does not support sliding-window"),
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
        code="KVD1888",
        name="moriio-pair-does-not-fit",
        severity=Severity.HANG,
        title="The caches of prefill and decode do not fit, and MoRIIOConnector cannot map one onto the other.",
        shows=(
            Failed(kind="MoRIIOError", text="Layer <layer> holds <own> tokens per block here and <other> on the peer"),
            Failed(kind="MoRIIOError", text="Heterogeneous-TP WRITE of layer <layer> needs a KV head layout"),
            Failed(kind="MoRIIOError", text="Heterogeneous-TP WRITE of mamba layer <layer> needs the peer's state"),
            Failed(kind="ValueError", text="MoRIIO cannot slice KV heads of layer <layer>"),
            Failed(kind="ValueError", text="MoRIIO head slicing needs the same block size, head size and K/V planes"),
            Failed(kind="ValueError", text="MoRIIO cannot map <own> local state bytes onto <other> remote bytes"),
            Failed(kind="ValueError", text="local and remote conv states have different sub-projections: <both>"),
        ),
        releases={"vllm": ">=0.33"},
        cause="With two tensor parallel sizes each cache is cut by heads or states. That takes the same block size (a "
        "hybrid model sets it by the size of its state on a rank), kernel blocks as large as the block, and a peer of "
        "vLLM 0.33 or newer. The message names what is missing.",
        now="the same --tensor-parallel-size on both sides; or one --block-size, --attention-backend and "
        "--kv-cache-dtype on both; vLLM 0.33 or newer on both; restart both",
        good="one set of options and one image for both sides",
    ),
    Problem(
        code="KVD1889",
        name="moriio-session-not-opened",
        severity=Severity.HANG,
        title="MoRI cannot open a session from a layer's memory to the peer's.",
        shows=(
            Failed(kind="MoRIIOError", text="MoRI could not open a session from layer <layer> to peer <peer> (region"),
        ),
        sentence="layer {layer}, peer {peer}",
        releases={"vllm": ">=0.33"},
        sure=False,
        cause="With `backend` xgmi this process does not see the peer's GPU: HIP_VISIBLE_DEVICES hides it, or it is in "
        "another machine. With rdma the peer has ended, or a card does not reach it. Sizes in the line that differ are "
        "of another model or of other cache options.",
        now="xgmi: all GPUs of the machine visible to both engines, or `backend` rdma in "
        "kv_connector_extra_config of both; rdma: the peer's log at this time, `ib_write_bw` between the nodes; one "
        "model and --kv-cache-dtype; restart both",
        good="cards that reach each other, named on both sides",
    ),
    Problem(
        code="KVD1890",
        name="moriio-reads-not-ended",
        severity=Severity.CRASH,
        title="Reads of MoRIIOConnector did not end in time, and the step fails.",
        shows=(
            Logged(
                "MoRIIO READ barrier failed with <count>/<all> reads still in flight; failing the step.", at=_CONNECTOR
            ),
        ),
        sentence="{count} of {all} reads",
        releases={"vllm": ">=0.33"},
        sure=False,
        cause="In READ mode the step waits for the reads that it began. Those that may still write cannot be given up: "
        "the engine dies rather than compute on their blocks. Prefill went away, or the cards are slower than the time "
        "limit (the exception below says which).",
        now="restart decode, and prefill if its log has ended; larger `transfer_timeout` in kv_connector_extra_config; "
        "`ib_write_bw` between the two nodes",
        good="a link that carries the KV in time",
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
    Problem(
        code="KVD1522",
        name="moriio-notify-listener-ended",
        severity=Severity.HANG,
        title="One message that it could not take ended the thread in which MoRIIOConnector hears of transfers.",
        shows=(
            Logged("Error processing message: <error>", at=_ENGINE),
            Failed(kind="HandshakeError", text="Error processing message: <error>", at=_ENGINE),
        ),
        sentence="{error}",
        quotes=True,
        releases={"vllm": ">=0.15"},
        cause="The loop that reads the notify port raises after any error and is not started again. From then on this "
        "rank learns of no release, block list or completed write: prefill keeps its blocks, decode's requests wait. "
        "The error says what came: a message for the other role or of another release, or of a third program.",
        now="restart this engine; then handshake_port and notify_port of engines on one host further apart than "
        "their number of ranks, one vLLM release on both sides, no probe or scan on these ports",
        good="ports of its own for each engine; up to 0.33.0 no release goes on after such a message",
        sure=False,
    ),
    Problem(
        code="KVD1524",
        name="moriio-hybrid-read-failed",
        severity=Severity.CRASH,
        title="A read of KV failed for a model with recurrent state, and MoRIIOConnector gives up the whole step.",
        shows=(Logged("MoRIIO hybrid READ failed before <what>", at=_CONNECTOR),),
        replaces=("KVD673",),
        releases={"vllm": ">=0.32"},
        cause="With several KV groups vLLM cannot compute one request again, so the error is raised in the forward "
        "pass and the engine ends. The exception below it names the transfer: `timed out` is the NIC's queue or a "
        "lost answer, anything else the link or a prefill that went away.",
        now='`"kv_connector_extra_config": {"qp_per_transfer": 4, "transfer_timeout": 120}` on both sides and fewer '
        "requests at a time (--max-num-seqs on decode); restart decode. READ is the only mode for such models",
        good="a lossless RDMA network; up to 0.33.0 such a failure ends the engine",
    ),
    Problem(
        code="KVD1526",
        name="moriio-prefill-not-released",
        severity=Severity.LEAK,
        title="A read failed, and decode of MoRIIOConnector could not tell prefill to free the blocks.",
        shows=(Logged("Failed to send error notification for request <request>", at=_CONNECTOR),),
        sentence="request {request}",
        releases={"vllm": ">=0.32"},
        cause="Prefill is gone, or its notify port is not reachable from decode. If it is there, it holds the blocks "
        "until its `defer_timeout` (60 s) has passed.",
        now="`nc -vz PREFILL NOTIFY_PORT` from decode, one port for each rank; open them or correct notify_port; "
        "restart prefill if its KV cache usage stays high without requests",
        good="notify ports that decode reaches",
    ),
    Problem(
        code="KVD1570",
        name="moriio-settings-refused",
        severity=Severity.CRASH,
        title="A value in kv_connector_extra_config is none that MoRIIOConnector takes.",
        shows=(
            Failed(
                kind="ValueError",
                text="Invalid MoRIIO backend <value> in kv_connector_extra_config",
                at=_MORIIO + "moriio_common.py",
            ),
            # From 0.32 on.
            Failed(kind="ValueError", text="kv_connector_extra_config.<name> must be finite and greater than zero"),
        ),
        releases={"vllm": ">=0.26"},
        cause="`backend` is rdma (the default) or xgmi, in small letters; transfer_timeout, defer_timeout and "
        "recv_abort_timeout are seconds above zero, where 0 does not mean without limit. recv_abort_timeout also comes "
        "from VLLM_MORIIO_TRANSFER_TIMEOUT_S.",
        now='`"kv_connector_extra_config": {"backend": "rdma", "transfer_timeout": 30, "defer_timeout": 60}`, or leave '
        "them out; unset VLLM_MORIIO_TRANSFER_TIMEOUT_S; restart",
        good="the configuration",
    ),
)
