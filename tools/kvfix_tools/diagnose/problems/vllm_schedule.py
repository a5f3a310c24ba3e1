"""Assertions of vLLM's scheduler in a step: what a connector answered, or an abort, has broken its books."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_MANAGER = "vllm/v1/core/single_type_kv_cache_manager.py"
_POOL = "vllm/v1/core/block_pool.py"
_SLOTS = "vllm/v1/core/kv_cache_manager.py"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_REPORT = "report it with `kvfix-diagnose LOG --issue FILE.md`"

PROBLEMS = (
    Problem(
        code="KVD080",
        name="mamba-takes-too-many-blocks",
        severity=Severity.CRASH,
        title="A request of a model with Mamba or GDN layers needs more state blocks in a step than vLLM expects.",
        shows=(
            Failed(kind="AssertionError", source="assert num_new_blocks <=", at=_MANAGER),
            Failed(kind="AssertionError", text="num_required_blocks", within="allocate_new_blocks"),
            Failed(kind="AssertionError", source="assert num_required_blocks > len(req_blocks)"),
        ),
        releases={"vllm": ">=0.15"},
        cause="In the mode `align` (what prefix caching turns on) a step adds one state block, and one for each draft "
        "token at first. More, or fewer than the request holds, comes where tokens skip ahead or go back between two "
        "steps: tokens from a connector, a preemption, drafts that were rejected.",
        now="--no-enable-prefix-caching; if it comes again without --speculative-config; then without "
        "--kv-transfer-config; restart after each",
        good="vLLM 0.32.0 or newer counts draft and partial blocks anew; if it asserts too, report it",
        sure=False,
        threads=(f"{_ISSUES}/43382",),
    ),
    Problem(
        code="KVD081",
        name="mamba-draft-block-shared",
        severity=Severity.CRASH,
        title="A state block for draft tokens is used by others when it is to be moved.",
        shows=(Failed(kind="AssertionError", text="Speculative Mamba blocks must be exclusively owned", at=_MANAGER),),
        releases={"vllm": ">=0.32"},
        cause="Draft blocks of Mamba state belong to one request. Tokens of a connector that end within them, or a "
        "resumed request, have put one into the prefix cache.",
        now="without --speculative-config, or --no-enable-prefix-caching; restart",
        good=_REPORT,
        sure=False,
    ),
    Problem(
        code="KVD082",
        name="promised-beyond-the-request",
        severity=Severity.CRASH,
        title="The connector promises more tokens than the request has, and EngineCore dies.",
        shows=(
            Failed(kind="AssertionError", source="assert num_computed_tokens <= request.num_tokens", at=_SCHEDULER),
        ),
        releases={"vllm": ">=0.20"},
        cause="get_num_new_matched_tokens has to answer what lies beyond the computed tokens. An answer that counts "
        "from the beginning of the prompt, a hit that is rounded up to a chunk, or one kept from an earlier question "
        "of the same request makes the sum larger than the prompt.",
        now="KVFIX=check kvfix run -- CMD names the request and both numbers; until then --no-enable-prefix-caching, "
        "so that computed tokens are 0; restart",
        good="LMCache 0.3.11 or newer with kvfix; another connector: its authors, with the report of KVFIX=check",
        sure=False,
    ),
    Problem(
        code="KVD083",
        name="asynchronous-load-of-nothing",
        severity=Severity.CRASH,
        title="The connector says that it loads asynchronously, and promises no tokens.",
        shows=(
            Failed(kind="AssertionError", source="assert num_external_computed_tokens > 0", at=_SCHEDULER),
            Failed(kind="AssertionError", source="assert num_external_tokens > 0"),
        ),
        releases={"vllm": ">=0.15"},
        cause="get_num_new_matched_tokens answered (0, True), which its contract forbids: with no tokens the second "
        "value has to be False. vLLM before 0.32 may also have cut the promise to 0 itself (Mamba alignment).",
        now="`kvfix conform` shows it for a connector of your own; until then `--no-enable-prefix-caching`; restart",
        good="a connector that answers (0, False)",
        sure=False,
    ),
    Problem(
        code="KVD084",
        name="nothing-left-to-compute",
        severity=Severity.CRASH,
        title="A request was given all of its tokens, none is left to compute, and vLLM cannot schedule it.",
        shows=(Failed(kind="ValueError", text="num_new_tokens must be greater than 0", at=_SLOTS),),
        releases={"vllm": ">=0.11"},
        cause="A hit may cover a prompt but for its last token, which the model has to compute. The connector promised "
        "the last one too, or a load that failed left a request without tokens to compute.",
        now="--no-enable-prefix-caching with the connector, or prompts that are no multiple of the chunk; KVFIX=check "
        "kvfix run -- CMD names the request",
        good="a connector that leaves one token: LMCache 0.3.11 or newer with kvfix",
        sure=False,
    ),
    Problem(
        code="KVD085",
        name="finished-with-several-groups",
        severity=Severity.CRASH,
        title="A request of a model with several KV groups ends, and the connector knows one group only.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert len(self.kv_cache_config.kv_cache_groups) == 1",
                within="_connector_finished",
                at=_SCHEDULER,
            ),
            Failed(kind="ValueError", text="too many values to unpack", within="_connector_finished"),
        ),
        cause="A connector that is no SupportsHMA is told of one list of blocks. vLLM switches its hybrid KV cache "
        "manager off for such a one; here it is on (--no-disable-hybrid-kv-cache-manager, a plugin, or a wrapper whose "
        "children differ).",
        now="--disable-hybrid-kv-cache-manager (models with sliding window); models with Mamba or GDN: "
        "LMCacheMPConnector or OffloadingConnector in place of this one; restart",
        good="a connector with request_finished_all_groups",
    ),
    Problem(
        code="KVD086",
        name="free-block-still-used",
        severity=Severity.CRASH,
        title="A block that vLLM takes from its free list is still used by a request.",
        shows=(
            Failed(kind="AssertionError", source="assert block.ref_cnt == 0", at=_POOL),
            Failed(
                kind="AssertionError", source="assert block.ref_cnt > 0 and not block.is_null", within="unpin_blocks"
            ),
        ),
        releases={"vllm": ">=0.11"},
        cause="Its references were counted wrong: freed twice (the end of a request, and a late report of its "
        "transfer), or taken without a count. Until it was noticed two requests may have had the same block: wrong "
        "text is possible.",
        now="restart; KVFIX=check kvfix run -- CMD names the second report; until then without --kv-transfer-config",
        good=_REPORT,
        sure=False,
    ),
    Problem(
        code="KVD088",
        name="invalid-status-of-a-waiting-request",
        severity=Severity.CRASH,
        title="A request in vLLM's queue has a status with which it cannot be scheduled.",
        shows=(Failed(kind="RuntimeError", text="Invalid request status: <status>", at=_SCHEDULER),),
        sentence="{status}",
        releases={"vllm": ">=0.15"},
        cause="Only waiting and preempted requests stand in the queue. A load that ended twice, or an abort in the "
        "same step, has left one there with the status of another list.",
        now="KVFIX=check kvfix run -- CMD names the event; until then no client that gives up early, and "
        "--no-async-scheduling; restart",
        good=_REPORT,
        sure=False,
    ),
    Problem(
        code="KVD396",
        name="block-hashed-out-of-step",
        severity=Severity.CRASH,
        title="Blocks of a request are to be put into the prefix cache, and their hashes are there already, or not "
        "yet.",
        shows=(
            Failed(kind="AssertionError", source="assert blk.block_hash is None", within="cache_full_blocks"),
            Failed(kind="AssertionError", source="len(request.block_hashes) >= num_full_blocks"),
            Failed(kind="AssertionError", source="len(block_hashes) >= num_full_blocks", within="cache_full_blocks"),
        ),
        cause="vLLM keeps how many blocks of a request are cached, and the connector's tokens move that count: a load "
        "that failed and is computed anew, one that is reported twice, tokens granted beyond those that have a hash "
        "(drafts).",
        now="--no-enable-prefix-caching; without --speculative-config; KVFIX=check kvfix run -- CMD names the event",
        good="vLLM 0.26.0 or newer; if it asserts too, report it with `kvfix-diagnose LOG --issue FILE.md`",
        sure=False,
    ),
    Problem(
        code="KVD398",
        name="step-of-no-tokens",
        severity=Severity.CRASH,
        title="A step, or a request in it, has no token to compute, and vLLM asserts that there is one.",
        shows=(
            Failed(kind="AssertionError", source="assert total_num_scheduled_tokens > 0"),
            Failed(kind="AssertionError", source="assert num_new_tokens > 0", at=_SCHEDULER),
            Failed(kind="AssertionError", source="assert num_tokens_scheduled > 0", at=_SCHEDULER),
        ),
        releases={"lmcache": "!=0.3.10"},
        cause="A prompt whose every token the connector promised (it has to leave the last one to the model), or "
        "tokens that were computed already and are promised again. A prompt that ends at a block or a chunk meets it.",
        now="KVFIX=check kvfix run -- CMD names the request and the numbers; until then --no-enable-prefix-caching, "
        "and LMCache 0.4.7 or newer",
        good="a connector that leaves one token: LMCache 0.4.7 or newer with kvfix",
        sure=False,
    ),
    Problem(
        code="KVD399",
        name="running-request-with-new-hits",
        severity=Severity.CRASH,
        title="A request that has blocks already is given hits of the prefix cache once more.",
        shows=(
            Failed(kind="AssertionError", source="assert len(new_computed_blocks) == 0"),
            Failed(kind="AssertionError", source="assert len(req_blocks) == 0", within="add_local_computed_blocks"),
            Failed(kind="AssertionError", source="assert len(req_blocks) == 0", within="allocate_new_computed_blocks"),
        ),
        cause="Hits are for a request's first blocks. One that kept its blocks while it waited (a load in flight, a "
        "preemption, a streamed prompt) was asked about again as if it were new, mostly after its load had failed.",
        now="--no-enable-prefix-caching; so much KV cache that nothing is preempted (--max-num-seqs lower); "
        "KVFIX=check kvfix run -- CMD names the event",
        good="vLLM 0.26.0 or newer; if it asserts too, report it with `kvfix-diagnose LOG --issue FILE.md`",
        sure=False,
    ),
)
