"""EngineCore dies or later requests return wrong text: SimpleCPUOffloadConnector stores blocks of a failed load.

Symptom: The log has `Recovered from KV load failure` or `Failing 1 request(s) due to KV load failure`. Then EngineCore
dies with an `AssertionError` in `_process_store_completion` of simple_kv_offload/manager.py. Or nothing more is logged,
and later requests that begin with the same prompt return wrong text. The bug needs a MultiConnector with
SimpleCPUOffloadConnector and a connector that loads within the step, such as LMCache's in-process connector.

Cause: SimpleCPUOffloadConnector stores blocks in the step in which another connector loads them (manager.py
0.32.0:840). `update_connector_output` reads only reports of SimpleCPUOffloadConnector (:1005), which lack the failed
load. When the store ends, SimpleCPUOffloadConnector takes the blocks' current keys (:1080). With kv_load_failure_policy
"fail" the failed blocks have no key, and the assertion fails. With "recompute" later requests find the wrong KV.

Fix: The fix also reads the failed blocks from the report that `update_connector_output` gets. From the stores in
flight, the fix removes the failed blocks, all later blocks of the same request, and blocks that have lost their keys.
When a store ends, its removed blocks become free, and no request finds them. The request does not store the removed
blocks again, but the next request with the same prompt stores them.
- Releases: vLLM 0.20.2 to 0.33.0. The fix is for 0.32.0 and later.
- Remove when: `update_connector_output` handles `invalid_block_ids`.
"""

from collections.abc import Callable, Collection

from kvfix.fixes.api import GO_ON, SIMPLE_SCHEDULER, Any, Fix, fix_before, note, stubs

#: Name of a scheduler's attribute, {store event: GPU blocks that the scheduler drops when the store ends}.
_GIVEN_UP = "_kvfix_given_up"


def _give_up_all(scheduler: Any, *_: Any, **__: Any) -> Any:
    stores = scheduler._store_event_to_blocks.items()
    setattr(scheduler, _GIVEN_UP, {event: set(transfer.gpu_block_ids) for event, transfer in stores})
    return GO_ON


@fix_before(when=lambda scheduler, output, *_, **__: output.invalid_block_ids, on_fault=_give_up_all)
def update_connector_output(scheduler: Any, output: Any) -> None:
    bad, blocks = _bad(scheduler, output.invalid_block_ids), scheduler._gpu_block_pool.blocks
    given_up = vars(scheduler).setdefault(_GIVEN_UP, {})
    for event in given_up.keys() - scheduler._store_event_to_blocks.keys():
        del given_up[event]
    for event, transfer in scheduler._store_event_to_blocks.items():
        lost = {block for block in transfer.gpu_block_ids if block in bad or blocks[block].block_hash is None}
        if lost:
            note(__name__, f"store {event}: removed {len(lost)} blocks, because a load failed")
            given_up[event] = given_up.get(event, set()) | lost


def _bad(scheduler: Any, failed: Collection[int]) -> set[int]:
    """Return the failed blocks and their requests' later blocks. With `lazy_offload`, return only the failed blocks."""
    bad = set(failed)
    for state in scheduler._reqs_to_store.values():
        for blocks in state.block_ids:
            first = next((at for at, block in enumerate(blocks) if block in bad), len(blocks))
            bad.update(blocks[first:])
    return bad


def _give_up(scheduler: Any, event: int, *_: Any, **__: Any) -> Any:
    """Free all blocks of the store. No request finds these blocks."""
    transfer = scheduler._store_event_to_blocks.get(event)
    if transfer is not None:
        scheduler._in_flight_store_gpu_blocks.difference_update(transfer.gpu_block_ids)
        scheduler._release_transfer_refs(transfer)
        scheduler._store_event_to_blocks[event] = type(transfer)([], [], None)
    return GO_ON


@fix_before(when=lambda scheduler, event, *_, **__: event in getattr(scheduler, _GIVEN_UP, ()), on_fault=_give_up)
def _process_store_event(scheduler: Any, event: int) -> None:
    lost = getattr(scheduler, _GIVEN_UP).pop(event)
    whole = scheduler._store_event_to_blocks.get(event)
    if whole is not None:  # else a reset has dropped the store
        kept, gone = _part(whole, lambda block: block not in lost), _part(whole, lambda block: block in lost)
        scheduler._in_flight_store_gpu_blocks.difference_update(lost)
        # One statement makes both changes, so that no error can occur between the changes.
        scheduler._store_event_to_blocks[event], _ = kept, scheduler._release_transfer_refs(gone)


def _part(transfer: Any, wanted: Callable[[int], bool]) -> Any:
    places = [place for place, block in enumerate(transfer.gpu_block_ids) if wanted(block)]
    columns = transfer.gpu_block_ids, transfer.cpu_block_ids, transfer.block_meta
    return type(transfer)(*(None if column is None else [column[place] for place in places] for column in columns))


def shows_bug(hook: Any, module: Any) -> bool:
    """Let the load of block 3 fail in the step that ends a store of block 3. With the bug, requests find the block."""
    found: list[Any] = []
    block = stubs.Stub(
        block_id=3, block_hash=b"key", block_hash_num_tokens=16, is_null=False, ref_cnt=1, reset_hash=lambda: None
    )
    pool = stubs.Stub(
        blocks={3: block}, cached_block_hashes_by_block={}, free_blocks=list,
        _insert_block_hash=lambda *args, **_: found.append(args),
    )  # fmt: skip
    state = stubs.Stub(block_ids=([3],), store_events={7}, finished=False, num_stored_blocks=[1])
    scheduler = module.SimpleCPUOffloadScheduler.__new__(module.SimpleCPUOffloadScheduler)
    vars(scheduler).update(
        cpu_block_pool=pool, _gpu_block_pool=pool, _lazy_mode=False, enable_kv_cache_events=False,
        _in_flight_store_gpu_blocks={3}, _store_event_to_blocks={7: module.TransferMeta([3], [3])},
        _abandoned_store_event_to_blocks={}, _store_event_to_reqs={7: [stubs.NAME]}, _pending_finished_stores=[],
        _reqs_to_store={stubs.NAME: state}, _store_event_pending_counts={}, _expected_worker_count=1,
    )  # fmt: skip
    report = module.SimpleCPUOffloadWorkerMetadata(completed_store_events={7: 1})
    output = stubs.Stub(finished_recving=(), failed_recving=(), invalid_block_ids={3}, kv_connector_worker_meta=report)
    hook(scheduler, output)
    return bool(found)


FIX = Fix(
    SIMPLE_SCHEDULER.update_connector_output(broken=">=0.32", probe=shows_bug, fix=update_connector_output),
    SIMPLE_SCHEDULER._process_store_event(broken=">=0.32", fix=_process_store_event, helper=True),
    effect="wrong output",
    evidence={"KVR011": "^update_(from|connector)_output: AssertionError", "KVD1388": ""},
    scenarios=("simple-offload-stores-failed-load", "simple-offload-store-asserts"),
)
