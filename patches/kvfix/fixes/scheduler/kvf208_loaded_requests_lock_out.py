"""All requests wait for ever: a loaded request needs more blocks than are free, and the requests behind it hold them.

Symptom: `Running: 0 reqs, Waiting: N reqs` for ever, no throughput, no error. The engine has a connector that loads
between steps, the priority policy (`--scheduling-policy priority`) and `scheduler_reserve_full_isl=False`.

Cause: vLLM first tries to schedule waiting requests that already hold blocks, in order of priority. `schedule` stops
at the first request for which too few blocks are free (scheduler.py 0.32.0:1275-1282). vLLM admits a load if enough
blocks stay free for the requests admitted earlier (:1249). Without `scheduler_reserve_full_isl`, vLLM does not check
that enough blocks are free for the prompt tokens after the load.

With priorities, the first request in the queue may be the request that was admitted last. Later requests in the queue
hold all blocks that they need, but vLLM does not reach these later requests. The first request waits for their blocks.
The lock-out also occurs if the first request must still begin its load. This load may not use the blocks that vLLM
reserves for the loads in flight (:1249).

Fix: The fix acts after a step that scheduled nothing because the first request lacked blocks. In the next step, the fix
finds the first waiting request for which enough blocks are free. The fix moves this request to the front of the queue.

Mixed roll-out: Engines with and without the fix work together. The fix is opt-in because it reorders waiting requests.
- Releases: vLLM 0.32.0 and 0.33.0. Earlier releases have other queues, so this fix does not work there.
  KVF903 describes the lock-out in earlier releases.
- Upstream: https://github.com/vllm-project/vllm/pull/45406 describes the bug.
  https://github.com/vllm-project/vllm/pull/57841 is about the case without priorities, which 0.32.0 solves.
- Remove when: `schedule` tries the next request that holds blocks.
"""

from collections.abc import Iterator

from kvfix.fixes.api import SCHEDULER, Any, Fix, Steps, fix_around, note


# The fix skips almost all steps, because waiting requests rarely hold blocks.
@fix_around(when=lambda scheduler, *_, **__: scheduler.kv_holding_waiting)
def schedule(scheduler: Any, *_: Any, **__: Any) -> Steps:
    queue, aside = scheduler.kv_holding_waiting, _to_step_aside(scheduler)
    if aside:
        note(__name__, f"request {aside[0].request_id} lacks blocks, so the scheduler tries later requests first")
        queue.remove_requests(aside)
    try:
        output = yield
    finally:
        if aside:
            queue.prepend_requests(reversed(aside))
    is_idle = not scheduler.running and not output.total_num_scheduled_tokens
    scheduler._kvfix_refused = next(_ready(scheduler), None) if is_idle else None


def _ready(scheduler: Any) -> Iterator[Any]:
    """Yield the waiting requests that hold blocks and do not wait for a load, in the order of the queue."""
    for request in scheduler.kv_holding_waiting:
        loaded = request.request_id in scheduler.finished_recving_kv_req_ids
        if loaded or request.status.name in ("WAITING", "PREEMPTED"):
            yield request


def _to_step_aside(scheduler: Any) -> list[Any]:
    """Return the request that stopped the last step, and the next requests for which too few blocks are free."""
    refused, aside = getattr(scheduler, "_kvfix_refused", None), list[Any]()
    if refused is None:
        return aside
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for request in _ready(scheduler):
        if not aside and request is not refused:
            return []
        needs = scheduler._request_remaining_blocks(request)
        if request is refused and request.request_id not in scheduler.finished_recving_kv_req_ids:
            needs += scheduler._inflight_prefill_reserved_blocks()  # a load must leave these blocks free (:1249)
        if needs <= free:
            return aside
        aside.append(request)
    return []


FIX = Fix(
    SCHEDULER.schedule(broken=">=0.32.0", fix=schedule),
    effect="hang",
    evidence={"KVD202": ""},
    # After an idle step the fix moves a later request to the front, even if vLLM would soon free more blocks.
    changes_healthy=("mp", "mp-in-tree"),
    no_patch={"vllm": "https://github.com/vllm-project/vllm/pull/45406 proposed a patch; vLLM must choose the order"},
    opt_in=True,
)
