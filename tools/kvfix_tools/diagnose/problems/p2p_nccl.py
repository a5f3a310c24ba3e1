"""P2pNcclConnector of vLLM (up to 0.20; gone from 0.26 on)."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_P2P_NCCL_CONNECTOR = f"{_V1}/p2p/p2p_nccl_connector.py"
_P2P_NCCL_ENGINE = f"{_V1}/p2p/p2p_nccl_engine.py"

PROBLEMS = (
    Problem(
        code="KVD540",
        name="p2p-nccl-prefill-decodes",
        severity=Severity.CRASH,
        title="A request goes on decoding on the prefill instance of P2pNcclConnector, and EngineCore dies.",
        shows=(Failed(kind="AssertionError", source="assert req_id in self.chunked_prefill", at=_P2P_NCCL_CONNECTOR),),
        releases={"vllm": "<0.26"},
        cause="Prefill expects that a request that is scheduled again is still in its prompt. The proxy sets "
        "`max_tokens` to 1; for the chat endpoint the client's `max_completion_tokens` is left, so prefill generates "
        "more than one token.",
        now="in the proxy set both `max_tokens` and `max_completion_tokens` to 1 for prefill's request (and drop "
        "`min_tokens`)",
        good="NixlConnector: P2pNcclConnector is right in no release, and is not in vLLM 0.26.0 and later",
        threads=(
            f"{_ISSUES}/21712",
            f"{_ISSUES}/33092",
        ),
    ),
    Problem(
        code="KVD541",
        name="p2p-nccl-id-without-address",
        severity=Severity.CRASH,
        title="A request reached P2pNcclConnector without addresses in its id.",
        shows=(
            Failed(
                kind="ValueError",
                text="Request id <request> does not contain hostname and port",
                at=_P2P_NCCL_CONNECTOR,
            ),
        ),
        sentence="request {request}",
        releases={"vllm": "<0.26"},
        cause="The connector reads the other side's address from the request id, which its proxy writes there; this "
        "request came past the proxy, or the id was replaced.",
        now="send requests only through the example proxy disagg_proxy_p2p_nccl_xpyd.py; health checks to /health",
        good="NixlConnector: P2pNcclConnector is not in vLLM 0.26.0 and later",
    ),
    Problem(
        code="KVD542",
        name="p2p-nccl-no-new-block",
        severity=Severity.CRASH,
        title="The last part of a prompt needs no new block, and P2pNcclConnector asserts one.",
        shows=(
            Failed(
                kind="AssertionError",
                within="p2p_nccl_connector.py:build_connector_meta",
                source="assert new_block_ids is not None",
                at=_P2P_NCCL_CONNECTOR,
            ),
        ),
        releases={"vllm": "<0.26"},
        cause="A prompt that is computed in parts may end inside a block that it has already.",
        now="`--max-num-batched-tokens` at least as large as --max-model-len, so that prompts are computed in one part",
        good="NixlConnector: P2pNcclConnector is right in no release, and is not in vLLM 0.26.0 and later",
        threads=(f"{_ISSUES}/28860",),
    ),
    Problem(
        code="KVD543",
        name="p2p-nccl-nothing-received",
        severity=Severity.HANG,
        title="Decode gets no KV from prefill with P2pNcclConnector.",
        shows=(
            Logged("kv_cache is None, <request>", at=_P2P_NCCL_CONNECTOR),
            Logged("[GET]Recv From <remote>, tensor_id: <tensor>, ret: <ret>", at=_P2P_NCCL_ENGINE),
        ),
        said=(r"(?i)p2p[-_ ]?nccl", r"(?i)\bhang(?:s|ing)?\b|\bhung\b|\bstuck\b|\bwaits? for ?ever\b|\bno response\b"),
        releases={"vllm": "<0.26"},
        sure=False,
        cause="Tensors are named by request id. From about vLLM 0.14 on each engine puts a random part behind it, so "
        "the names differ (decode waits or gets none). Else: prefill's buffer was full and it dropped them.",
        now='`export VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1` on both sides; larger `"kv_buffer_size": "8e9"` on '
        'decode, `"1e9"` on prefill; restart both',
        good="NixlConnector: P2pNcclConnector is right in no release, and is not in vLLM 0.26.0 and later",
        threads=(f"{_ISSUES}/42839",),
    ),
    Problem(
        code="KVD544",
        name="p2p-nccl-buffer-full",
        severity=Severity.SLOW,
        title="Decode's buffer for received KV is full, and P2pNcclConnector drops or spills it.",
        shows=(
            Logged("Recv Tensor, Out Of Threshold", at=_P2P_NCCL_ENGINE),
            Logged("Recv Tensor, Out Of Memory", at=_P2P_NCCL_ENGINE),
            Logged("Send Tensor, Peer Out Of Memory/Threshold", at=_P2P_NCCL_ENGINE),
        ),
        releases={"vllm": "<0.26"},
        cause="More KV arrives than decode takes: `kv_buffer_size` (bytes of GPU memory) and the memory pool of the "
        "host are used up.",
        now='on decode `"kv_buffer_size": "8e9"` with a --gpu-memory-utilization that leaves room for it, '
        '`"kv_connector_extra_config": {"mem_pool_size_gb": "64"}`; fewer requests at once on prefill',
        good="NixlConnector: P2pNcclConnector is not in vLLM 0.26.0 and later",
    ),
    Problem(
        code="KVD379",
        name="pipe-of-v0-waits-in-vain",
        severity=Severity.HANG,
        title="The pipe of vLLM's first P/D disaggregation (V0) got nothing from the other instance.",
        shows=(
            Logged("Encountering exception in KV receiving thread"),
            Logged("wait timeout after <time>ms, keys: /send_to/"),
        ),
        replaces=("KVD003",),
        cause="PyNcclConnector waits 300 s for the next tensor of the other instance, then its thread ends: the other "
        "one sent nothing (no request, or it died), or its address (kv_ip, kv_port) or rank is another one. It also "
        "ends an instance that was only idle.",
        now="the other instance's log; the same kv_ip and kv_port, kv_rank 0 and 1, kv_parallel_size 2 on both; "
        "restart both",
        good="vLLM 0.11.2 or newer with NixlConnector: the V0 connectors are gone",
        sure=False,
        threads=("https://github.com/vllm-project/vllm/pull/10502",),
    ),
    Problem(
        code="KVD391",
        name="old-connector-without-mla",
        severity=Severity.CRASH,
        title="A connector of vLLM's V0 engine computes the KV's shape as if the model had no MLA.",
        shows=(
            Failed(kind="RuntimeError", text="is invalid for input of size", within="send_kv_caches_and_hidden_states"),
            Failed(kind="RuntimeError", text="is invalid for input of size", within="recv_kv_caches_and_hidden_states"),
        ),
        cause="DeepSeek and other models with MLA keep one latent for all heads, and this connector divides by heads. "
        "Another reason is a head size that is not hidden_size / heads (Qwen3).",
        now="VLLM_MLA_DISABLE=1 on both sides (much more KV), or vLLM's V1 engine with NixlConnector or "
        "MooncakeConnector",
        good="a connector of the V1 engine: V0's are gone from vLLM 0.11 on",
        sure=False,
        threads=("https://github.com/kvcache-ai/Mooncake/issues/261",),
    ),
    Problem(
        code="KVD004",
        name="p2p-nccl-layout-not-known",
        severity=Severity.CRASH,
        title="P2pNcclConnector cuts the KV cache as if it had another layout.",
        shows=(
            Failed(kind="RuntimeError", within="p2p_nccl_connector.py:extract_kv_from_layer"),
            Failed(kind="RuntimeError", within="p2p_nccl_connector.py:inject_kv_into_layer"),
            Failed(kind="IndexError", within="p2p_nccl_connector.py:extract_kv_from_layer"),
            Failed(kind="IndexError", within="p2p_nccl_connector.py:inject_kv_into_layer"),
            Failed(kind="AttributeError", within="p2p_nccl_connector.py:extract_kv_from_layer"),
        ),
        cause="vLLM before 0.10 takes [2, blocks, ...] for granted, and MLA (DeepSeek) has no 2. Later ones know MLA "
        "and FlashInfer's [blocks, 2, ...], but no hybrid model (Mamba, sliding windows) and no different block sizes "
        "on the two sides.",
        now="NixlConnector in its place; or with P2pNcclConnector vLLM 0.10 or newer, the default attention backend "
        "and one --block-size on both sides, --disable-hybrid-kv-cache-manager",
        good="NixlConnector: P2pNcclConnector is not in vLLM 0.26.0 and later",
        threads=("https://github.com/vllm-project/vllm/pull/20246",),
    ),
    Problem(
        code="KVD1081",
        name="p2p-nccl-other-number-of-tokens",
        severity=Severity.CRASH,
        title="Prefill sent P2pNcclConnector another number of tokens than decode has made room for.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="shape mismatch: value tensor of shape <sent> cannot be broadcast to indexing result of shape "
                "<room>",
                within="p2p_nccl_connector.py:inject_kv_into_layer",
            ),
        ),
        sentence="prefill sent {sent}, decode has room for {room}",
        releases={"vllm": "<0.26"},
        cause="Its first releases write all that came into all slots of the prompt. Prefill sends what it computed: "
        "with chunked prefill or a hit in its prefix cache that is less. Since vLLM 0.9.2 the smaller of the two is "
        "written, with the warning `kv_cache does not match`: the text is then wrong.",
        now="on prefill --max-num-batched-tokens no smaller than --max-model-len and --no-enable-prefix-caching; the "
        "same model, tokenizer and chat template on both sides; restart both",
        good="NixlConnector: P2pNcclConnector is not in vLLM 0.26.0 and later",
        threads=("https://github.com/vllm-project/vllm/pull/15806",),
        sure=False,
    ),
    Problem(
        code="KVD1172",
        name="p2p-nccl-settings-missing",
        severity=Severity.CRASH,
        title="P2pNcclConnector lacks a port that it is to announce.",
        shows=(
            Failed(kind="ValueError", text="kv_connector_extra_config.http_port is required", at=_P2P_NCCL_ENGINE),
            Failed(kind="ValueError", text="Port cannot be 0", at=_P2P_NCCL_ENGINE),
            # Up to 0.11.0 it looks the port up without asking for it.
            Failed(kind="KeyError", text="'http_port'", within="p2p_nccl_engine.py:__init__"),
        ),
        releases={"vllm": "<0.26"},
        cause="Each engine announces `http_port`, which has to be its own --port, and its NCCL port (kv_port plus the "
        "rank) to the proxy.",
        now='`"kv_port": "21001"` (another for each engine of a host), `"kv_connector_extra_config": {"proxy_ip": IP, '
        '"proxy_port": "30001", "http_port": "8000"}` with the port of --port',
        good="this set-up; newer releases of vLLM do not have P2pNcclConnector: NixlConnector",
        threads=("https://github.com/vllm-project/vllm/pull/26628",),
    ),
    Problem(
        code="KVD1174",
        name="p2p-nccl-pool-is-full",
        severity=Severity.HANG,
        title="P2pNcclConnector's host memory for received KV is full, and the thread that receives ends.",
        shows=(
            Failed(
                kind="ValueError",
                text="Insufficient memory",
                within="tensor_memory_pool.py:allocate",
                at=f"{_V1}/p2p/tensor_memory_pool.py",
            ),
            Failed(
                kind="ValueError",
                text="Requested size exceeds maximum block size",
                within="tensor_memory_pool.py:allocate",
                at=f"{_V1}/p2p/tensor_memory_pool.py",
            ),
        ),
        sentence="the pool in host memory has no room for a tensor",
        releases={"vllm": "<0.26"},
        replaces=("KVD340",),
        cause="What prefill sends beyond `kv_buffer_size` goes to a pool of `mem_pool_size_gb` (32) until decode takes "
        "it. It is full of KV whose requests wait or were given up. The listener catches no such error: after it no "
        "KV is received, and requests wait for ever.",
        now='restart decode; `"kv_connector_extra_config": {"mem_pool_size_gb": "128"}`, a larger kv_buffer_size '
        "(bytes of GPU memory), fewer requests at once in the proxy",
        good="NixlConnector; P2pNcclConnector is in no newer release of vLLM",
    ),
    Problem(
        code="KVD1176",
        name="p2p-nccl-blocks-differ",
        severity=Severity.WRONG,
        title="Decode has another number of blocks for a request than prefill sent: a part has no KV.",
        shows=(
            Logged(
                "kv_cache does not match, block_ids:<blocks>, num_block:<sent>, request_id:", at=_P2P_NCCL_CONNECTOR
            ),
        ),
        sentence="{blocks} blocks, {sent} were sent",
        releases={"vllm": "<0.26"},
        sure=False,
        cause="The blocks behind those that came keep what was in them before, and the answer is computed from it. The "
        "two engines differ in block size or tokenize the prompt differently (chat template, added tokens), or decode "
        "took a part from its own prefix cache.",
        now="the same --block-size, model files and chat template on both sides; --no-enable-prefix-caching on decode; "
        "distrust the answer of this request",
        good="NixlConnector, which asks prefill for the blocks that decode lacks",
    ),
    Problem(
        code="KVD1178",
        name="p2p-nccl-wants-equal-ranks",
        severity=Severity.CRASH,
        title="P2pNcclConnector cannot move KV between engines of other shapes.",
        shows=(
            Failed(
                kind="NotImplementedError", text="Currently, only symmetric TP is supported", at=_P2P_NCCL_CONNECTOR
            ),
            Logged(
                "[GET]tensor_id:<tensor>, tensor_size:<size>, is greater thanbuffer size threshold", at=_P2P_NCCL_ENGINE
            ),
        ),
        sentence="what is sent does not fit what is to receive it",
        releases={"vllm": "<0.26"},
        sure=False,
        cause="KV of a layer has other heads or layers on the two sides (another --tensor-parallel-size or "
        "--pipeline-parallel-size, another KV dtype). `buffer size threshold`: one layer's KV of the request is larger "
        "than kv_buffer_size, so it is not sent, and decode waits for it.",
        now="the same --tensor-parallel-size, no pipeline parallelism, the same --kv-cache-dtype; `buffer size "
        'threshold`: a larger `"kv_buffer_size"` (bytes), or `"send_type": "PUT_ASYNC"`',
        good="NixlConnector for engines of other sizes",
    ),
)
