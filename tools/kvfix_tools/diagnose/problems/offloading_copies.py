"""Copies of vLLM's own offloading that do not fit: pages of CPU and GPU, jobs and their requests, aligned ends."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_OFFLOAD = ("OffloadingConnector", "MultiConnector")
_SIMPLE = ("SimpleCPUOffloadConnector", "MultiConnector")
_SCHEDULER = "offloading/scheduler.py"
_REPORT = "report it with `kvfix-diagnose LOG --issue FILE.md`: no release is known to be right"

PROBLEMS = (
    Problem(
        code="KVD1030",
        name="offload-page-sizes-differ",
        severity=Severity.CRASH,
        title="A page of the CPU tier is not blocks_per_chunk pages of the GPU.",
        shows=(
            Failed(
                kind="AssertionError",
                within="gpu_worker.py:__init__",
                source="assert cpu_page_size == gpu_page_size * blocks_per_chunk",
            ),
            Failed(
                kind="AssertionError",
                within="gpu_worker.py:__init__",
                source="cpu_page_size == canonical_bytes_per_block[t_idx] * blocks_per_chunk",
            ),
            Failed(
                kind="AssertionError", within="gpu_worker.py:__init__", source="len(gpu_tensors) == len(cpu_tensors)"
            ),
            Failed(
                kind="AssertionError", within="compute_sub_block_ptrs", source="tensor.shape[1] % blocks_per_chunk == 0"
            ),
        ),
        releases={"vllm": ">=0.20"},
        connectors=_OFFLOAD,
        sure=False,
        cause="The CPU tensors are made for the bytes of a block as the KV specification counts them; the GPU's are "
        "what the attention backend laid out. They differ for padded pages (hybrid models), an fp8 cache with scales, "
        "or one tensor across layers.",
        now="--kv-cache-dtype auto; another --attention-backend; a model with several kinds of attention: without "
        "--kv-offloading-size until the upgrade",
        good=_REPORT,
    ),
    Problem(
        code="KVD1031",
        name="offload-mamba-chunks-differ",
        severity=Severity.CRASH,
        title="The model's Mamba groups ask for different chunks, and OffloadingConnector has one for all.",
        shows=(
            Failed(
                kind="AssertionError",
                within="resolve_mamba_align_size",
                source="assert mamba_align_size is None or mamba_align_size == tokens_per_chunk",
            ),
        ),
        releases={"vllm": ">=0.26"},
        connectors=_OFFLOAD,
        cause="In --mamba-cache-mode align a hit is cut to a chunk's end: tokens_per_block * blocks_per_chunk of the "
        "Mamba group. Two groups with blocks of different sizes have two such ends.",
        now="--mamba-cache-mode none, or without --kv-offloading-size",
        good="a model or --block-size that gives its Mamba groups one block size",
        sure=False,
    ),
    Problem(
        code="KVD1032",
        name="offload-retention-no-whole-chunk",
        severity=Severity.CRASH,
        title="prefix_cache_retention_interval is no multiple of OffloadingConnector's chunk.",
        shows=(
            Failed(
                kind="ValueError",
                text="prefix_cache_retention_interval (<tokens>) must be a multiple of tokens_per_chunk (<chunk>)",
            ),
            Failed(kind="ValueError", text="prefix_cache_retention_interval (<tokens>) must be non-negative"),
        ),
        sentence="prefix_cache_retention_interval is {tokens}",
        releases={"vllm": ">=0.26"},
        cause="tokens_per_chunk is the group's block size times blocks_per_chunk of kv_connector_extra_config; what "
        "is kept of a long prompt has to end at a chunk's end.",
        now="--prefix-cache-retention-interval with a multiple of tokens_per_chunk in the line, or without it",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1033",
        name="offload-job-without-its-request",
        severity=Severity.CRASH,
        title="OffloadingConnector's scheduler side is asked about a request that it has forgotten.",
        shows=(
            Failed(kind="KeyError", within=f"{_SCHEDULER}:get_num_new_matched_tokens", source="self._req_status["),
            Failed(kind="KeyError", within=f"{_SCHEDULER}:update_state_after_alloc", source="self._req_status["),
            Failed(kind="KeyError", within=f"{_SCHEDULER}:update_connector_output", source="self._req_status["),
            Failed(kind="KeyError", within=f"{_SCHEDULER}:_update_req_states", source="self._req_status["),
            Failed(kind="KeyError", within=f"{_SCHEDULER}:request_finished", source="self._jobs["),
        ),
        releases={"vllm": ">=0.26"},
        connectors=_OFFLOAD,
        sure=False,
        cause="It keeps a request from on_new_request to its end, while copies of it run. It is gone too early if a "
        "request id was used twice at once (the first end drops both), after a reset of the cache with copies in "
        "flight, or where a MultiConnector or plugin does not pass on_new_request on. The key is the request; its "
        "lines decide.",
        now="request ids that are unique (no X-Request-Id that repeats); no reset_prefix_cache under load; restart",
        good=_REPORT,
    ),
    Problem(
        code="KVD1034",
        name="offload-blocks-and-groups-differ",
        severity=Severity.CRASH,
        title="The blocks of an offloading job do not add up to those of its groups.",
        shows=(
            Failed(
                kind="AssertionError", source="assert sum(group_sizes) == len(block_ids)", within="base.py:__init__"
            ),
            Failed(
                kind="AssertionError", source="assert len(block_indices) == len(group_sizes)", within="base.py:__init__"
            ),
        ),
        releases={"vllm": ">=0.26"},
        connectors=_OFFLOAD,
        sure=False,
        cause="A job lists its GPU blocks group by group. A group whose blocks were left out (a window that slid past "
        "them, null blocks) is counted with them.",
        now="without --kv-offloading-size for this model; or --disable-hybrid-kv-cache-manager, where it allows that",
        good=_REPORT,
    ),
    Problem(
        code="KVD1035",
        name="simple-offload-end-within-a-block",
        severity=Severity.CRASH,
        title="SimpleCPUOffloadConnector is to load a number of tokens that is no whole number of hashed blocks.",
        shows=(
            Failed(
                kind="AssertionError",
                text="num_external_tokens=<tokens> is not aligned to hash_block_size=<size>",
                within="update_state_after_alloc",
            ),
        ),
        releases={"vllm": ">=0.32"},
        connectors=_SIMPLE,
        sure=False,
        cause="What it promised was whole blocks; vLLM granted another number: it took one token off a hit of the "
        "whole prompt, or a MultiConnector's other child answered for the request.",
        now="SimpleCPUOffloadConnector alone, without MultiConnector; else restart without it",
        good=_REPORT,
    ),
    Problem(
        code="KVD1036",
        name="simple-offload-loads-twice",
        severity=Severity.CRASH,
        title="SimpleCPUOffloadConnector gets a load of a request that it is loading already.",
        shows=(
            Failed(
                kind="AssertionError",
                within="simple_kv_offload/manager.py:update_state_after_alloc",
                source="assert self._reqs_to_load.get(req_id) is None",
            ),
        ),
        releases={"vllm": ">=0.20"},
        connectors=_SIMPLE,
        sure=False,
        cause="A load is remembered under its request id until its end is reported. The id was used a second time "
        "before that: by a client or router that repeats ids, or the request was aborted and sent again at once.",
        now="request ids that are unique; restart",
        good="ids that are unique",
    ),
    Problem(
        code="KVD1037",
        name="simple-offload-layout-refused",
        severity=Severity.CRASH,
        title="SimpleCPUOffloadConnector cannot cut the KV cache into blocks.",
        shows=(
            Failed(kind="AssertionError", text="KV cache <layer> storage has <bytes> bytes, smaller than the <needed>"),
            Failed(kind="AssertionError", text="KV cache <layer> places <layers> layers in <regions> block-strided"),
        ),
        releases={"vllm": ">=0.32"},
        connectors=_SIMPLE,
        sure=False,
        cause="It copies a whole block of all layers that share a tensor at once, by the strides of vLLM's KV layout. "
        "The storage that the attention backend or a plugin made is smaller, or not a whole number of such regions.",
        now="another --attention-backend, or OffloadingConnector (--kv-offloading-size without a connector of your "
        "own)",
        good=_REPORT,
    ),
    Problem(
        code="KVD1038",
        name="offload-peer-gave-up",
        severity=Severity.RISK,
        title="A peer of the P2P offloading tier gave a transfer up, or did not answer.",
        shows=(
            Logged("P2PSession <peer>: <request> round=<round> timed out, sending abort"),
            Logged("P2PSession <peer>: abort_ack timed out for kv_request_id=<request>"),
            Logged("P2PSession <peer>: cancel drain timed out for kv_request_id=<request>"),
            Logged("P2PSession <peer>: store job <job> timed out"),
            Logged("P2PSession <peer>: write_blocks failed for <request>"),
            Logged("P2PSession <peer>: transport reported failed for unknown transfer_id=<transfer>"),
            Logged("marking connection dead"),
        ),
        releases={"vllm": ">=0.32"},
        sure=False,
        cause="The other side is busy, was restarted, or cannot be reached by NIXL (the transfer) while its ZeroMQ "
        "port still answers. The request is computed here as without it.",
        now="the peer's log at this time; the same release of vLLM on both sides; UCX_LOG_LEVEL=info on both shows "
        "the transport; longer timeouts only where the peer is merely busy",
        good="peers that are up and of one release",
    ),
    Problem(
        code="KVD1039",
        name="offload-peer-refused",
        severity=Severity.CRASH,
        title="A peer of the P2P offloading tier is refused: the two sides are not set up alike.",
        shows=(
            Logged("P2PSession <peer>: rejecting peer connect: <why>"),
            Logged("P2P <peer>: rejecting peer: <why>"),
            Logged("P2PSession <peer>: protocol error: <why> — disconnecting"),
        ),
        sentence="{why}",
        releases={"vllm": ">=0.32"},
        sure=False,
        cause="Peers tell each other their model, block size, dtype and ranks at the start, and take no other's. The "
        "text after the colon names what differs, or an answer that this release does not know.",
        now="the same --model, --kv-cache-dtype, --block-size, --tensor-parallel-size and release of vLLM on all peers",
        good="one set of options for all peers",
    ),
    Problem(
        code="KVD1256",
        name="fs-backend-without-tensors",
        severity=Severity.SLOW,
        title="llm-d's file system backend reads GPU tensors that are gone: these blocks are not stored.",
        shows=(
            Logged("Store failed for <file>: Cannot access data pointer of Tensor that doesn't have storage"),
            Failed(
                kind="RuntimeError",
                text="Cannot access data pointer of Tensor that doesn't have storage",
                through="/llmd_fs_backend/",
            ),
        ),
        sentence="a thread that writes has a tensor without memory",
        connectors=_OFFLOAD,
        cause="The threads of llmd_fs_backend write in the background, under load or while the engine ends, when the "
        "memory of their tensors was given back. No request fails; the file is not there later, and its tokens are "
        "computed again. Without `Store failed for` before it, it is a tensor of other code.",
        now="fewer requests at once (--max-num-seqs), or without `SharedStorageOffloadingSpec`: "
        "cpu_bytes_to_use alone; nothing if it comes only while the engine ends",
        good="a newer llmd_fs_backend; or vLLM's own `TieringOffloadingSpec` with a tier of type fs (vLLM 0.26 or "
        "newer)",
        threads=("https://github.com/llm-d/llm-d-kv-cache/issues/504",),
        sure=False,
    ),
    Problem(
        code="KVD1764",
        name="offload-copies-without-waiting",
        severity=Severity.WRONG,
        title="vLLM's own offloading copies blocks that the model is still writing or reading: text is garbled under "
        "load.",
        shows=(),
        said=(
            r"SimpleCPUOffload|OffloadingConnector|kv[-_]offloading",
            r"(?i)garbl|corrupt|gibberish|wrong (?:generation|output|answer)|incorrect|nonsens",
            r"(?i)concurren|under load|\brace\b|cross-stream|intermittent|nondetermin",
        ),
        cause="Copies run on a stream of their own. SimpleCPUOffloadConnector: before 0.26 a store does not wait for "
        "the step that writes the block, and in no release up to 0.33.0 does a load wait for the step that still reads "
        "it (worker.py 0.33.0:309 waits for stores alone). OffloadingConnector: before 0.15 stores, before 0.32 loads "
        "(they meet the zeroing of blocks of hybrid models).",
        now="OffloadingConnector of vLLM 0.32.0 (`--kv-offloading-size`, without VLLM_USE_SIMPLE_KV_OFFLOAD); "
        "SimpleCPUOffloadConnector: `--no-async-scheduling` makes it rarer; restart, which empties the CPU cache",
        good="vLLM 0.32.0 with OffloadingConnector; SimpleCPUOffloadConnector: pull 47324 is open",
        sure=False,
        threads=tuple(
            f"https://github.com/vllm-project/vllm/{each}"
            for each in ("issues/45704", "issues/31210", "pull/46278", "pull/47291", "pull/31341")
        ),
    ),
)
