"""Code that the fixes for NixlConnector share."""

from kvfix.fixes.api import NIXL_BASE_WORKER, Any, stubs


def now() -> float:
    """Return the time in seconds, by the clock that NixlConnector uses for leases. `kvfix lab` replaces this clock."""
    return float(NIXL_BASE_WORKER.imported.time.perf_counter())


def fail_load(worker: Any, request_id: str, *_: Any, **__: Any) -> Any:
    """Report a load as failed, so that `kv_load_failure_policy` applies. Fixes also use `fail_load` as `on_fault`."""
    return worker._handle_failed_transfer(request_id, None, worker._recv_failures, record_failed_transfer=False)


def has_full_attention(spec: type) -> bool:
    """Return True for the spec of a full-attention group. In other KV groups, a request keeps only its last blocks."""
    return "FullAttentionSpec" in {each.__name__ for each in spec.__mro__}


def scheduler_side(**more: Any) -> Any:
    """Return a stub of NixlConnector's schedulers for probes. `more` adds or replaces attributes."""
    parallel = stubs.Stub(tensor_parallel_size=1, decode_context_parallel_size=1, pipeline_parallel_size=1)
    return stubs.stub(
        more, _TRANSFER_MODE="pull", engine_id="p", side_channel_host="p", side_channel_port=1, transfer_tp_size=1,
        vllm_config=stubs.Stub(parallel_config=parallel), use_host_buffer=False, kv_recompute_threshold=0,
        is_bidirectional_kv_xfer_enabled=False, _kv_lease_duration=30, _registration_generation=0,
        get_exchange_clipped_blocks=lambda blocks: blocks, _get_remote_prefill_token_count=lambda tokens: tokens,
        _stop_heartbeat=lambda _: None, _heartbeat_by_engine={}, _heartbeat_req_engine={}, _reqs_need_recv={},
        _reqs_need_send={}, _reqs_need_save={}, _reqs_in_batch=set(), _reqs_not_processed=set(),
        _push_pending_registrations={}, _push_registration_deadlines={}, _push_registration_timeout=1.0,
        _finished_request_blocks={}, _newly_finished_push_blocks={},
        _registered_prefills={},  # nixl-push-second-decode-waits in patches/upstream adds this attribute
    )  # fmt: skip


def worker_side(**more: Any) -> Any:
    """Return a stub of NixlConnector's workers for probes. `more` adds or replaces attributes."""
    return stubs.stub(
        more, _TRANSFER_MODE="pull", world_size=1, pp_size=1, pcp_rank=0, dcp_size=1, block_size=16, use_mla=False,
        _has_mamba=False, transfer_topo=stubs.Stub(), tp_mappings={}, _physical_blocks_per_logical_kv_block=1,
        _logical_to_kernel_block_ids=lambda blocks, ratio: blocks, _bidirectional_kv_xfer_enabled=False,
        _remote_agents={}, _remote_registration_generations={}, _invalid_remote_engines=set(), _engine_last_active={},
        _recving_transfers={}, _recving_metadata={}, _reqs_to_process=set(), _sending_transfers={},
        _pending_d_registrations={}, _pop_matching_finished_blocks=lambda name: (name, ([1],)),
        _send_heartbeats=lambda _: None,
    )  # fmt: skip


def load(remote: list[int], own: list[int]) -> Any:
    """Return, for probes, the metadata of a load from engine "p". remote: blocks of "p". own: blocks of decode."""
    source = stubs.Stub(block_ids=[remote], engine_id="p", request_id=stubs.NAME, registration_generation=0)
    return stubs.Stub(
        local_block_ids=(own,), local_physical_block_ids=(own,), local_num_computed_blocks=(0,), remote=source,
        awaiting_kvs=True, region_blocks_to_zero=None,
    )  # fmt: skip


def remote_prefill(tokens: int, request_id: str = stubs.NAME, **params: Any) -> Any:
    """Return, for probes, a decode request whose prefill is on engine "p". `params` adds or replaces parameters."""
    known = {
        "do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "p", "remote_request_id": "r",
        "remote_host": "p", "remote_port": 1, "tp_size": 1,
    }  # fmt: skip
    return stubs.request(tokens, request_id=request_id, kv_transfer_params={**known, **params})


def finished_prefill(tokens: int, **more: Any) -> Any:
    """Return, for probes, a request that has ended on the prefill instance. A decode instance will read the blocks."""
    from vllm.v1.request import RequestStatus

    params, status = {"do_remote_decode": True}, RequestStatus.FINISHED_LENGTH_CAPPED
    return stubs.request(tokens, kv_transfer_params=params, num_computed_tokens=tokens, status=status, **more)


def allocated(*blocks: int) -> Any:
    """Return the argument `blocks` of `update_state_after_alloc` for probes."""
    return stubs.Stub(get_unhashed_block_ids_all_groups=lambda: (list(blocks),))


def registration(module: Any, **data: Any) -> Any:
    """Return, for probes, the notice (bytes) with which a decode rank registers the blocks of a request."""
    return module.PUSH_REG_NOTIF_PREFIX + module.msgspec.msgpack.encode({"request_id": stubs.NAME, **data})
