"""Shared by the fixes of LMCache's in-process worker: what a step must not store."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.fixes import stubs
from kvfix.wrapping import before


def store_nothing(impl: Any, request: Any) -> None:
    """The step stores nothing of this request. request: its metadata, of this step only.

    A kv_producer stores whatever the metadata say, by layers from its first token on (0.5.6 vllm_v1_adapter.py:1022,
    1152), but it has no tokens then.
    """
    request.save_spec.can_save = False
    if impl.kv_role == "kv_producer":
        request.save_spec.skip_leading_tokens = 0
        request.token_ids, request.slot_mapping = [], request.slot_mapping[:0]


def fix_producer(is_meant: Callable[[Any], Any]) -> Callable[..., Any]:
    """For `wait_for_save` and `save_kv_layer`: a kv_producer stores nothing of the requests that are meant.

    is_meant: (metadata of a request) -> whether it is.
    """

    def wait_for_save(impl: Any, *_: Any, **__: Any) -> None:
        for request in impl._parent._get_connector_metadata().requests:
            if request.save_spec and is_meant(request):
                store_nothing(impl, request)

    def saves(impl: Any, *layer: Any, **__: Any) -> bool:
        return impl.kv_role == "kv_producer" and bool(layer) == bool(impl.use_layerwise)

    return before(wait_for_save, when=saves)


def producer_stores(hook: Callable[..., Any], adapter: ModuleType, **more: Any) -> bool:
    """For probes: whether a kv_producer stores 16 tokens of a request that has these attributes, and no decoder."""
    import torch  # the adapter has imported it

    stored: list[Any] = []
    request = SimpleNamespace(
        req_id=stubs.NAME, token_ids=[0] * 16, slot_mapping=torch.arange(16), load_spec=None, disagg_spec=None,
        save_spec=SimpleNamespace(skip_leading_tokens=0, can_save=False), is_last_prefill=True, request_configs=None,
    )  # fmt: skip
    vars(request).update(more)
    engine = SimpleNamespace(lookup_unpin=lambda *_: None, store=lambda *_, **__: stored.append(1))
    hook(stubs.worker_side(adapter, request, lmcache_engine=engine, kv_role="kv_producer"))
    return bool(stored)
