"""A load fails, and what the step computes on top of what is not there is stored under valid keys.

## Symptom
None at the time but `Request ... failed to load ... tokens across ... blocks`. Later, wrong text in other requests that
begin with the same prompt.

## Cause
`start_load_kv` records the blocks whose load failed, and vLLM drops the output of the step. But the step has run, on KV
that is not there, and in the same step `wait_for_save` stores what it computed (0.5.6 vllm_v1_adapter.py:1104-1259 does
not look at the failed blocks). With kv_load_failure_policy "recompute" the right KV comes a step later, and the cache
keeps the chunks that it has.

## Fix
A request that has one of the failed blocks among its own is not saved in that step, and with asynchronous scheduling
not in the next one either, which is made before vLLM hears of the failure. With speculative decoding vLLM asks for the
failed blocks before it has the step saved (gpu_model_runner.py 0.32.0:4179, 4509), else after: the worker remembers
them by step. vLLM takes the request back to its last good token, and kvfix notes whom it takes
back; when the connector follows, all of it counts as not saved (before 0.4.1 that is done by KVF008): the scheduler
does not know which saves were left out, and a chunk that is in the cache is not stored twice.

## Releases
LMCache 0.3.9 to 0.5.6; 0.3.9 does not know which blocks failed, and cannot be cured of it. A kv_producer saves all the
same: there a save is the transfer to the decoder.

## Upstream
None known.

## Remove when
`wait_for_save` leaves out the requests whose load failed.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import after, before
from kvfix.fix import Fix, Patch
from kvfix.fixes import _scheduler

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class Failed:
    """Blocks whose load failed in the last steps of a worker, as many steps as are made before vLLM hears of it.

    A step is known by its metadata, which are bound until the step has been saved and asked for its failed blocks, in
    whichever order. Where vLLM hears of a failure before it makes the next step, that step is the only one.
    """

    def __init__(self, config: Any) -> None:
        in_flight = getattr(config, "max_concurrent_batches", None)  # since vLLM 0.26
        in_flight = in_flight or 1 + bool(config.scheduler_config.async_scheduling)
        self._steps: deque[tuple[Any, set[int]]] = deque(maxlen=in_flight)

    def add(self, metadata: Any, blocks: set[int]) -> None:
        if not self._steps or self._steps[0][0] is not metadata:
            self._steps.appendleft((metadata, set()))
        self._steps[0][1].update(blocks)

    def blocks(self) -> set[int]:
        return set().union(*(blocks for _, blocks in self._steps))


def correct_worker(adapter: ModuleType) -> Callable[..., Any]:
    def wait_for_save(impl: Any) -> None:
        metadata, blocks = impl._parent._get_connector_metadata(), set(impl._invalid_block_ids)
        failed = getattr(impl, "_kvfix_failed", None)
        if failed is not None:
            failed.add(metadata, set())
            blocks |= failed.blocks()
            if not failed.blocks():
                del impl._kvfix_failed
        for request in metadata.requests:
            if request.save_spec is not None and _has_one_of(blocks, request.slot_mapping, impl._block_size):
                request.save_spec.can_save = False

    # 0.3.9 does not know which have failed
    failed = 'getattr(impl, "_invalid_block_ids", None) or getattr(impl, "_kvfix_failed", None)'
    return before(wait_for_save, when=failed)


def remember(adapter: ModuleType) -> Callable[..., Any]:
    def get_block_ids_with_load_errors(impl: Any, blocks: set[int]) -> set[int]:
        if not hasattr(impl, "_kvfix_failed"):
            impl._kvfix_failed = Failed(impl._vllm_config)
        impl._kvfix_failed.add(getattr(impl._parent, "_connector_metadata", None), blocks)
        return blocks

    # A step that computes nothing saves nothing, and is asked for its failed blocks all the same: it counts.
    return after(get_block_ids_with_load_errors, when='blocks or getattr(impl, "_kvfix_failed", None)')


def _has_one_of(failed: Any, slot_mapping: Any, block_size: int) -> bool:
    return any(int(slot) // block_size in failed for slot in slot_mapping[::block_size])


def note(scheduler: ModuleType) -> Callable[..., Any]:
    def _update_requests_with_invalid_blocks(scheduler: Any, answer: Any, *_: Any, **__: Any) -> Any:
        for impl in _scheduler.lmcache_adapters(scheduler):
            rolled_back = vars(impl).setdefault("_kvfix_rolled_back", set())
            rolled_back.intersection_update(scheduler.requests)
            rolled_back.update(answer[0])
        return answer

    return after(_update_requests_with_invalid_blocks)


def correct_scheduler(adapter: ModuleType) -> Callable[..., Any]:
    def build_connector_meta(impl: Any, scheduler_output: Any) -> None:
        cached, trackers = scheduler_output.scheduled_cached_reqs, impl._request_trackers
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=False):
            if name in impl._kvfix_rolled_back and computed < len(trackers[name].token_ids):
                trackers[name].num_saved_tokens = 0
        impl._kvfix_rolled_back.difference_update(cached.req_ids, scheduler_output.finished_req_ids)

    # It is called in every step: looking at all that run would cost more than all other fixes together.
    return before(build_connector_meta, when='getattr(impl, "_kvfix_rolled_back", None)')


def worker_shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """Block 3 failed to load, its request is to be saved. Wrong is to save it."""
    import torch  # the adapter has imported it

    stored: list[Any] = []
    save = SimpleNamespace(skip_leading_tokens=0, can_save=True)
    slots = torch.arange(48, 64)
    request = SimpleNamespace(
        req_id=probe.NAME, token_ids=[0] * 16, slot_mapping=slots, save_spec=save, load_spec=None, disagg_spec=None,
        is_last_prefill=True, request_configs=None,
    )  # fmt: skip
    metadata = adapter.LMCacheConnectorMetadata()
    metadata.requests = [request]
    engine = SimpleNamespace(lookup_unpin=lambda *_: None, store=lambda *_, **__: stored.append(1))
    impl = SimpleNamespace(
        kv_role="kv_both", use_layerwise=False, enable_blending=False, lmcache_engine=engine, kv_caches={"layer": None},
        config=SimpleNamespace(), device="cpu", _lmcache_chunk_size=16, _block_size=16, _invalid_block_ids={3},
        _recent_load_errors=(),  # of patches/upstream/failed-load-poisons-cache
        _parent=SimpleNamespace(_get_connector_metadata=lambda: metadata),
    )  # fmt: skip
    hook(impl)
    return bool(stored)


def memory_is_needed(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """Block 3 has failed, and the next step is under way: that is told, and forgotten."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))
    impl = SimpleNamespace(_invalid_block_ids={3}, _vllm_config=config, _parent=None, _recent_load_errors=())
    if hook(impl) != {3}:
        raise LookupError("it does not tell which blocks have failed")
    return not getattr(impl, "_kvfix_failed", None)


def scheduler_shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """512 tokens count as saved, vLLM has gone back to 256 and computes 16 more. Right is to save the 272 from 0 on."""
    tracker = adapter.RequestTracker(probe.NAME, 900, [0] * 512, list(range(32)), num_saved_tokens=512)
    impl = probe.scheduler_side(
        _request_trackers={probe.NAME: tracker},
        _unfinished_requests={probe.NAME: probe.request(900, num_computed_tokens=256)},
        _kvfix_rolled_back={probe.NAME},
    )
    meta = hook(impl, probe.step(16, computed=256))
    return not meta.requests or meta.requests[0].save_spec.skip_leading_tokens != 0


def note_is_needed(hook: Callable[..., Any], scheduler: ModuleType) -> bool:
    """One running request, its first block has failed: the hook takes it back, and nobody notes that."""
    request, impl = probe.request(32, num_computed_tokens=20, num_cached_tokens=16), SimpleNamespace()
    rolled_back, *_ = _scheduler.take_back(hook, request, adapter=impl)
    if rolled_back != {probe.NAME}:
        raise LookupError("it does not name first whom it takes back")
    return not getattr(impl, "_kvfix_rolled_back", None)


ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"
FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module=ADAPTER,
            function="LMCacheConnectorV1Impl.wait_for_save",
            broken=">=0.3.9",
            shows_bug=worker_shows_bug,
            correct=correct_worker,
        ),
        Patch(
            dist="lmcache",
            module=ADAPTER,
            function="LMCacheConnectorV1Impl.get_block_ids_with_load_errors",
            broken=">=0.3.9.post1",
            shows_bug=memory_is_needed,
            correct=remember,
            helper=True,
        ),
        Patch(
            dist="lmcache",
            module=ADAPTER,
            function="LMCacheConnectorV1Impl.build_connector_meta",
            broken=">=0.4.1",
            shows_bug=scheduler_shows_bug,
            correct=correct_scheduler,
        ),
        Patch(
            dist="vllm",
            module=_scheduler.MODULE,
            function=_scheduler.TAKES_BACK,
            broken=">=0.11.2",
            shows_bug=note_is_needed,
            correct=note,
            helper=True,
        ),
    ),
)
