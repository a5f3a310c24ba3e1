"""The books of vLLM's offloading: jobs, chunks and counts that do not add up, and its tiers' reports."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem, Sign

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_SCHEDULER = f"{_V1}/offloading/scheduler.py"
_EVENTS = f"{_V1}/offloading/events.py"
_METRICS = f"{_V1}/offloading/metrics.py"
_COPY = "vllm/v1/kv_offload/cpu/gpu_worker.py"
_CPU = "vllm/v1/kv_offload/cpu/manager.py"
_TIERS = "vllm/v1/kv_offload/tiering/manager.py"
_REGION = "vllm/v1/kv_offload/cpu/shared_offload_region.py"
_WITHOUT = "without OffloadingConnector (--kv-offloading-size, --kv-transfer-config); restart"
_REPORT = "report it with `kvfix-diagnose LOG --issue FILE.md`"


def _asserted(at: str, *sources: str) -> tuple[Sign, ...]:
    return tuple(Failed(kind="AssertionError", source=f"assert {source}", at=at) for source in sources)


PROBLEMS = (
    Problem(
        code="KVD160",
        name="offload-copy-counts-differ",
        severity=Severity.CRASH,
        title="A copy of the OffloadingConnector is to move more blocks than it was given, and the worker dies.",
        shows=(
            *_asserted(
                _COPY,
                "dst_end_offset <= num_dst_blocks",
                "src_end_offset <= num_src_blocks",
                "src_offset == num_src_blocks",
                "dst_offset == num_dst_blocks",
            ),
            # From 0.32 on.
            *_asserted(
                "",
                "op_idx <= num_copy_ops",
                "len(group_sizes) == len(self.layer_refs_per_group)",
                "len(block_indices) == len(self.layer_refs_per_group)",
            ),
            # 0.26.
            *_asserted(
                "",
                "op_idx == num_copy_ops",
                "len(group_sizes) == len(self.kv_cache_groups_data_refs)",
                "len(block_indices) == len(self.kv_cache_groups_data_refs)",
            ),
        ),
        releases={"vllm": ">=0.26"},
        cause="The scheduler counted blocks of each KV group, the worker lays chunks over them, and the two do not "
        "agree: a model with several block sizes, a chunk of several blocks (`blocks_per_chunk`, `block_size`) that "
        "begins inside one, or workers and scheduler of different code (a plugin's spec).",
        now="take `block_size` and `blocks_per_chunk` out of kv_connector_extra_config, and no --block-size; then "
        + _WITHOUT,
        good=_REPORT,
        sure=False,
    ),
    Problem(
        code="KVD161",
        name="offload-cpu-books-broken",
        severity=Severity.CRASH,
        title="The CPU cache of the OffloadingConnector has lost count of its chunks, and EngineCore dies.",
        shows=(
            Failed(kind="AssertionError", text="Chunk <chunk> not found", within="complete_load"),
            Failed(kind="AssertionError", text="Block <block> not found", within="complete_load"),
            Failed(kind="AssertionError", text="Chunk pool did not allocate the expected number of chunks"),
            Failed(kind="AssertionError", text="New cache keys observed after request finalization"),
            *_asserted(
                "",
                "len(self._free_list) >= num_reused",
                "self._num_evictable_cache_chunks >= 0",
                "self._num_evictable_cache_blocks >= 0",
                "len(self.allocated_blocks_free_list) >= num_reused_blocks",
                "len(blocks) == len(block_hashes_to_store)",
            ),
            Failed(kind="AssertionError", text="Block pool did not allocate the expected number of blocks"),
            Failed(kind="AssertionError", source="assert block.ref_cnt > 0", within="complete_load"),
        ),
        cause="A chunk ended a load or a store that it had not begun, or twice; or a cache was reset while copies ran "
        "(new weights, sleep, /reset_prefix_cache).",
        now="no reset of the prefix cache and no sleep while requests run; then " + _WITHOUT,
        good=_REPORT,
        sure=False,
    ),
    Problem(
        code="KVD162",
        name="offload-region-does-not-fit",
        severity=Severity.CRASH,
        title="The shared CPU cache is smaller or otherwise divided than a worker's layers need.",
        shows=(
            Failed(kind="AssertionError", text="Worker offset <end> exceeds worker area end <room>", at=_REGION),
            Failed(kind="RuntimeError", text="Shared offload region has been released.", at=_REGION),
            *_asserted(_REGION, "kv_bytes_per_chunk % self.page_size == 0", "new_offset <= self._row_stride"),
        ),
        releases={"vllm": ">=0.32"},
        cause="Each worker has an equal part of a chunk's row. A rank with more or larger layers than the others "
        "(uneven pipeline stages, a draft model on one rank) does not fit into it. `has been released` comes while the "
        "engine ends.",
        now="the same number of layers on each stage (VLLM_PP_LAYER_PARTITION), no --speculative-config; then "
        + _WITHOUT,
        good=_REPORT,
        sure=False,
    ),
    Problem(
        code="KVD163",
        name="offload-tier-reports-wrong-job",
        severity=Severity.CRASH,
        title="A tier below the CPU reported a job that is not its own, or not there, and EngineCore dies.",
        shows=(
            Failed(kind="AssertionError", text="Finished job_id <job> from tier", at=_TIERS),
            Failed(kind="AssertionError", text="Finished job_id <job> reported by tier", at=_TIERS),
            Failed(kind="AssertionError", text="reported unknown successful keys", at=_TIERS),
            Failed(kind="AssertionError", text="primary tier returned <result> for a cascade key", at=_TIERS),
        ),
        releases={"vllm": ">=0.32"},
        cause="Each job may be reported once, by the tier that got it, with keys that it was given. Tiers of your own "
        "(`module_path`) break this where they report twice, after drain_jobs, or another tier's ids.",
        now="take that tier out of `secondary_tiers`; restart",
        good="a tier that reports each job once; of vLLM's own (fs, obj, p2p): " + _REPORT,
        sure=False,
    ),
    Problem(
        code="KVD167",
        name="offload-load-without-blocks",
        severity=Severity.CRASH,
        title="A load of the OffloadingConnector has fewer blocks or keys than tokens, and EngineCore dies.",
        shows=_asserted(
            "",
            "len(group_blocks) >= num_gpu_blocks",
            "len(offload_keys) >= end_chunk_idx",
            "len(offload_keys) >= num_chunks",
            "len(request.block_hashes) // self.block_size_factor",
            "num_external_tokens == num_pending_gpu_blocks * self.gpu_block_size",
            "full_block_tokens % self.offloaded_block_size == 0",
            "partial_tail_boundary == num_cached_tokens",
            "( len(offload_keys) >= req_status.req.num_tokens // tokens_per_chunk",
        ),
        cause="vLLM granted tokens for which a KV group got no blocks, or which have no hash yet: a hit that is cut in "
        "the middle of a block (a partial tail, --prefix-match-unit), drafts, or a request that was preempted and "
        "asked anew.",
        now="without --prefix-match-unit and --speculative-config, --no-async-scheduling; then " + _WITHOUT,
        good=_REPORT,
        sure=False,
    ),
    Problem(
        code="KVD168",
        name="offload-partial-tail-asserts",
        severity=Severity.CRASH,
        title="The state at the end of a prompt cannot be stored as the OffloadingConnector expects it.",
        shows=(
            *_asserted(
                _SCHEDULER,
                "len(boundaries) == 1",
                "boundary % self.config.tokens_per_hash == 0",
                "self._cow_source_groups.issubset(cow_blocks)",
                "boundary % self._partial_tail_block_size != 0",
                "all(block_id != 0 for block_id in block_ids)",
            ),
            *_asserted(_EVENTS, "chunk_start < boundary_tokens", "boundary_tokens % tokens_per_hash == 0"),
        ),
        releases={"vllm": ">=0.32"},
        cause="Models with Mamba or GDN layers hand over their state where a prompt ends inside a block (partial "
        "tails). The KV groups of this model do not all end there, or the block was taken before.",
        now="without --prefix-match-unit, --block-size and --speculative-config; then " + _WITHOUT,
        good=_REPORT,
        sure=False,
    ),
    Problem(
        code="KVD169",
        name="offload-job-reported-too-often",
        severity=Severity.CRASH,
        title="More workers report a copy of the OffloadingConnector done than took part in it.",
        shows=(
            *_asserted("", "job_status.pending_count == 0"),
            Failed(kind="AssertionError", source="assert count > 0", within="update_connector_output"),
            Failed(kind="KeyError", source="self._jobs[job_id]", within="update_connector_output"),
            Failed(kind="AssertionError", source="assert job_id == req_job"),
        ),
        cause="A job waits for one report of each worker. A worker that reports twice (a copy that was waited for and "
        "polled, a spec from outside of vLLM), or a number of workers other than the scheduler's, breaks the count.",
        now="without a spec of your own (`spec_module_path`); then " + _WITHOUT,
        good=_REPORT,
        sure=False,
    ),
    Problem(
        code="KVD977",
        name="offload-reset-while-copying",
        severity=Severity.CRASH,
        title="The cache of the OffloadingConnector was reset within a step that has copies to start.",
        shows=(
            *_asserted(
                _SCHEDULER,
                "not self._current_batch_load_jobs",
                "not self._current_batch_jobs_to_flush",
                "not self._current_batch_allocated_block_ids",
            ),
            *_asserted(_TIERS, "not self._jobs"),
        ),
        releases={"vllm": ">=0.32"},
        cause="reset_cache (new weights, sleep, /reset_prefix_cache with the connector) has to come between two steps, "
        "with no job left.",
        now="pause with mode=wait until no request runs, then reset or sleep",
        good="the order",
    ),
    Problem(
        code="KVD978",
        name="offload-knows-no-such-layer",
        severity=Severity.CRASH,
        title="Offloading or vLLM's scheduler has no manager for a kind of layer of this model.",
        shows=(
            Failed(kind="AssertionError", text="No manager found for KV cache spec <spec>", at=_SCHEDULER),
            Failed(
                kind="AssertionError",
                text="No manager registered for KVCacheSpec <spec>",
                at="vllm/v1/core/single_type_kv_cache_manager.py",
            ),
        ),
        sentence="{spec}",
        releases={"vllm": ">=0.32"},
        cause="The model, or a plugin of a platform, brings a KV cache spec of its own and did not register its "
        "manager with this vLLM.",
        now="the release of the plugin that is made for this vLLM; else " + _WITHOUT,
        good="a plugin that registers the spec",
    ),
    Problem(
        code="KVD979",
        name="offload-statistics-unknown",
        severity=Severity.CRASH,
        title="Statistics of offloading have a name that the API server does not know, and it dies.",
        shows=(
            Failed(kind="AssertionError", text="Unknown offloading stats key: <key>", at=_METRICS),
            Failed(
                kind="AssertionError",
                text="Unknown simple KV offload stats key: <key>",
                at="vllm/v1/simple_kv_offload/metrics.py",
            ),
            Failed(kind="AssertionError", text="Unknown offloading metric metadata: <key>", at=_METRICS),
            Failed(kind="AssertionError", text="Metric <key> expects <count> labels, got <got>", at=_METRICS),
            Failed(kind="AssertionError", text="Unknown metric type '<type>' for key: <key>", at=_METRICS),
        ),
        sentence="{key}",
        releases={"vllm": ">=0.32"},
        cause="Workers and API server name their counters alike only if they are of one release. A tier or a spec of "
        "your own counts something that its metric definitions do not declare.",
        now="--disable-log-stats; restart. The same image on each node",
        good="a spec that declares what it counts (build_metric_definitions)",
    ),
    Problem(
        code="KVD980",
        name="offload-events-of-this-model",
        severity=Severity.CRASH,
        title="self_describing_kv_events cannot describe the blocks of this model.",
        shows=(
            Failed(kind="AssertionError", text="self-describing events only support full attention", at=_EVENTS),
            Failed(kind="ValueError", text="self_describing_kv_events is not supported by TieringOffloadingSpec"),
            *_asserted(_EVENTS, "hashes_per_chunk > 0", "tok_end <= len(req.all_token_ids)"),
        ),
        releases={"vllm": ">=0.32"},
        cause="Such events name the tokens of a chunk, which is defined for full attention. Sliding windows and Mamba "
        "state have none.",
        now="take `self_describing_kv_events` out of kv_connector_extra_config; restart",
        good="the configuration",
    ),
    Problem(
        code="KVD981",
        name="offload-limit-of-request-ignored",
        severity=Severity.RISK,
        title="A request's kv_transfer_params for offloading are not as vLLM reads them, and are ignored.",
        shows=(
            Logged("max_load_tokens must be a non-negative int, got <value>; ignoring", at=_SCHEDULER),
            Logged("max_offload_tokens must be a non-negative int, got <value>; ignoring", at=_SCHEDULER),
            Logged("_parse_tier_filter: <value>", at=_SCHEDULER),
        ),
        sentence="{value}",
        releases={"vllm": ">=0.32"},
        cause="The client or the router sends a number as text, or names a medium or locality that no tier has.",
        now='"kv_transfer_params": {"max_offload_tokens": 4096}, a number without quotes, in what the router sends',
        good="the router",
    ),
)
