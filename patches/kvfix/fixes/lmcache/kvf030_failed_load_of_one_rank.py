"""Later requests return wrong text: a load fails in one rank, and the other ranks store wrong KV.

Symptom: With tensor or pipeline parallelism one worker logs `Request ... failed to load ... tokens across ... blocks`.
Nothing else is logged. Later, other requests that begin with the same prompt return wrong text.

Cause: Each rank loads its own part of a request's KV from its own cache. If the load fails in one rank, the other ranks
do not know of the failure during the step (0.5.6 vllm_v1_adapter.py:890-896). The other ranks compute wrong KV,
because each rank's KV depends on all ranks. The other ranks store the wrong KV at the end of the step (:1104-1259).

After the step vLLM computes the tokens again, but the caches of the other ranks keep the wrong chunks. KVF007 fixes
only the rank whose load failed.

Fix: With several workers, the fix delays the saves of a step that loads KV. The fix also delays saves of steps that
start before vLLM has the output of the loading step. With the output, vLLM has all ranks' load reports, and rolls back
or ends the failed requests. The fix then makes the delayed saves, except saves of ended or preempted requests. vLLM may
have reused the blocks of these requests.

The worker of a kv_producer stores every request that has metadata (:1152). So the fix marks the metadata of a request
whose save is delayed, and the worker skips this request. If a request names a decoder (`disagg_spec`), the store is the
transfer to the decoder. This store cannot wait, because the request ends with the step. So the decoder may still get
wrong KV. With `kv_load_failure_policy=fail` (default), prefill ends the request. Do not set `recompute` for prefill.
- Releases: LMCache 0.3.9 to 0.5.6. In 0.3.9 the fix has no effect, because 0.3.9 does not know which blocks failed.
- Remove when: Before a rank saves the KV of a step, all ranks agree which loads have failed.
"""

import copy

from kvfix.fixes import _closed, _lmcache, _scheduler
from kvfix.fixes.api import LMCACHE_V1, SCHEDULER, Any, Fix, fix_after, note, stubs

#: In this attribute, the scheduler's LMCache adapter keeps its `Unsaved` object.
_UNSAVED = "_kvfix_unsaved"
#: Attribute of a request's metadata that tells the worker of a kv_producer not to store the request in this step.
_STORE_NOTHING = "_kvfix_store_nothing"


class Unsaved:
    """The saves that wait for the load reports of all ranks. Each request has at most one waiting save."""

    def __init__(self, config: Any) -> None:
        self.in_flight = _lmcache.most_in_flight(config)
        self.step = 0
        #: The first step whose saves need not wait.
        self.open_from = 0
        #: For each request id: the first step that may make the delayed save, and the metadata of the save.
        self.saves: dict[str, tuple[int, Any]] = {}

    def take(self, scheduler_output: Any) -> dict[str, Any]:
        """Remove and return the due saves. Drop a save if its request no longer has the blocks of the save."""
        again = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        for name in again.union(resumed, scheduler_output.finished_req_ids):
            self.saves.pop(name, None)
        names = self.saves.keys() & scheduler_output.num_scheduled_tokens
        due = sorted(name for name in names if self.saves[name][0] <= self.step)
        return {name: self.saves.pop(name)[1] for name in due}

    def put_off(self, meta: Any) -> None:
        """Delay this save to a later step."""
        setattr(meta, _STORE_NOTHING, True)
        if not meta.save_spec.can_save:  # the mark keeps a kv_producer from storing now. The next save has the tokens
            return
        later = copy.copy(meta)
        delattr(later, _STORE_NOTHING)
        later.load_spec, later.save_spec = None, copy.copy(meta.save_spec)
        meta.save_spec.can_save = False
        note(__name__, f"request {meta.req_id}: its save waits for the reports of all ranks")
        if meta.req_id in self.saves:
            _join(later, self.saves[meta.req_id][1])
        self.saves[meta.req_id] = self.open_from, later


def _join(meta: Any, earlier: Any) -> None:
    """Add the earlier save to `meta`, because with `use_layerwise` LMCache makes only one save per request and step."""
    save = meta.save_spec
    save.skip_leading_tokens = min(save.skip_leading_tokens, earlier.save_spec.skip_leading_tokens)


def _has_ranks(impl: Any) -> Any:
    return impl._vllm_config.parallel_config.world_size > 1 and impl.kv_role in ("kv_both", "kv_producer")


@fix_after(only=_has_ranks, on_fault=_closed.drop_saves)
def fix_metadata(impl: Any, metadata: Any, scheduler_output: Any) -> None:
    unsaved = getattr(impl, _UNSAVED, None) or Unsaved(impl._vllm_config)
    setattr(impl, _UNSAVED, unsaved)
    unsaved.step += 1
    due = unsaved.take(scheduler_output) if unsaved.saves else {}
    if any(meta.load_spec is not None and meta.load_spec.can_load for meta in metadata.requests):
        unsaved.open_from = unsaved.step + unsaved.in_flight
    for meta in metadata.requests:
        if not _saves(impl, meta):
            continue
        if unsaved.step < unsaved.open_from:
            unsaved.put_off(meta)
        elif meta.req_id in due:
            _join(meta, due.pop(meta.req_id))
    metadata.requests[:0] = due.values()


def _saves(impl: Any, meta: Any) -> bool:
    """Return True if the worker saves the request, and the save is not the transfer to a decoder."""
    if meta.save_spec is None or getattr(meta, "disagg_spec", None) is not None:
        return False
    return bool(meta.save_spec.can_save or impl.kv_role == "kv_producer")


fix_stores, fix_layers = _lmcache.skip_producer_stores(lambda request: getattr(request, _STORE_NOTHING, False))


def _drop_all(scheduler: Any, answer: Any, *_: Any, **__: Any) -> Any:
    for impl in _scheduler.lmcache_adapters(scheduler):
        setattr(impl, _UNSAVED, None)
        for tracker in impl._request_trackers.values():
            tracker.skip_save = True  # a hit ends at the first unsaved token, so later saves are useless
    return answer


@fix_after(on_fault=_drop_all)
def fix_rollback(scheduler: Any, answer: Any, *_: Any, **__: Any) -> None:
    for impl in _scheduler.lmcache_adapters(scheduler):
        unsaved = getattr(impl, _UNSAVED, None)
        saves = unsaved.saves if unsaved is not None else {}
        for name in saves.keys() & answer[0]:
            del saves[name]


def shows_bug(hook: Any, adapter: Any) -> bool:
    """Two ranks load 256 tokens of a request and compute 256 more. With the bug, the same step saves the request."""
    config = stubs.Stub(max_concurrent_batches=1, parallel_config=stubs.Stub(world_size=2))
    new = stubs.request(512, req_id=stubs.NAME, block_ids=(list(range(32)),), num_computed_tokens=256)
    load = adapter.LoadSpec(vllm_cached_tokens=0, lmcache_cached_tokens=256, can_load=True)
    meta = hook(stubs.scheduler_side(load_specs={stubs.NAME: load}, _vllm_config=config), stubs.step(256, new=new))
    return bool(meta.requests[0].save_spec.can_save)


def stores_marked_request(hook: Any, adapter: Any) -> bool:
    """Save a marked request of a kv_producer. Without the fix, the worker stores the request."""
    return _lmcache.stores(hook, adapter, {"kv_role": "kv_producer"}, **{_STORE_NOTHING: True})


def rollback_is_not_recorded(hook: Any, scheduler: Any) -> bool:
    """Roll back a request that has a waiting save. Without the fix, the save stays."""
    saves = {stubs.NAME: None}
    _scheduler.roll_back_one(hook, stubs.Stub(**{_UNSAVED: stubs.Stub(saves=saves)}))
    return bool(saves)


FIX = Fix(
    LMCACHE_V1.build_connector_meta(broken=">=0.3.9", probe=shows_bug, fix=fix_metadata, order=9),
    LMCACHE_V1.wait_for_save(broken=">=0.3.9", probe=stores_marked_request, fix=fix_stores, order=4, helper=True),
    LMCACHE_V1.start_load_kv(broken=">=0.3.9", fix=fix_layers, order=6, helper=True),
    SCHEDULER._update_requests_with_invalid_blocks(
        broken=">=0.11.2", probe=rollback_is_not_recorded, fix=fix_rollback, order=6, helper=True
    ),
    effect="wrong output",
    scenarios=("failed-load-of-one-rank", "failed-load-of-one-rank-in-producer"),
    no_patch={"lmcache": "within the step, all ranks must agree which loads have failed, by a collective call"},
)
