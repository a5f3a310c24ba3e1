"""Code that the fixes of LMCache's in-process worker share. It prevents stores that a step must not make."""

from collections.abc import Callable
from typing import Any

from kvfix.fixes import _closed
from kvfix.fixes.api import Fixing, fix_after, fix_before, stubs


def store_nothing(impl: Any, request: Any) -> None:
    """Store nothing for this request in this step. request: its metadata.

    A kv_producer ignores `can_save` and, with layerwise stores, starts at the first token (0.5.6
    vllm_v1_adapter.py:1022, 1152). So this function removes the request's tokens.
    """
    request.save_spec.can_save = False
    if impl.kv_role == "kv_producer":
        request.save_spec.skip_leading_tokens = 0
        request.token_ids, request.slot_mapping = [], request.slot_mapping[:0]


def fix_producer(is_meant: Callable[[Any], Any]) -> Fixing:
    """For `wait_for_save`: a kv_producer stores nothing for the requests for which `is_meant` is true.

    is_meant: (metadata of a request) -> True if the request must not be stored.
    """
    is_producer = fix_before(
        when=lambda impl, *_, **__: impl.kv_role == "kv_producer", on_fault=_closed.worker_saves_nothing
    )
    return is_producer(_store_nothing_of(is_meant))


def fix_producer_layers(is_meant: Callable[[Any], Any]) -> Fixing:
    """For `start_load_kv`: the same as `fix_producer` for layerwise stores.

    The loads need the tokens of the request. This wrapper removes the tokens after the loads have read them. A wrapper
    of `save_kv_layer` would run once for each layer.
    """
    store_nothing_of = _store_nothing_of(is_meant)

    @fix_after(
        when=lambda impl, *_, **__: impl.use_layerwise and impl.kv_role == "kv_producer",
        on_fault=_closed.worker_saves_nothing,
    )
    def start_load_kv(impl: Any, answer: Any, *_: Any, **__: Any) -> Any:
        store_nothing_of(impl)
        return answer

    return start_load_kv


def _store_nothing_of(is_meant: Callable[[Any], Any]) -> Callable[..., bool]:
    def store_nothing_of(impl: Any, *_: Any, **__: Any) -> bool:
        requests = impl._parent._get_connector_metadata().requests
        meant = [request for request in requests if request.save_spec and is_meant(request)]
        for request in meant:
            store_nothing(impl, request)
        return bool(meant)

    return store_nothing_of


def stores(hook: Any, adapter: Any, impl: dict[str, Any], **more: Any) -> bool:
    """For probes of `wait_for_save`: return True if a worker stores a request in block 3.

    impl: attributes of the adapter. more: attributes of the request's metadata.
    """
    stored: list[Any] = []
    can_save = impl.get("kv_role") != "kv_producer"
    request = stubs.metadata(16, save_spec=stubs.Stub(skip_leading_tokens=0, can_save=can_save), **more)
    engine = stubs.Stub(lookup_unpin=lambda *_: None, store=lambda *_, **__: stored.append(1))
    hook(stubs.worker_side(adapter, request, lmcache_engine=engine, **impl))
    return bool(stored)
