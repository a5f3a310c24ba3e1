"""A request waits for ever if its hit is larger than OffloadingConnector's CPU memory: its chunks evict each other.

## Symptom
Nothing is logged at the default level. A request stays in WAITING, the file system tier reads the same chunks again and
again. It takes `TieringOffloadingSpec` with `secondary_tiers`, and less CPU memory than the requests that wait have
in the tier.

## Cause
A lookup that finds a chunk in a tier takes room for it in the CPU memory at once, and evicts the chunk used longest ago
(`_initiate_promotion`, tiering/manager.py 0.32.0:492). This may be one that the same request has just been promoted: a
chunk that was found is not protected before the load is granted. The lookup says "not yet" while a chunk is on its way,
so each lookup asks for the chunk that the one before has evicted.

## Fix
A chunk is promoted for a request once until it has loaded. If it is gone again by then, the lookup takes it for a miss:
the request loads what is before it and computes the rest.

## Releases
vLLM 0.32.0 and 0.33.0, the first ones played.

## Upstream
None known.

## Remove when
`TieringOffloadingManager.lookup` protects what it has found, or promotes a chunk no second time.
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
    """With the load a request has what was promoted. It may need it again after a preemption."""

    def prepare_load(manager: Any, keys: Any, req_context: Any) -> None:
        vars(req_context).pop(_PROMOTED, None)

    return before(prepare_load, when=lambda manager, keys, req_context, *_, **__: hasattr(req_context, _PROMOTED))


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A chunk is to be promoted for a request, and again. Wrong is to do it both times."""
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
