"""A request waits for ever if its hit is larger than OffloadingConnector's CPU memory: its chunks evict each other.

Symptom: Nothing is logged. A request stays in WAITING, and the file system tier reads the same chunks again and again.
The bug needs `TieringOffloadingSpec` with `secondary_tiers`, and too little CPU memory for chunks of waiting requests.

Cause: A lookup that finds a chunk in a tier copies the chunk into CPU memory (a promotion). To make room, the lookup
evicts the least recently used chunk (`_initiate_promotion`, tiering/manager.py 0.32.0:489). The evicted chunk may
belong to the request of the lookup, because no lock protects a promoted chunk before its load. The lookup answers "not
yet" during a promotion. So each lookup promotes the chunk that the previous lookup has evicted.

Fix: Before a load, the fix promotes each chunk only once for a request. If the chunk is then evicted before the load,
the lookup counts the chunk as a miss. The request loads the earlier chunks, and vLLM computes the rest.
- Remove when: `TieringOffloadingManager.lookup` protects found chunks, or promotes no chunk a second time.
"""

from kvfix.fixes.api import OFFLOADING_TIERS, Any, Fix, Steps, fix_around, fix_before, stubs

#: Attribute of a request's context: the keys that were promoted for the request since its last load.
_PROMOTED = "_kvfix_promoted"


@fix_around()
def _initiate_promotion(manager: Any, tier_idx: int, key: Any, req_context: Any) -> Steps:
    promoted = vars(req_context).setdefault(_PROMOTED, set())
    if key in promoted:
        return False
    promoted.add(key)
    return (yield)


@fix_before(when=lambda manager, keys, req_context, *_, **__: hasattr(req_context, _PROMOTED))
def prepare_load(manager: Any, keys: Any, req_context: Any) -> None:
    """Forget the promotions of a request that loads. A preempted request may need new promotions."""
    vars(req_context).pop(_PROMOTED, None)


def shows_bug(hook: Any, module: Any) -> bool:
    """Promote a chunk twice for one request. With the bug, both promotions start."""
    written = stubs.Stub(keys_to_store=[b"key"], store_spec=module.CPULoadStoreSpec([0]))
    manager = stubs.Stub(
        primary_tier=stubs.Stub(prepare_write=lambda *_: written), _request_load_sources={},
        secondary_tiers=[stubs.Stub(cache_hit_source=None)], _pending_load_submissions={},
    )  # fmt: skip
    context = module.ReqContext(req_id=stubs.NAME)
    return [hook(manager, 0, b"key", context) for _ in range(2)] == [True, True]


FIX = Fix(
    OFFLOADING_TIERS._initiate_promotion(broken=">=0.32", probe=shows_bug, fix=_initiate_promotion),
    OFFLOADING_TIERS.prepare_load(broken=">=0.32", fix=prepare_load, helper=True),
    effect="hang",
    scenarios=("offload-promotions-go-round",),
)
