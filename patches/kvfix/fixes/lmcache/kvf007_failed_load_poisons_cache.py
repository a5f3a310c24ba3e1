"""Later requests return wrong text: after a failed load, LMCache stores the KV that the step computed on top of it.

Symptom: The log has only `Request ... failed to load ... tokens across ... blocks`. Later, other requests that begin
with the same prompt return wrong text.

Cause: If a load fails, vLLM still runs the step, and then drops the request's output. But `wait_for_save` does not
check for failed blocks, and stores the KV that the step has computed (0.5.6 vllm_v1_adapter.py:1104-1259). With
kv_load_failure_policy "recompute" vLLM computes the right KV in the next step, but LMCache keeps the wrong chunks.

Fix: If the load of a block fails in a step, the worker does not save the block's request. With asynchronous
scheduling, vLLM schedules the next step before it knows of the failure. So the worker does not save the request in the
next step either. vLLM asks the worker for failed blocks after the save. With speculative decoding, vLLM asks before the
save (gpu_model_runner.py 0.32.0:4179, 4509). LMCache then forgets the failed blocks, so the fix records the blocks.

vLLM rolls the request back to the last token before the failed blocks, and the fix records the request. When vLLM
schedules the request again, the fix marks all tokens of the request as not saved. (For LMCache before 0.4.1, KVF008
marks the tokens.) The scheduler does not know which saves the workers skipped, so LMCache saves all tokens again,
except cached chunks.
- Releases: LMCache 0.3.9 to 0.5.6. 0.3.9 does not know which blocks failed, so the fix has no effect there.
- Remove when: `wait_for_save` skips the requests whose load failed.
"""

from collections import deque

from kvfix.fixes import _closed, _lmcache, _scheduler
from kvfix.fixes.api import LMCACHE_V1, SCHEDULER, Any, Fix, fix_after, fix_before, note, stubs


class Failed:
    """The failed blocks of the last N steps. N: how many steps vLLM can schedule before it learns of a failed block.

    The metadata object identifies a step, because the save and the report of failed blocks get the same object.
    """

    def __init__(self, config: Any) -> None:
        self._steps: deque[tuple[Any, set[int]]] = deque(maxlen=_lmcache.most_in_flight(config))

    def add(self, metadata: Any, blocks: set[int]) -> None:
        if not self._steps or self._steps[0][0] is not metadata:
            self._steps.appendleft((metadata, set()))
        self._steps[0][1].update(blocks)

    def blocks(self) -> set[int]:
        return set().union(*(blocks for _, blocks in self._steps))


def _some_failed(impl: Any, *_: Any, **__: Any) -> Any:
    return getattr(impl, "_invalid_block_ids", None) or hasattr(impl, "_kvfix_failed")  # 0.3.9 has neither attribute


def _saves_end(impl: Any, *_: Any, **__: Any) -> Any:
    """Store nothing after an error of this fix, because the fix cannot tell which KV depends on a failed load."""
    impl._kvfix_failed = None
    return _closed.worker_saves_nothing(impl)


@fix_after(only=_lmcache.is_layerwise, when=_some_failed, on_fault=_saves_end)
def fix_layers(impl: Any, answer: Any, *_: Any, **__: Any) -> None:
    """Drop the stores of requests whose load failed, before LMCache stores the first layer."""
    _store_nothing_of_failed(impl)


def _store_nothing_of_failed(impl: Any, *_: Any, **__: Any) -> None:
    if getattr(impl, "_kvfix_failed", ()) is None:
        _closed.worker_saves_nothing(impl)
        return
    metadata, blocks = impl._parent._get_connector_metadata(), set(impl._invalid_block_ids)
    failed = getattr(impl, "_kvfix_failed", None)
    if failed is not None:
        failed.add(metadata, set())
        blocks |= failed.blocks()
        if not failed.blocks():
            del impl._kvfix_failed
    for request in metadata.requests:
        size = impl._block_size
        if request.save_spec is not None and any(int(slot) // size in blocks for slot in request.slot_mapping[::size]):
            note(__name__, f"request {request.req_id}: its load failed, so this step does not store it")
            _closed.store_nothing(impl, request)


fix_worker = fix_before(when=_some_failed, on_fault=_saves_end)(_store_nothing_of_failed)


# vLLM also asks for failed blocks in a step without computation, so `Failed` counts this step too.
@fix_after(
    when=lambda impl, blocks, *_, **__: blocks or getattr(impl, "_kvfix_failed", None),
    on_fault=_closed.set_to("_kvfix_failed", None),
)
def fix_failed_blocks(impl: Any, blocks: set[int]) -> None:
    if getattr(impl, "_kvfix_failed", ()) is None:  # after an error of this fix, nothing is stored
        return
    if not hasattr(impl, "_kvfix_failed"):
        impl._kvfix_failed = Failed(impl._vllm_config)
    impl._kvfix_failed.add(getattr(impl._parent, "_connector_metadata", None), blocks)


def _all_rolled_back(scheduler: Any, answer: Any, *_: Any, **__: Any) -> Any:
    for impl in _scheduler.lmcache_adapters(scheduler):
        impl._kvfix_rolled_back = set(scheduler.requests)
    return answer


@fix_after(on_fault=_all_rolled_back)
def fix_rollback(scheduler: Any, answer: Any, *_: Any, **__: Any) -> None:
    for impl in _scheduler.lmcache_adapters(scheduler):
        rolled_back = vars(impl).setdefault("_kvfix_rolled_back", set())
        rolled_back.intersection_update(scheduler.requests)
        rolled_back.update(answer[0])


# The loop runs only after a roll-back, because in every step it would cost more than all other fixes together.
@fix_before(when=lambda impl, *_, **__: getattr(impl, "_kvfix_rolled_back", None), on_fault=_closed.save_nothing_more)
def fix_scheduler(impl: Any, scheduler_output: Any) -> None:
    cached, trackers = scheduler_output.scheduled_cached_reqs, impl._request_trackers
    for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=False):
        if name in impl._kvfix_rolled_back and computed < len(trackers[name].token_ids):
            note(__name__, f"request {name} was rolled back to {computed} tokens")
            trackers[name].num_saved_tokens = 0
    impl._kvfix_rolled_back.difference_update(cached.req_ids, scheduler_output.finished_req_ids)


def worker_shows_bug(hook: Any, adapter: Any) -> bool:
    """Let the load of block 3 fail, and save the step. With the bug, the worker stores the request."""
    return _lmcache.stores(hook, adapter, {"_invalid_block_ids": {3}})


def failed_blocks_are_forgotten(hook: Any, adapter: Any) -> bool:
    """Let the hook report the failed block 3. Return True if nothing records block 3 for the save of the next step."""
    config = stubs.Stub(scheduler_config=stubs.Stub(async_scheduling=True))
    impl = stubs.Stub(_invalid_block_ids={3}, _vllm_config=config, _parent=None, _recent_load_errors=())
    if hook(impl) != {3}:
        raise LookupError("the hook does not report the failed blocks")
    return not getattr(impl, "_kvfix_failed", None)


def scheduler_shows_bug(hook: Any, adapter: Any) -> bool:
    """Roll back 512 saved tokens to 256, and compute 16 more. With the bug, the step does not save all 272 tokens."""
    impl, tracker = stubs.scheduled(adapter, 900, tracked=512, computed=256, _kvfix_rolled_back={stubs.NAME})
    tracker.num_saved_tokens = 512
    meta = hook(impl, stubs.step(16, computed=256))
    return not meta.requests or meta.requests[0].save_spec.skip_leading_tokens != 0


def rollback_is_not_recorded(hook: Any, scheduler: Any) -> bool:
    """Let the hook roll back a request whose first block has failed. Return True if nothing records the roll-back."""
    impl = stubs.Stub()
    _scheduler.roll_back_one(hook, impl)
    return not getattr(impl, "_kvfix_rolled_back", None)


FIX = Fix(
    LMCACHE_V1.wait_for_save(broken=">=0.3.9", probe=worker_shows_bug, fix=fix_worker, order=1),
    LMCACHE_V1.start_load_kv(broken=">=0.3.9.post1", fix=fix_layers, order=4, helper=True),
    LMCACHE_V1.get_block_ids_with_load_errors(
        broken=">=0.3.9.post1", probe=failed_blocks_are_forgotten, fix=fix_failed_blocks, helper=True
    ),
    LMCACHE_V1.build_connector_meta(broken=">=0.4.1", probe=scheduler_shows_bug, fix=fix_scheduler, order=3),
    SCHEDULER._update_requests_with_invalid_blocks(
        broken=">=0.11.2", probe=rollback_is_not_recorded, fix=fix_rollback, order=1, helper=True
    ),
    effect="wrong output",
    evidence={"KVD302": "", "KVD1090": ""},
    scenarios=("failed-load-poisons-cache", "failed-load-stored-last", "failed-load-stored-under-way"),
)
