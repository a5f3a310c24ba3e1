"""A request waits for ever if its hit is larger than OffloadingConnector's CPU memory: its chunks evict each other.

## Symptom
Nothing is logged at the default level. A request stays in WAITING, and the file system tier reads the same chunks again
and again. This needs `TieringOffloadingSpec` with `secondary_tiers`, and less CPU memory than the chunks of the waiting
requests need.

## Cause
A lookup that finds a chunk in a tier allocates CPU memory for it at once, and evicts the least recently used chunk
(`_initiate_promotion`, tiering/manager.py 0.32.0:492). The evicted chunk may be one that was just promoted for the same
request, because a found chunk is not protected before the load is granted. The lookup answers "not yet" while a chunk
is being promoted. So each lookup asks for the chunk that the previous lookup has evicted.

## Fix
Until a request has loaded, the fix promotes each chunk only once for this request. If the chunk has been evicted before
the load, the lookup counts the chunk as a miss. The request loads the earlier chunks and computes the rest.

## Releases
vLLM 0.32.0 and 0.33.0. Earlier releases were not tested.

## Upstream
None known.

## Remove when
`TieringOffloadingManager.lookup` protects found chunks, or promotes no chunk a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import OFFLOADING_TIERS
from kvfix.wrapping import around, before, instead

#: Of a request's context: keys that were promoted for it since its last load.
_PROMOTED = "_kvfix_promoted"


def fix(module: ModuleType) -> Callable[..., Any]:
    def _initiate_promotion(
        manager: Any, tier_idx: int, key: Any, req_context: Any
    ) -> Generator[None, Any, Any] | None:
        promoted = vars(req_context).setdefault(_PROMOTED, set())
        if key in promoted:
            return instead(False)
        promoted.add(key)
        return None

    return around(_initiate_promotion)


def fix_load(module: ModuleType) -> Callable[..., Any]:
    """Forget the promotions of a request that loads. It may need them again after a preemption."""

    def prepare_load(manager: Any, keys: Any, req_context: Any) -> None:
        vars(req_context).pop(_PROMOTED, None)

    return before(prepare_load, when=lambda manager, keys, req_context, *_, **__: hasattr(req_context, _PROMOTED))


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A chunk is promoted twice for one request. Wrong is to do it both times."""
    written = SimpleNamespace(keys_to_store=[b"key"], store_spec=module.CPULoadStoreSpec([0]))
    manager = SimpleNamespace(
        primary_tier=SimpleNamespace(prepare_write=lambda *_: written), _request_load_sources={},
        secondary_tiers=[SimpleNamespace(cache_hit_source=None)], _pending_load_submissions={},
    )  # fmt: skip
    context = module.ReqContext(req_id=stubs.NAME)
    return [hook(manager, 0, b"key", context) for _ in range(2)] == [True, True]


FIX = Fix(
    __name__,
    __doc__,
    effect="hang",
    targets=(
        OFFLOADING_TIERS._initiate_promotion(broken=">=0.32", probe=shows_bug, fix=fix),
        OFFLOADING_TIERS.prepare_load(broken=">=0.32", probe=stubs.cannot_tell, fix=fix_load, helper=True),
    ),
    scenarios=("offload-promotions-go-round",),
)
