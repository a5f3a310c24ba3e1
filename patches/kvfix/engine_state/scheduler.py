"""Read the state of vLLM's scheduler (v1/core/sched/scheduler.py, 0.20 to 0.33).

    {"class": "Scheduler", "steps": 12, "paused": "", "policy": "fcfs", "block_size": 16,
     "pool": {"blocks": 60, "free": 5, "cached": 40, "reserved": 7},    reserved: for prefills and loads in flight
     "answers": 1,              number of steps whose output vLLM does not have yet; None without an EngineCore
     "deferred": 0,             blocks that steps in flight may still use; vLLM frees these blocks after the steps
     "ended_reports": ["r1"],   requests whose load was reported, but which the scheduler has already dropped
     "ranks_left": {"r7": 1},   1 rank has not yet reported the load of "r7", but other ranks have
     "settings": {"max_num_batched_tokens": 8192, ...},    settings with which `kvfix lab` builds a scheduler
     "requests": [{...}]}       waiting requests in the scheduler's order, then running ones, then ended ones

A request has these fields:

    {"id": "r7", "status": "WAITING_FOR_REMOTE_KVS", "queue": "kv_holding_waiting", "arrived": 12.5,
     "since": 3.1,              seconds that the request has waited; None: not known
     "computed": 128, "total": 140, "prompt": 138, "blocks": 8, "preemptions": 0, "priority": 0,
     "report": "loaded",        load report that the scheduler has not handled yet: "loaded", "failed", or "" for none
     "needs": 1,                free blocks to admit the request; a load between steps adds "reserved"; None: not known
     "lookup": "in flight", "asked": 0, "hit": 128, "promised": 128, "granted": 128, "loading": [0, 128],
     "loaded": 128, "stored": 0, "phase": "READY", "source": "recorder"}

With `full`, a request also has "block_ids" (a list for each KV group) and "hashes" (hexadecimal, of whole blocks only).
"""

import time
from collections.abc import Sequence
from typing import Any

#: vLLM's queues of waiting requests, in the order in which vLLM admits requests. Earlier releases have fewer queues.
QUEUES = ("kv_holding_waiting", "skipped_waiting", "waiting")
_OF_CONNECTOR = ("lookup", "hit", "promised", "granted", "stored", "phase")
_OF_CONFIG = ("max_num_batched_tokens", "max_num_seqs", "async_scheduling")
_OF_RECORDER = ("asked", "promised", "granted", "loading", "loaded", "stored")
#: Classes of KV group specs that `_needed` supports: full attention, MLA, and sliding windows.
_KINDS = frozenset(("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"))
Row = dict[str, Any]


def read(scheduler: Any, engine: Any, held: dict[str, Row], recorded: dict[str, Row], full: bool) -> Row | None:
    """Return the state. held: {request id: row} of the connectors. recorded: {request id: row} of the recorder."""
    if scheduler is None:
        return None
    pool = scheduler.kv_cache_manager.block_pool
    reserved = _reserved(scheduler)
    rows = []
    now = time.time()  # one time for all requests, so that "arrived" shows the order of requests
    for request, queue in _requests(scheduler):
        try:
            name = request.request_id
            row = _row(scheduler, request, queue, held.get(name, {}), recorded.get(name, {}), now)
            if queue in QUEUES:
                between = bool(row["phase"])  # only the multi-process connector, which loads between steps, has a phase
                row["needs"] = _needed(scheduler, request, row["promised"] or 0, between, reserved)
            if full:
                row["block_ids"] = [[block.block_id for block in group] for group in _blocks(scheduler, request)]
                row["hashes"] = [bytes(each).hex() for each in list(getattr(request, "block_hashes", ()))]
        except Exception as error:  # noqa: BLE001  an error must not hide the other requests
            row = {"id": getattr(request, "request_id", ""), "queue": queue, "unread": type(error).__name__}
        rows.append(row)
    pause = getattr(scheduler, "_pause_state", None)
    # KVOutputAggregator counts the ranks whose report of a load is missing (kv_connector/utils.py 0.32.0:70).
    aggregator = getattr(getattr(engine, "model_executor", None), "kv_output_aggregator", None)
    return {
        "class": type(scheduler).__name__,
        "steps": getattr(scheduler, "current_step", None),
        "paused": "" if not pause else str(getattr(pause, "name", pause)),
        "policy": str(getattr(getattr(scheduler, "policy", None), "value", "")),
        "block_size": scheduler.block_size,
        "pool": {
            "blocks": pool.num_gpu_blocks - 1,  # without the null block
            "free": pool.get_num_free_blocks(),
            "cached": len(pool.cached_block_hash_to_block),
            "reserved": reserved,
        },
        # Only asynchronous scheduling and pipeline parallelism have a batch queue, and several steps in flight.
        "answers": None if engine is None else len(getattr(engine, "batch_queue", None) or ()),
        "deferred": sum(len(blocks) for _, blocks in list(getattr(scheduler, "deferred_frees", ()))),
        "ended_reports": sorted(set(scheduler.finished_recving_kv_req_ids) - set(scheduler.requests)),
        "ranks_left": dict(getattr(aggregator, "_recv_remaining_count", None) or {}),
        "settings": _settings(scheduler),
        "requests": rows,
    }


def _requests(scheduler: Any) -> list[tuple[Any, str]]:
    """Return (request, queue). "ended" means that vLLM keeps the blocks until the KV is sent. "" means no queue."""
    found = [(each, name) for name in QUEUES for each in list(getattr(scheduler, name, ()))]
    found += [(each, "running") for each in list(scheduler.running)]
    listed = {request.request_id for request, _ in found}
    rest = [each for name, each in list(scheduler.requests.items()) if name not in listed]
    return found + [(each, "ended" if each.status.name.startswith("FINISHED") else "") for each in rest]


def _row(scheduler: Any, request: Any, queue: str, held: Row, recorded: Row, now: float) -> Row:
    name = request.request_id
    report = "loaded" if name in scheduler.finished_recving_kv_req_ids else ""
    if name in getattr(scheduler, "failed_recving_kv_req_ids", ()):
        report = "failed"
    row: Row = {
        "id": name,
        "status": request.status.name,
        "queue": queue,
        "arrived": round(now - request.arrival_time, 6),
        "since": held.get("since"),
        "computed": request.num_computed_tokens,
        "total": request.num_tokens,
        "prompt": request.num_prompt_tokens,
        "blocks": sum(map(_count, _blocks(scheduler, request))),
        "preemptions": request.num_preemptions,
        "priority": request.priority,
        "report": report,
        "needs": None,
        **{each: held.get(each) for each in _OF_CONNECTOR},
        "asked": None,
        "loading": None,
        "loaded": None,
        "source": "connector" if held else "",
    }
    if recorded:
        row.update({each: recorded[each] for each in _OF_RECORDER if recorded.get(each) is not None})
        row["since"], row["source"] = recorded["since"], "recorder"
    elif row["status"] == "WAITING_FOR_REMOTE_KVS" and not report:
        granted = row["granted"]
        row["loading"] = [row["computed"] - granted, row["computed"]] if granted else None
    elif row["status"] == "WAITING_FOR_REMOTE_KVS" and report == "loaded":
        row["loaded"] = row["computed"]
    return row


def _settings(scheduler: Any) -> dict[str, Any]:
    config = scheduler.scheduler_config
    return {
        **{name: getattr(config, name, None) for name in _OF_CONFIG},
        "max_model_len": getattr(scheduler, "max_model_len", None),
        "reserve_full_isl": getattr(scheduler, "scheduler_reserve_full_isl", None),
        "groups": len(scheduler.kv_cache_config.kv_cache_groups),
    }


def _blocks(scheduler: Any, request: Any) -> Any:
    """Return one list of the request's blocks for each KV group."""
    return scheduler.kv_cache_manager.coordinator.get_blocks(request.request_id)


def _needed(scheduler: Any, request: Any, promised: int, between: bool, reserved: int | None) -> int | None:
    """Return how many blocks must be free before vLLM admits a waiting request, or None if this is not known.

    The computation follows `allocate_slots` (v1/core/kv_cache_manager.py 0.32.0:516-579) and calls only functions of
    vLLM that change nothing. The result leaves out the blocks of vLLM's watermark. vLLM adds the
    watermark only in a step that already schedules a request. In a standstill, no step schedules a request.

    promised: tokens that the connector would load for a request without computed tokens.
    between: True for a load between steps, False for a load within a step. reserved: see `_reserved`.
    """
    managers, local = _managers(scheduler), int(request.num_computed_tokens)
    if reserved is None or not managers:
        return None
    hits: Sequence[Any] = [[] for _ in managers]
    freed = kept = 0
    if local:  # vLLM first frees the blocks that have left a sliding window, then allocates new blocks
        promised = 0
        for manager, own in zip(managers, _blocks(scheduler, request), strict=True):
            freed += _count(own[: manager.get_num_skipped_tokens(local) // manager.block_size])
    elif any(request.request_id in manager.num_cached_block for manager in managers):
        return None  # the current step admits the request
    else:
        hits, local = _cached(scheduler, request, hits)
    total, computed = min(int(request.num_tokens), int(scheduler.max_model_len)), local + promised
    if promised and between:
        tokens, kept = computed, reserved + int(getattr(scheduler, "_spec_decode_step_blocks", 0))
    else:
        tokens = _after_step(scheduler, computed, total)
    next_step = _to_allocate(managers, request, tokens, computed, hits, local) - freed + kept
    if not getattr(scheduler, "scheduler_reserve_full_isl", False):
        return next_step
    return max(next_step, _to_allocate(managers, request, total, computed, hits, local, apply_admission_cap=True))


def _count(blocks: list[Any]) -> int:
    """Count the blocks except null blocks. vLLM replaces blocks that have left a sliding window with null blocks."""
    return sum(not getattr(block, "is_null", False) for block in blocks)


def _reserved(scheduler: Any) -> int | None:
    """Return how many blocks vLLM reserves for prefills and loads in flight, or None if this is not known."""
    in_flight, managers = list(getattr(scheduler, "_inflight_prefills", ())), _managers(scheduler)
    if not in_flight or not managers:
        return None if in_flight else 0
    spec, most = int(scheduler.num_spec_tokens), int(scheduler.max_model_len)
    more = 1 + spec + int(scheduler.num_lookahead_tokens) if spec else 0
    none: Sequence[Any] = [[] for _ in managers]
    needed = 0  # computed as in `_inflight_prefill_reserved_blocks` (scheduler.py 0.32.0:3088)
    for each in in_flight:
        tokens, done = min(int(each.num_tokens), most) + more, int(each.num_computed_tokens)
        needed += _to_allocate(managers, each, tokens, done, none, done, apply_admission_cap=True)
    return needed


def _managers(scheduler: Any) -> Sequence[Any]:
    """Return the manager of each KV group, or () if a KV group has a spec that is not in `_KINDS`."""
    kinds = {type(group.kv_cache_spec).__name__ for group in scheduler.kv_cache_config.kv_cache_groups}
    return scheduler.kv_cache_manager.coordinator.single_type_managers if kinds <= _KINDS else ()


def _to_allocate(
    managers: Sequence[Any], request: Any, tokens: int, computed: int, hits: Sequence[Any], local: int, **more: bool
) -> int:
    """Return how many blocks vLLM allocates for `tokens` tokens. The first `computed` tokens need no computation."""
    needed = 0
    for manager, hit in zip(managers, hits, strict=True):
        function = type(manager).get_num_blocks_to_allocate
        while hasattr(function, "__wrapped__"):  # skip the wrappers of fixes, because a wrapper would count this call
            function = function.__wrapped__
        named = {"request_id": request.request_id, "num_tokens": tokens, "num_tokens_main_model": tokens, **more}
        if "num_local_computed_tokens" in function.__code__.co_varnames:  # since vLLM 0.26
            named["num_local_computed_tokens"] = local
        needed += function(manager, new_computed_blocks=hit, total_computed_tokens=computed, **named)
    return needed


def _after_step(scheduler: Any, computed: int, total: int) -> int:
    """Return the number of tokens that have a slot after the next step of the request."""
    step = max(1, total - computed)
    threshold = scheduler.scheduler_config.long_prefill_token_threshold
    if scheduler.scheduler_config.enable_chunked_prefill:
        step = min(step, scheduler.max_num_scheduled_tokens, threshold or step)
    return min(min(computed, total - 1) + step + int(scheduler.num_lookahead_tokens), int(scheduler.max_model_len))


def _cached(scheduler: Any, request: Any, none: Sequence[Any]) -> tuple[Sequence[Any], int]:
    """Return (blocks of each KV group, number of tokens) of the longest cached prefix before the last token."""
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching or getattr(request, "skip_reading_prefix_cache", False):
        return none, 0
    hashes = request.block_hashes if isinstance(request.block_hashes, list) else list(request.block_hashes)
    found = manager.coordinator.find_longest_cache_hit(hashes, request.num_tokens - 1)  # this call changes nothing
    return [list(each) for each in found[0]], int(found[1])
