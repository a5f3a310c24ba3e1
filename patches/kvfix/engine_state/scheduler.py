"""Read the state of vLLM's scheduler (v1/core/sched/scheduler.py, 0.20 to 0.33).

    {"class": "Scheduler", "steps": 12, "paused": "", "policy": "fcfs", "block_size": 16,
     "pool": {"blocks": 60, "free": 5, "cached": 40, "reserved": 7},    reserved: for prefills in flight
     "answers": 1,              steps that the workers have not answered; None without an EngineCore
     "deferred": 0,             blocks that become free with a later answer
     "ended_reports": ["r1"],   transfers reported for requests that the scheduler does not know any more
     "ranks_left": {"r7": 1},   {request: number of ranks that have not reported its load, if other ranks have}
     "settings": {"max_num_batched_tokens": 8192, ...},    the lab makes a scheduler from these; None: not known
     "requests": [{...}]}       waiting requests in the scheduler's order, then running ones, then ended ones

A request has these fields:

    {"id": "r7", "status": "WAITING_FOR_REMOTE_KVS", "queue": "kv_holding_waiting", "arrived": 12.5,
     "since": 3.1,              seconds of its current wait; None: not known
     "computed": 128, "total": 140, "prompt": 138, "blocks": 8, "preemptions": 0, "priority": 0,
     "report": "loaded",        its load is done, but the scheduler has not handled the report; or "failed", ""
     "needs": 1,                free blocks needed to admit it, and those reserved for other requests; None: unknown
     "lookup": "in flight", "asked": 0, "hit": 128, "promised": 128, "granted": 128, "loading": [0, 128],
     "loaded": 128, "stored": 0, "phase": "READY", "source": "recorder"}

With `full`, it also has "block_ids" ([[...]], a list for each KV group) and "hashes" (hexadecimal, of whole blocks).
"""

import time
from typing import Any

from . import needs

#: vLLM's queues of waiting requests, in the order in which it admits from them. Earlier releases have only some.
QUEUES = ("kv_holding_waiting", "skipped_waiting", "waiting")
_OF_CONNECTOR = ("lookup", "hit", "promised", "granted", "stored", "phase")
_OF_RECORDER = ("asked", "promised", "granted", "loading", "loaded", "stored")
Row = dict[str, Any]


def read(scheduler: Any, engine: Any, held: dict[str, Row], recorded: dict[str, Row], full: bool) -> Row | None:
    """Return the state; None without a scheduler. held, recorded: {request: row} of connectors and recorder."""
    if scheduler is None:
        return None
    pool = scheduler.kv_cache_manager.block_pool
    reserved = needs.reserved(scheduler)
    rows = []
    now = time.time()  # one time for all requests, so that "arrived" shows their order
    for request, queue in _requests(scheduler):
        try:
            name = request.request_id
            row = _row(scheduler, request, queue, held.get(name, {}), recorded.get(name, {}), now)
            if queue in QUEUES:
                between = bool(row["phase"])  # only the multi-process connector loads between steps
                row["needs"] = needs.blocks(scheduler, request, row["promised"] or 0, between, reserved)
            if full:
                row["block_ids"] = [[block.block_id for block in group] for group in needs.held(scheduler, request)]
                row["hashes"] = [bytes(each).hex() for each in list(getattr(request, "block_hashes", ()))]
        except Exception as error:  # noqa: BLE001  the other requests can still be read
            row = {"id": getattr(request, "request_id", ""), "queue": queue, "unread": type(error).__name__}
        rows.append(row)
    pause = getattr(scheduler, "_pause_state", None)
    return {
        "class": type(scheduler).__name__,
        "steps": getattr(scheduler, "current_step", None),
        "paused": "" if not pause else str(getattr(pause, "name", pause)),
        "policy": str(getattr(getattr(scheduler, "policy", None), "value", "")),
        "block_size": scheduler.block_size,
        "pool": {
            "blocks": pool.num_gpu_blocks - 1,  # one is the null block
            "free": pool.get_num_free_blocks(),
            "cached": len(pool.cached_block_hash_to_block),
            "reserved": reserved,
        },
        # Without asynchronous scheduling and pipeline parallelism, a step is answered before the next one begins.
        "answers": None if engine is None else len(getattr(engine, "batch_queue", None) or ()),
        "deferred": sum(len(blocks) for _, blocks in list(getattr(scheduler, "deferred_frees", ()))),
        "ended_reports": sorted(set(scheduler.finished_recving_kv_req_ids) - set(scheduler.requests)),
        "ranks_left": _ranks_left(engine),
        "settings": _settings(scheduler),
        "requests": rows,
    }


def _requests(scheduler: Any) -> list[tuple[Any, str]]:
    """Return (request, its queue). "ended": kept until its blocks are sent. "": it is in no queue now."""
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
        "blocks": sum(map(needs.count, needs.held(scheduler, request))),
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
        "max_num_batched_tokens": getattr(config, "max_num_batched_tokens", None),
        "max_num_seqs": getattr(config, "max_num_seqs", None),
        "max_model_len": getattr(scheduler, "max_model_len", None),
        "reserve_full_isl": getattr(scheduler, "scheduler_reserve_full_isl", None),
        "async_scheduling": getattr(config, "async_scheduling", None),
        "groups": len(scheduler.kv_cache_config.kv_cache_groups),
    }


def _ranks_left(engine: Any) -> dict[str, int]:
    """Return the counters of KVOutputAggregator: ranks that have not reported (kv_connector/utils.py 0.32.0:70)."""
    aggregator = getattr(getattr(engine, "model_executor", None), "kv_output_aggregator", None)
    return dict(getattr(aggregator, "_recv_remaining_count", None) or {})
