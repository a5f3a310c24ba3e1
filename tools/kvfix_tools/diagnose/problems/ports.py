"""Ports and addresses of vLLM's own that do not do: message queue, publisher of KV events, P2P, side channels."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_VLLM = "https://github.com/vllm-project/vllm/"
_EVENTS = "vllm/distributed/kv_events.py"
_TAKEN = "Address already in use"

PROBLEMS = (
    Problem(
        code="KVD948",
        name="message-queue-lost-its-port",
        severity=Severity.CRASH,
        title="vLLM's message queue chose a free port, and another process took it before the queue did.",
        shows=(
            Failed(kind="ZMQError", text=_TAKEN, within="shm_broadcast.py:__init__"),
            Failed(kind="ZMQError", text=_TAKEN, within="_init_message_queues"),
        ),
        releases={"vllm": "<0.32"},
        cause="With several nodes each worker asks for a free port, gives it back and binds it later; workers that "
        "start together may have the same one. No connector and no setting of yours is at fault. 0.20.2 and 0.26.0 "
        "are so; 0.32.0 binds at once (pull 50960).",
        now="start it again, all nodes; it is a matter of luck",
        good="vLLM 0.32.0 or newer; releases between 0.26.0 and 0.32.0 were not looked at",
        threads=(
            "https://github.com/gpustack/gpustack/issues/6019",
            _VLLM + "pull/50960",
            "https://github.com/vllm-project/vllm-ascend/issues/16237",
        ),
    ),
    Problem(
        code="KVD1047",
        name="engine-ports-raced",
        severity=Severity.CRASH,
        title="Two engines of one host started at the same time, and vLLM gave both the same free port.",
        shows=(Failed(kind="ZMQError", text=_TAKEN, within="core_client.py:__init__"),),
        cause="The API server asks for free ports for its engines, gives them back and binds them a little later "
        "(v1/engine/utils.py, get_engine_zmq_addresses). Another engine of the host, prefill beside decode, may have "
        "been given one in between. The connector has no part in it.",
        now="start it again, and the engines of a host one after the other; or `export VLLM_PORT=20000` for one and "
        "`VLLM_PORT=21000` for the other: vLLM then takes its ports from there upwards",
        good="a VLLM_PORT of its own for each engine of the host; no release of vLLM up to 0.33.0 tries another port",
        threads=(_VLLM + "issues/28498", _VLLM + "pull/45064"),
    ),
    Problem(
        code="KVD949",
        name="kv-events-port-in-use",
        severity=Severity.CRASH,
        title="Two engines on one machine publish their KV events at the same port.",
        shows=(
            Failed(kind="ZMQError", text=_TAKEN, within="kv_events.py:_socket_setup"),
            Failed(kind="ZMQError", text=_TAKEN, within="kv_events.py:_bind"),
        ),
        cause="The endpoint of --kv-events-config is tcp://*:5557 unless it is set; data parallel ranks take the next "
        "ones.",
        now="an endpoint of its own for each engine: --kv-events-config "
        '\'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5567"}\', and the same in the router',
        good="the configuration",
        threads=("https://github.com/ai-dynamo/dynamo/issues/4121",),
    ),
    Problem(
        code="KVD950",
        name="p2p-nccl-port-in-use",
        severity=Severity.CRASH,
        title="Two instances with P2pNcclConnector on one machine have the same kv_port.",
        shows=(Failed(kind="ZMQError", text=_TAKEN, within="p2p_nccl_engine.py:__init__"),),
        releases={"vllm": "<0.26"},
        cause="Each rank binds kv_port (14579 unless it is set) plus its rank in its own instance; kv_rank does not "
        "count.",
        now='"kv_port":"21001" for prefill and "kv_port":"22001" for decode in --kv-transfer-config, as far apart as '
        "there are ranks",
        good="the configuration; the connector is gone from vLLM 0.26 on",
        threads=(_VLLM + "issues/44061", _VLLM + "issues/28498"),
    ),
    Problem(
        code="KVD1514",
        name="kv-events-endpoint-without-rank",
        severity=Severity.CRASH,
        title="The endpoint of the KV events cannot be told apart for several data parallel ranks.",
        shows=(Failed(kind="ValueError", text="Invalid endpoint: must contain 'inproc' or 'tcp'", at=_EVENTS),),
        cause="Rank 0 takes the endpoint as it is; the next ones add their number to its port, which an ipc:// "
        "address does not have.",
        now='\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}\' for '
        "--kv-events-config, the same for `replay_endpoint`; restart",
        good="the endpoint",
    ),
    Problem(
        code="KVD1516",
        name="kv-events-publisher-unknown",
        severity=Severity.CRASH,
        title="--kv-events-config names a publisher that vLLM does not have.",
        shows=(Failed(kind="ValueError", text="Unknown event publisher '<name>'", at=_EVENTS),),
        sentence="{name}",
        cause="There are `zmq` and `null`; others only where a plugin registers them in the same process.",
        now='"publisher": "zmq" in --kv-events-config; restart',
        good="the configuration",
    ),
    Problem(
        code="KVD1518",
        name="kv-events-without-an-address",
        severity=Severity.CRASH,
        title="The publisher of KV events is to choose its port, and this node has no address of its own.",
        shows=(Failed(kind="ValueError", text="tcp://*:0 needs a node IP; set VLLM_HOST_IP", at=_EVENTS),),
        releases={"vllm": ">=0.32"},
        cause="With port 0 the chosen address is announced, so it must be a real one. vLLM found no route to the "
        "outside (get_ip), or VLLM_HOST_IP is 0.0.0.0.",
        now='`export VLLM_HOST_IP=NODE_IP`, or a port of your own: "endpoint": "tcp://*:5557"; restart',
        good="the address",
    ),
    Problem(
        code="KVD1520",
        name="kv-events-not-published",
        severity=Severity.RISK,
        title="A batch of KV events was not sent, and the router's picture of this engine's cache is wrong from now "
        "on.",
        shows=(Logged("Error in publisher thread: <error>", at=_EVENTS),),
        sentence="{error}",
        cause="Its number is used up and the batch is in no buffer, so that a subscriber sees a gap which no replay "
        "fills. The exception says why: an event that cannot be encoded (a plugin's, a token that is no number), or "
        "a socket that is closed while the engine ends, which is harmless.",
        now="restart this engine if it serves on, so that the router begins anew with it; the exception's cause; a "
        "router that takes a gap as a reset",
        good="vLLM and router of releases that were made together",
        sure=False,
    ),
)
