"""Mooncake: peers that are gone, and the first name of its module."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"

_VLLM = "https://github.com/vllm-project/vllm"

PROBLEMS = (
    Problem(
        code="KVD1722",
        name="mooncake-bootstrap-busy-at-start",
        severity=Severity.HANG,
        title="Prefill's first worker did not answer in 5 s when the others registered, and they wait for ever.",
        shows=(
            Failed(kind="ReadTimeout", within="register_worker_with_bootstrap"),
            Failed(kind="ConnectTimeout", within="register_worker_with_bootstrap"),
            Failed(kind="RemoteProtocolError", within="register_worker_with_bootstrap"),
        ),
        releases={"vllm": ">=0.20,<0.32"},
        replaces=("KVD512",),
        cause="The bootstrap server is a thread of the first worker (rank 0). While that registers large memory (a "
        "store's segment beside it, EFA's many cards) it answers nothing; the others try once, for 5 s, and never say "
        "that they gave up: the start hangs, then NCCL or `No available shared memory broadcast block` ends it.",
        now="a smaller segment of the store in the same engine (`global_segment_size`, "
        "MOONCAKE_GLOBAL_SEGMENT_SIZE: 4 GB), or in vLLM's mooncake_connector.py `sed -i "
        "'s/httpx.AsyncClient()/httpx.AsyncClient(timeout=120)/'`; start again",
        fixed={"vllm": "0.32.0"},
        good="VLLM_MOONCAKE_CONNECTOR_TIMEOUT (30 s, three times) there",
        threads=(
            f"{_VLLM}/issues/55114",
            f"{_VLLM}/issues/55729",
            f"{_VLLM}/pull/42199",
            f"{_VLLM}/pull/55763",
        ),
    ),
    Problem(
        code="KVD144",
        name="mooncake-of-the-v0-engine",
        severity=Severity.CRASH,
        title="vLLM is so old that it asks for Mooncake under its first name.",
        shows=(Failed(text="No module named 'mooncake_vllm_adaptor'"),),
        cause="`mooncake_vllm_adaptor` was Mooncake's module when it was built beside vLLM's V0 engine "
        "(MooncakeConnector of mooncake_pipe.py). The wheel mooncake-transfer-engine has `mooncake.engine` in its "
        "place, so that installing it does not help here.",
        now="vLLM 0.26.0 or newer with `pip install mooncake-transfer-engine` (CUDA 13: "
        "mooncake-transfer-engine-cuda13) and "
        """--kv-transfer-config '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer"}'""",
        good="the same; the V0 engine and its connectors are gone from vLLM",
        threads=("https://github.com/kvcache-ai/Mooncake/issues/13",),
    ),
    Problem(
        code="KVD145",
        name="mooncake-peer-refuses",
        severity=Severity.HANG,
        title="A Mooncake peer that the metadata names does not listen any more.",
        shows=(Logged("SocketHandShakePlugin: connect()<peer>: Connection refused"),),
        sentence="{peer} refuses the connection",
        cause="The machine answers, but no process holds that port: the engine or store client there has ended or "
        "restarted with another port, or is not up yet. Its entry stays at the metadata server and the master until "
        "its lease is over, and what it stored cannot be read.",
        now="look for the process of that port (ss -ltnp there, its log); start every instance before traffic; if it "
        "has restarted, restart this engine too; keys that lay there are misses and are computed",
        good="instances that stay, or requests only after all are up",
        threads=("https://github.com/sgl-project/sglang/pull/17195",),
    ),
    Problem(
        code="KVD1180",
        name="mooncake-pull-fails-and-waits",
        severity=Severity.HANG,
        title="Decode's pull of KV from prefill failed, and the request waits for it for ever.",
        shows=(
            Logged("Error happens during transferring kvcache for <requests>: <error>", at=_CONNECTOR),
            Logged("MooncakeXferMetadata transfer failed for <requests>: <error>", at=_CONNECTOR),
        ),
        sentence="{error}",
        releases={"vllm": ">=0.20,<0.32"},
        cause="What stands behind the colon is prefill's answer (its log has more), or the socket's: `Resource "
        "temporarily unavailable` is no answer in VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT + 60 s. MooncakeConnector of "
        "these releases reports no failed load: the request stays in WAITING_FOR_REMOTE_KVS and keeps its blocks until "
        "decode is full.",
        now="restart decode to get the blocks back; prefill's log at this time says why (an abort by the client does "
        "not free them)",
        fixed={"vllm": "0.32.0"},
        threads=("https://github.com/vllm-project/vllm/issues/35943",),
    ),
)
