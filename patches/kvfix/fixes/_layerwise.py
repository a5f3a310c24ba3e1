"""Add arguments that LMCache's adapter does not pass to its cache engine, in layerwise loads and saves.

(vllm_v1_adapter.py 0.5.6:842. Line 1088 passes the request id; releases up to 0.3.14 do not.)
"""

from collections.abc import Callable
from typing import Any

from kvfix.fixes import _closed
from kvfix.fixes.api import Fixing, Steps, engine_log, fix_around, replaced

#: (keyword arguments of the call, metadata of the request). It adds keyword arguments.
Add = Callable[[dict[str, Any], Any], None]
#: (keyword arguments of the call). It is called if `Add` raises, and makes the call find and store nothing.
Closed = Callable[[dict[str, Any]], None]


def is_used(impl: Any, *_: Any, **__: Any) -> bool:
    return impl.use_layerwise and impl.lmcache_engine is not None


def find_load(impl: Any) -> Callable[[Any], Any]:
    """Return a function for `start_load_kv`: tokens of a load -> metadata of its request, or None.

    `start_load_kv` loads the requests of a step in order and slices their tokens. Each request is returned once.
    """
    metas = impl._parent._get_connector_metadata().requests
    pending = [each for each in metas if each.load_spec is not None and each.load_spec.can_load]

    def find(tokens: Any) -> Any:
        place = next((at for at, each in enumerate(pending) if each.token_ids[: len(tokens)] == tokens), None)
        return None if place is None else pending.pop(place)

    return find


def loads(add: Add, closed: Closed | None = None) -> Fixing:
    """For `start_load_kv`."""

    @fix_around(when=is_used, on_fault=_closed.worker_loads_fail if closed else None)
    def start_load_kv(impl: Any, *_: Any, **__: Any) -> Steps:
        return _with_request(impl.lmcache_engine, "retrieve_layer", find_load(impl), add, closed)

    return start_load_kv


def saves(add: Add, closed: Closed | None = None) -> Fixing:
    """For `save_kv_layer`, which passes the request's own list of tokens."""

    @fix_around(when=is_used, on_fault=_closed.worker_saves_nothing if closed else None)
    def save_kv_layer(impl: Any, *_: Any, **__: Any) -> Steps | None:
        metadata = impl._parent._connector_metadata

        def find(tokens: Any) -> Any:
            return next((each for each in metadata.requests if each.token_ids is tokens), None)

        return _with_request(impl.lmcache_engine, "store_layer", find, add, closed) if metadata is not None else None

    return save_kv_layer


def _with_request(engine: Any, name: str, find: Callable[[Any], Any], add: Add, closed: Closed | None) -> Steps:
    """While the hook runs, let `add` add arguments to the calls of the engine's function."""
    call = getattr(engine, name)

    def add_arguments(more: dict[str, Any], tokens: Any) -> bool:
        request = find(tokens)
        if request is not None:
            add(more, request)
        return True

    def with_request(tokens: Any, *args: Any, **more: Any) -> Any:
        if not engine_log.guarded(f"{__name__}.{name}", add_arguments, more, tokens) and closed is not None:
            closed(more)
        return call(tokens, *args, **more)

    with replaced(engine, **{name: with_request}):
        return (yield)
