"""Assertions of vLLM about its own blocks and requests: what a connector or an abort has brought out of step."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_UTILS = "vllm/v1/core/kv_cache_utils.py"
_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_MANAGER = "vllm/v1/core/single_type_kv_cache_manager.py"
_OFFLOAD = "vllm/v1/kv_offload/cpu/manager.py"

PROBLEMS = (
    Problem(
        code="KVD275",
        name="grant-is-not-the-promise",
        severity=Severity.CRASH,
        title="vLLM granted another number of external tokens than the connector had promised.",
        shows=(
            Failed(kind="AssertionError", text="Mismatch in number of tokens: <granted> vs <cached> - <computed> for"),
        ),
        sentence="{granted} tokens granted where {cached} - {computed} were promised",
        connectors=(
            "MooncakeStoreConnector",
            "AscendStoreConnector",
            "MultiConnector",
            "LMCacheConnectorV1",
            "LMCacheConnector",
        ),
        cause="The connector remembers the promise of its last lookup. vLLM may ask again with other computed tokens "
        "(a request that was preempted or waited), or cut the promise: a last block for drafts, an encoder's budget.",
        now="--max-num-seqs lower, so that nothing is preempted, and no --speculative-config; or without the connector",
        good="a connector that takes what it is granted: LMCacheConnectorV1 of LMCache 0.3.11 or newer, with kvfix",
        sure=False,
    ),
    Problem(
        code="KVD276",
        name="more-blocks-taken-than-free",
        severity=Severity.CRASH,
        title="vLLM's scheduler takes more blocks than are free: what it counted as free is not.",
        shows=(
            Failed(kind="ValueError", text="Cannot get <blocks> free blocks from the pool"),
            Failed(kind="ValueError", text="No free blocks available", at=_UTILS),
            Failed(kind="AssertionError", source="assert self.num_free_blocks >= n", within="popleft_n"),
        ),
        cause="Blocks are counted before they are taken. Between the two, hits took blocks out of the free list that "
        "the count had as free, or a connector gave blocks back twice or not at all.",
        now="KVFIX=check kvfix run -- CMD names the request and the hook; until then --no-enable-prefix-caching",
        good="report it with `kvfix-diagnose LOG --issue FILE.md`",
        sure=False,
    ),
    Problem(
        code="KVD277",
        name="block-freed-twice",
        severity=Severity.CRASH,
        title="vLLM's list of free blocks is broken: a block was freed twice, or used after it was freed.",
        shows=(
            Failed(text="is out of sync with the free list", at=_UTILS),
            Failed(kind="RuntimeError", text="Invalid block found in popleft()", at=_UTILS),
            Failed(kind="RuntimeError", text="remove() called on an invalid block", at=_UTILS),
            Failed(text="The block already has a hash. This should not happen.", at=_UTILS),
        ),
        releases={"vllm": ">=0.15"},
        cause="With a connector the usual way is a request whose blocks are freed at its end and again when a late "
        "report of its transfer comes (finished_sending, finished_recving). Until it was noticed two requests may have "
        "had the same block: wrong text is possible.",
        now="restart; KVFIX=check kvfix run -- CMD names the second report",
        good="report it with `kvfix-diagnose LOG --issue FILE.md`",
        sure=False,
    ),
    Problem(
        code="KVD278",
        name="failed-block-that-is-none",
        severity=Severity.CRASH,
        title="A worker reports that a block could not be loaded which the scheduler does not have.",
        shows=(
            Failed(kind="AssertionError", text="Invalid block_id <block> >= <blocks>. This indicates a bug in the KV"),
        ),
        cause="get_block_ids_with_load_errors of the connector answers ids of its own, or counts kernel blocks where "
        "vLLM counts blocks (a hybrid model, or a block size that the backend divides).",
        now="a --block-size that the attention backend takes as it is; --disable-hybrid-kv-cache-manager",
        good="a connector that answers vLLM's block ids; what made the load fail stands above",
    ),
    Problem(
        code="KVD279",
        name="request-id-used-twice",
        severity=Severity.CRASH,
        title="A request came with the id of one that is still there.",
        shows=(Failed(kind="AssertionError", text="duplicate request id", at=_SCHEDULER),),
        releases={"vllm": ">=0.15"},
        cause="The router or the client sets X-Request-Id and sends the same request again (a retry, prefill and "
        "decode at one engine) before the first one has ended. A request that waits for a transfer has not ended.",
        now="an id of its own for each try; no retries in the proxy while an engine still works on the first",
        good="the router's configuration",
    ),
    Problem(
        code="KVD280",
        name="reset-while-transfers-run",
        severity=Severity.CRASH,
        title="The prefix cache was reset with running requests while some of them wait for a transfer.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="Failed to reset KV cache even when all the running requests are preempted",
                at=_SCHEDULER,
            ),
        ),
        releases={"vllm": ">=0.15"},
        cause="Blocks of requests that wait for remote KV, or of ended ones whose KV is still being sent, cannot be "
        "given back; vLLM says that it does not support this (scheduler.py 0.32.0:2870).",
        now="reset when no transfer is running (pause, or wait until Waiting and the transfers are 0), or without "
        "reset_running_requests",
        good="the order: drain, then reset",
    ),
    Problem(
        code="KVD281",
        name="offloaded-chunk-out-of-step",
        severity=Severity.CRASH,
        title="OffloadingConnector's CPU tier loads or releases a chunk that it does not hold so.",
        shows=(
            Failed(kind="AssertionError", text="is not ready for reading"),
            Failed(kind="AssertionError", source="assert block.is_ready", within="prepare_load"),
            Failed(kind="AssertionError", text="ref_cnt is already 0"),
        ),
        cause="Between the lookup and the load the chunk was evicted or is still being written; or a load was reported "
        "done twice.",
        now="a larger --kv-offloading-size; one CPU tier without a secondary one; or without the connector until it is "
        "reported",
        good="report it with `kvfix-diagnose LOG --issue FILE.md`",
        sure=False,
    ),
    Problem(
        code="KVD282",
        name="ranks-have-other-layers",
        severity=Severity.CRASH,
        title="Two ranks describe the KV cache of the same layer differently.",
        shows=(Failed(text="The KV cache specs for the same layer are different across workers", at=_UTILS),),
        releases={"vllm": ">=0.11,<0.33"},
        cause="The ranks run different code or settings: another image on one node, an attention backend that is "
        "missing there, environment variables of one pod only.",
        now="the same image, VLLM_* and --kv-cache-dtype on every node",
        good="one specification for all pods of an engine",
    ),
    Problem(
        code="KVD283",
        name="context-parallel-refuses-the-layers",
        severity=Severity.CRASH,
        title="Decode or prefill context parallelism does not support this model's layers.",
        shows=(
            *(
                Failed(kind="AssertionError", text=f"{kind} not support {layers} now.")
                for kind in ("DCP", "PCP")
                for layers in ("sliding window attn", "chunked local attn", "mamba", "hybrid attn")
            ),
            Failed(text="Hybrid KV cache groups with multiple block sizes do not support context parallelism"),
            Failed(kind="AssertionError", source="assert dcp_world_size == 1 and pcp_world_size == 1"),
        ),
        cause="The manager of such a KV group has no context parallelism; it is asked at the first lookup, not at the "
        "start.",
        now="without --decode-context-parallel-size and --prefill-context-parallel-size",
        good="tensor parallelism alone for this model",
    ),
    Problem(
        code="KVD367",
        name="hidden-states-of-a-waiting-request",
        severity=Severity.CRASH,
        title="A request was aborted before it ran, and the connector for hidden states has no file name for it.",
        shows=(Failed(kind="KeyError", within="example_hidden_states_connector.py:request_finished"),),
        releases={"vllm": "<0.32"},
        cause="File names are noted when a request is scheduled for the first time; request_finished takes the name "
        "out of every request, also of one that was aborted in the queue.",
        now="clients that do not give up while they wait (a larger --max-num-seqs, longer time-outs), and restart",
        good="vLLM 0.32.0 or newer, which looks whether there is one",
        threads=("https://github.com/vllm-project/vllm/pull/56841",),
    ),
)
