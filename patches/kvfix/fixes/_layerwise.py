"""Loads and saves by layers: for which request LMCache's adapter calls its cache engine, which it does not say itself.

(0.5.6 vllm_v1_adapter.py:842; :1088 says the id, to 0.3.14 it did not.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix import notice
from kvfix.correction import around, replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from kvfix.correction import Correction

_LAYERWISE = "impl.use_layerwise and impl.lmcache_engine is not None"


def loads(tell: Callable[[dict[str, Any], Any], None]) -> Correction:
    """For `start_load_kv`, which loads the requests of a step in their order, and slices their tokens.

    tell: (arguments by name of the call, metadata of the request) adds to the first what it knows of the second.
    """

    def start_load_kv(impl: Any, *_: Any, **__: Any) -> Generator[None, Any, Any]:
        metas = impl._parent._get_connector_metadata().requests
        pending = [each for each in metas if each.load_spec is not None and each.load_spec.can_load]

        def find(tokens: Any) -> Any:
            place = next((at for at, each in enumerate(pending) if each.token_ids[: len(tokens)] == tokens), None)
            return None if place is None else pending.pop(place)

        return _told(impl.lmcache_engine, "retrieve_layer", find, tell)

    return around(start_load_kv, when=_LAYERWISE)


def saves(tell: Callable[[dict[str, Any], Any], None]) -> Correction:
    """For `save_kv_layer`, which hands over the very list of tokens."""

    def save_kv_layer(impl: Any, *_: Any, **__: Any) -> Generator[None, Any, Any] | None:
        metadata = impl._parent._connector_metadata

        def find(tokens: Any) -> Any:
            return next((each for each in metadata.requests if each.token_ids is tokens), None)

        return _told(impl.lmcache_engine, "store_layer", find, tell) if metadata is not None else None

    return around(save_kv_layer, when=_LAYERWISE)


def _told(
    engine: Any, name: str, find: Callable[[Any], Any], tell: Callable[[dict[str, Any], Any], None]
) -> Generator[None, Any, Any]:
    """While the hook runs, the engine is told for whom it is called."""
    call = getattr(engine, name)

    def add(more: dict[str, Any], tokens: Any) -> None:
        request = find(tokens)
        if request is not None:
            tell(more, request)

    def told(tokens: Any, *args: Any, **more: Any) -> Any:
        notice.guarded(f"{__name__}.{name}", add, more, tokens)
        return call(tokens, *args, **more)

    with replaced(engine, **{name: told}):
        return (yield)
