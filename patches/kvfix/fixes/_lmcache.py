"""Code that the fixes for in-process LMCache share."""

import sys
from collections.abc import Callable

from kvfix.fixes import _closed
from kvfix.fixes.api import Any, Fixing, Steps, View, engine_log, fix_after, fix_around, fix_before, replaced, stubs


def fetched(engine: Any, lookup_id: Any) -> list[Any]:
    """Return the memory objects that an asynchronous lookup has fetched, or [] if the fetch failed or has not ended."""
    future = _done_events(engine).get(lookup_id)
    if future is None or future.exception() is not None:
        return []
    return [_chunk(each) for of_backend in future.result() for each in of_backend]


def keep_fetched(engine: Any, lookup_id: Any, wanted: Callable[[Any], bool]) -> None:
    """Keep only the wanted memory objects in the result of an asynchronous lookup."""
    future = _done_events(engine).get(lookup_id)
    if future is not None:
        kept = [[each for each in of_backend if wanted(_chunk(each))] for of_backend in future.result()]
        _done_events(engine)[lookup_id] = View(future, result=lambda *_: kept)


def _done_events(engine: Any) -> Any:
    """Return LMCache's dictionary {lookup id: future of a finished fetch} (0.5.6 event_manager.py:62)."""
    events = sys.modules["lmcache.v1.event_manager"]
    return engine.event_manager.events[events.EventType.LOADING][events.EventStatus.DONE]


def _chunk(fetched: Any) -> Any:
    return fetched[1] if isinstance(fetched, tuple) else fetched  # LMCache after 0.3.10 fetches pairs (key, chunk)


def most_in_flight(config: Any) -> int:
    """Return how many steps can be in flight. A scheduled step is in flight until vLLM has the step's output."""
    batches: int | None = getattr(config, "max_concurrent_batches", None)  # since vLLM 0.26
    return batches or 1 + bool(config.scheduler_config.async_scheduling)


def unpin(chunk: Any) -> None:
    if chunk.is_pinned:
        chunk.unpin()


def is_layerwise(impl: Any) -> bool:
    return impl.use_layerwise and impl.lmcache_engine is not None


def is_producer(impl: Any) -> bool:
    return bool(impl.kv_role == "kv_producer")


def skip_producer_stores(is_meant: Callable[[Any], Any]) -> tuple[Fixing, Fixing]:
    """Return fixes for `wait_for_save` and `start_load_kv`. The fixes prevent stores of a kv_producer.

    The fix for `start_load_kv` prevents layerwise stores. After `start_load_kv` has loaded a request's tokens, the fix
    empties `token_ids`. A wrapper of `save_kv_layer` would be slower, because it would run once for each layer.
    is_meant: (metadata of a request) -> True if the fixes must prevent the stores of the request.
    """

    def store_nothing_of(impl: Any, *_: Any, **__: Any) -> bool:
        requests = impl._parent._get_connector_metadata().requests
        meant = [request for request in requests if request.save_spec and is_meant(request)]
        for request in meant:
            _closed.store_nothing(impl, request)
        return bool(meant)

    @fix_after(only=is_layerwise, when=lambda impl, *_, **__: is_producer(impl), on_fault=_closed.worker_saves_nothing)
    def start_load_kv(impl: Any, answer: Any, *_: Any, **__: Any) -> None:
        store_nothing_of(impl)

    return fix_before(only=is_producer, on_fault=_closed.worker_saves_nothing)(store_nothing_of), start_load_kv


def stores(hook: Any, adapter: Any, impl: dict[str, Any], **more: Any) -> bool:
    """Return True if `hook`, which is `wait_for_save`, stores a request. more: metadata of the request."""
    stored: list[Any] = []
    can_save = impl.get("kv_role") != "kv_producer"
    request = stubs.metadata(16, save_spec=stubs.Stub(skip_leading_tokens=0, can_save=can_save), **more)
    engine = stubs.Stub(lookup_unpin=lambda *_: None, store=lambda *_, **__: stored.append(1))
    hook(stubs.worker_side(adapter, request, lmcache_engine=engine, **impl))
    return bool(stored)


#: A function that adds keyword arguments to an engine call: (the call's arguments, metadata of the request) -> None.
Add = Callable[[dict[str, Any], Any], None]
#: kvfix calls a `Closed` function if the `Add` function raises. The `Closed` function changes the keyword arguments of
#: the engine call so that the engine finds and stores nothing.
Closed = Callable[[dict[str, Any]], None]


def find_load(impl: Any) -> Callable[[Any], Any]:
    """Return a function that finds a load's request in `start_load_kv`: (tokens) -> metadata of the request, or None.

    `start_load_kv` loads the step's requests in order, and passes only the first tokens of each request to the engine.
    The returned function finds each request once.
    """
    metas = impl._parent._get_connector_metadata().requests
    pending = [each for each in metas if each.load_spec is not None and each.load_spec.can_load]

    def find(tokens: Any) -> Any:
        place = next((at for at, each in enumerate(pending) if each.token_ids[: len(tokens)] == tokens), None)
        return None if place is None else pending.pop(place)

    return find


def layer_loads(add: Add, closed: Closed | None = None) -> Fixing:
    """Return a fix for `start_load_kv` that adds arguments to `retrieve_layer` (0.5.6 vllm_v1_adapter.py:842)."""

    @fix_around(only=is_layerwise, on_fault=_closed.worker_loads_fail if closed else None)
    def start_load_kv(impl: Any, *_: Any, **__: Any) -> Steps:
        return _with_request(impl.lmcache_engine, "retrieve_layer", find_load(impl), add, closed)

    return start_load_kv


def layer_saves(add: Add, closed: Closed) -> Fixing:
    """Return a fix for `save_kv_layer` that adds arguments to `store_layer`."""

    @fix_around(only=is_layerwise, on_fault=_closed.worker_saves_nothing)
    def save_kv_layer(impl: Any, *_: Any, **__: Any) -> Steps | None:
        metadata = impl._parent._connector_metadata

        def find(tokens: Any) -> Any:  # LMCache passes the request's own `token_ids` object to `store_layer`
            return next((each for each in metadata.requests if each.token_ids is tokens), None)

        return _with_request(impl.lmcache_engine, "store_layer", find, add, closed) if metadata is not None else None

    return save_kv_layer


def _with_request(engine: Any, name: str, find: Callable[[Any], Any], add: Add, closed: Closed | None) -> Steps:
    """Run the hook. Meanwhile, let `add` add keyword arguments to each call of the engine's method `name`."""
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
