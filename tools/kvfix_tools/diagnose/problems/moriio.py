"""MoRIIOConnector of vLLM, for AMD GPUs: its start, its router, and the handshake."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_CONNECTOR = f"{_V1}/moriio/moriio_connector.py"
_COMMON = f"{_V1}/moriio/moriio_common.py"
_PULLS = "https://github.com/vllm-project/vllm/pull"
_ROUTER = "https://github.com/vllm-project/router/pull"

PROBLEMS = (
    Problem(
        code="KVD663",
        name="moriio-not-installed",
        severity=Severity.CRASH,
        title="The package mori cannot be imported, and MoRIIOConnector does not start.",
        shows=(Failed(kind="RuntimeError", text="MoRIIO is not available. Please ensure", at=_CONNECTOR),),
        cause="`from mori.io import IOEngine` fails: mori is not in the image, it is too old for this vLLM, or a "
        "library that it needs is missing. vLLM does not log which.",
        now='`python -c "from mori.io import BackendType, IOEngine, IOEngineConfig"` in the engine\'s environment '
        "shows why; vLLM's own ROCm image, or mori built as its Dockerfile.rocm does",
        good="an image with mori for its ROCm and NIC",
        threads=("https://github.com/llm-d/llm-d/issues/1469",),
    ),
    Problem(
        code="KVD694",
        name="moriio-settings-missing",
        severity=Severity.CRASH,
        title="A setting that MoRIIOConnector needs is missing in kv_connector_extra_config.",
        shows=(Failed(kind="KeyError", within="moriio_common.py:from_vllm_config"),),
        cause="It reads `http_port`, and up to vLLM 0.26 also `proxy_ip` and `proxy_ping_port`, without a default; the "
        "line names the missing one.",
        now='`"kv_connector_extra_config": {"proxy_ip": "ROUTER", "proxy_ping_port": 36367, "http_port": 8000, '
        '"handshake_port": 6301, "notify_port": 61005}`, with the port of this engine\'s API and the address and the '
        "discovery port of the router",
        good="the same; no release has a default for http_port",
        threads=(f"{_PULLS}/43603",),
    ),
    Problem(
        code="KVD664",
        name="moriio-router-sends-no-transfer-id",
        severity=Severity.CRASH,
        title="The router's request has no transfer_id, and MoRIIOConnector ends EngineCore.",
        shows=(
            Failed(
                kind="KeyError",
                text="'transfer_id'",
                within="moriio_connector.py:update_state_after_alloc",
                source='transfer_id = params["transfer_id"]',
                at=_CONNECTOR,
            ),
        ),
        releases={"vllm": ">=0.18,<0.32"},
        cause="From vLLM 0.18 on, the router has to give prefill and decode the same `transfer_id` in "
        "kv_transfer_params; this router is older, or is made for another connector (NIXL's parameters have none).",
        now="a vllm-router with `--kv-connector moriio`, or the moriio_toy_proxy_server.py of this vLLM release; send "
        "nothing with kv_transfer_params past it",
        fixed={"vllm": "0.32.0"},
        threads=(f"{_ROUTER}/138",),
    ),
    Problem(
        code="KVD665",
        name="moriio-id-without-address",
        severity=Severity.CRASH,
        title="A request reached MoRIIOConnector without addresses in its id.",
        shows=(Failed(kind="ValueError", text="Cannot parse peer zmq_address from request_id: <request>", at=_COMMON),),
        sentence="request {request}",
        releases={"vllm": ">=0.20,<0.32"},
        cause="The connector reads the other side's address from the request id "
        "(`___prefill_addr_...___decode_addr_..._<uuid>`), which the router sends as X-Request-Id. This router does "
        "not, something between them replaced the header, or the client's own id was taken.",
        now="a vllm-router with `--kv-connector moriio`, or the moriio_toy_proxy_server.py of this vLLM release; let "
        "the header X-Request-Id through",
        good="that router; vLLM 0.32.0 also takes remote_host, remote_handshake_port and remote_notify_port of "
        "kv_transfer_params",
        threads=(f"{_PULLS}/39565", f"{_ROUTER}/138"),
    ),
    Problem(
        code="KVD666",
        name="moriio-peer-not-named",
        severity=Severity.CRASH,
        title="Neither the id of a request nor its kv_transfer_params name the other engine of MoRIIOConnector.",
        shows=(
            Failed(
                kind="ValueError", text="request_id <request> does not embed a peer zmq_address and kv_transfer_params"
            ),
            Failed(
                kind="ValueError", text="request <request>: request_id has no embedded peer zmq_address", at=_CONNECTOR
            ),
        ),
        sentence="request {request}",
        releases={"vllm": ">=0.32"},
        cause="The router has to write both addresses into X-Request-Id, or to send remote_host, "
        "remote_handshake_port and remote_notify_port in kv_transfer_params. This request has neither, or an empty "
        "remote_host: it came past the router, or the router is made for another connector.",
        now="a vllm-router with `--kv-connector moriio`, or a sidecar that sends these three; send nothing with "
        "kv_transfer_params past it",
        good="a router that fits MoRIIOConnector and this release",
        threads=(f"{_PULLS}/39565", "https://github.com/llm-d/llm-d/issues/1469"),
    ),
    Problem(
        code="KVD667",
        name="moriio-rank-not-chosen",
        severity=Severity.RISK,
        title="The router does not say which data parallel rank of prefill has a request, and MoRIIOConnector takes 0.",
        shows=(
            Logged(
                "MoRI-IO decode notify: remote_dp_size=<size> but the router did not pin remote_dp_rank for request "
                "<request>",
                at=_CONNECTOR,
            ),
        ),
        sentence="request {request}, {size} ranks",
        releases={"vllm": ">=0.32"},
        sure=False,
        cause="Decode tells rank 0 of prefill where to write. If another rank did the prefill, nothing is written, and "
        "the request waits on decode: then `Deferred write task` stands in prefill's log.",
        now="a router that sends remote_dp_rank and the header X-data-parallel-rank; until then "
        "`--data-parallel-size 1` on prefill, with several prefill engines",
        good="a router that chooses the rank",
        threads=(f"{_PULLS}/45043",),
    ),
    Problem(
        code="KVD668",
        name="moriio-read-before-prefill",
        severity=Severity.CRASH,
        title="MoRI's control connection gets a message that it does not expect, and the process is aborted.",
        shows=(Died(text="BuildRdmaConn"),),
        sure=False,
        cause="With `read_mode`, decode may get a request only after prefill has answered it; a router that sends "
        "both at once (as vllm-router does for P2pNcclConnector) makes decode connect too early. Without `read_mode` "
        "it is something else.",
        now='leave `"read_mode"` out of kv_connector_extra_config on both sides, before vLLM 0.26 '
        "VLLM_MORIIO_CONNECTOR_READ_MODE out of the environment (WRITE mode); or use vLLM's moriio_toy_proxy_server.py",
        good="a router that waits for prefill's answer in READ mode",
        threads=(f"{_PULLS}/46115",),
    ),
    Problem(
        code="KVD669",
        name="moriio-handshake-waits",
        severity=Severity.HANG,
        title="The handshake of MoRIIOConnector with the other engine does not come to an end.",
        shows=(
            Logged("Timed out waiting for write_ready_flags[<engine>]", at=_CONNECTOR),
            Logged("Timed out waiting for load_ready_flag[<engine>]", at=_CONNECTOR),
        ),
        sentence="with {engine}",
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="Nothing answers on that host and handshake port (plus data and tensor parallel rank), and the handshake "
        "itself waits without end; every step then loses `transfer_timeout` (30 s). With `Handshake with ... failed` "
        "before it: the exception there decides.",
        now="`nc -vz HOST PORT` from the engine that logs it; open handshake_port and the ports after it, one for each "
        'rank; where the address is not the reachable one: `"kv_connector_extra_config": {"host_ip": "ADDRESS"}` on '
        "the other engine; restart the one that logs it",
        good="the set-up: host and ports of each engine reachable from the other; no release changes that",
        threads=(f"{_PULLS}/40344",),
    ),
    Problem(
        code="KVD670",
        name="moriio-handshake-fails",
        severity=Severity.CRASH,
        title="The handshake of MoRIIOConnector with a prefill engine failed, and decode's workers give up the step.",
        shows=(
            Failed(kind="HandshakeError", text="Eager MoRIIO handshake failed for <engine> on at least one TP rank"),
        ),
        sentence="with {engine}",
        releases={"vllm": ">=0.32"},
        sure=False,
        cause="All tensor parallel ranks give up together, lest they wait in a collective. The exception below `Eager "
        "MoRIIO handshake failed` of one of them decides: a metadata message that cannot be read is prefill of another "
        "vLLM release; a ValueError on TP sizes, sizes that do not divide (KVD671).",
        now="the same image on both sides; tensor parallel sizes of which one divides the other; restart both",
        good="one image and fitting sizes on prefill and decode",
    ),
    Problem(
        code="KVD671",
        name="moriio-sizes-do-not-fit",
        severity=Severity.HANG,
        title="MoRIIOConnector cannot map the tensor parallel sizes of prefill and decode onto each other.",
        shows=(
            Failed(
                kind="NotImplementedError",
                text="MoRIIO heterogeneous TP requires replicated KV heads on both prefill and decode",
                at=_CONNECTOR,
            ),
            Failed(
                kind="ValueError",
                text="tp_size <larger> must be a multiple of local tp_size <local> for heterogeneous-TP P/D",
                at=_CONNECTOR,
            ),
            Failed(
                kind="ValueError",
                text="tp_size <larger> must be a multiple of remote tp_size <remote> for heterogeneous-TP P/D",
                at=_CONNECTOR,
            ),
            Failed(
                kind="ValueError",
                text="tp_size <larger> must be a multiple of producer tp_size <producer> for heterogeneous-TP P/D",
                at=_CONNECTOR,
            ),
            Failed(
                kind="ValueError",
                text="MoRIIO WRITE needs one TP size to be a multiple of the other",
                at=f"{_V1}/moriio/moriio_tp_mapping.py",
            ),
            Failed(
                kind="ValueError",
                text="MoRIIO WRITE cannot shard <heads> KV heads over tp_size=",
                at=f"{_V1}/moriio/moriio_tp_mapping.py",
            ),
            # READ mode of vLLM 0.33.
            Failed(kind="MoRIIOError", text="KV heads per rank here and <heads> on the peer"),
        ),
        releases={"vllm": ">=0.26"},
        cause="One size has to divide the other. Models without MLA need more: in WRITE mode of vLLM 0.33 each size "
        "and the number of KV heads have to divide one another; in READ mode and before 0.33 both sides need as many "
        "ranks as KV heads, or more. Before 0.33 prefill only logs it in WRITE mode, and the request waits on decode.",
        now="the same --tensor-parallel-size on prefill and decode",
        good="vLLM 0.33.0 in WRITE mode for different sizes of which one divides the other; READ mode: equal sizes",
    ),
)
