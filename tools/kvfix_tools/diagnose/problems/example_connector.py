"""ExampleConnector (SharedStorageConnector before vLLM 0.12), and the V0 engine's pipes."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_ISSUES = "https://github.com/vllm-project/vllm/issues"

PROBLEMS = (
    Problem(
        code="KVD001",
        name="example-connector-saved-less",
        severity=Severity.CRASH,
        title="ExampleConnector finds less KV in its folder than it had promised.",
        shows=(
            Failed(kind="RuntimeError", text="shape mismatch", within="example_connector.py:inject_kv_into_layer"),
            Failed(kind="RuntimeError", text="shape mismatch", within="storage_connector.py:inject_kv_into_layer"),
            Failed(kind="IndexError", within="example_connector.py:inject_kv_into_layer"),
            Failed(kind="IndexError", within="storage_connector.py:inject_kv_into_layer"),
            Failed(kind="FileNotFoundError", within="example_connector.py:start_load_kv"),
            Failed(kind="FileNotFoundError", within="shared_storage_connector.py:start_load_kv"),
            Failed(kind="SafetensorError", within="example_connector.py:start_load_kv"),
            Failed(kind="SafetensorError", within="shared_storage_connector.py:start_load_kv"),
        ),
        cause="It stores only what the first step of a prompt computes: with chunked prefill the first "
        "max_num_batched_tokens. For a hit it looks only whether the folder exists, and claims the whole prompt. A "
        "store that was cut off leaves a folder without all layers, and ranks write the same files (it is made for "
        "tensor parallel size 1).",
        now="an empty folder (shared_storage_path), --max-num-batched-tokens no smaller than --max-model-len, "
        "--tensor-parallel-size 1; restart",
        good="another connector: this one is an example. OffloadingConnector with a file system tier, or LMCache with "
        "local_disk; no release up to 0.33.0 is right",
        threads=(f"{_ISSUES}/16928", "https://github.com/vllm-project/vllm/pull/53314"),
    ),
    Problem(
        code="KVD002",
        name="connector-takes-experts-for-attention",
        severity=Severity.CRASH,
        title="The connector takes every layer for one with KV, and a mixture of experts has others.",
        shows=(Failed(kind="AttributeError", text="object has no attribute 'kv_cache'", within="start_load_kv"),),
        cause="vLLM 0.10.0 lists layers of experts (FusedMoE) among those of the forward context; "
        "SharedStorageConnector and P2pNcclConnector of that release read `kv_cache` of each.",
        now="a model without experts, or another connector (NixlConnector, LMCacheConnectorV1)",
        fixed={"vllm": "0.10.1"},
        threads=(f"{_ISSUES}/21359",),
    ),
    Problem(
        code="KVD003",
        name="v0-pipe-transfer-failed",
        severity=Severity.CRASH,
        title="The V0 engine's pipe could not move KV to the other engine.",
        shows=(
            Failed(kind="Exception", text="Transfer Return Error"),
            Failed(within="mooncake_pipe.py:recv_bytes"),
            Failed(within="mooncake_pipe.py:transfer_sync"),
            Failed(within="pynccl_pipe.py:recv_tensor"),
            Failed(within="pynccl_pipe.py:send_tensor"),
        ),
        sure=False,
        cause="MooncakePipe: mooncake.json of the two sides does not fit (prefill_url and decode_url the same in "
        "both, `protocol` one that both have, `device_name` a card that reaches the other), or the metadata server is "
        "not reached; Mooncake's E lines come before. PyNcclPipe: other tensor parallel sizes on the two sides (not "
        "supported), or a peer that has ended.",
        now="one mooncake.json for both, `protocol: tcp` for a try, equal --tensor-parallel-size; start prefill "
        "(kv_rank 0) and decode (kv_rank 1) together",
        good="the V1 engine with NixlConnector or MooncakeConnector: V0 is gone from vLLM 0.11 on",
        threads=("https://github.com/kvcache-ai/Mooncake/issues/124", f"{_ISSUES}/14952"),
    ),
)
