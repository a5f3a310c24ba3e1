"""Two LoRA adapters, or two tenants kept apart by `cache_salt`, share KV: neither is part of LMCache's key.

Opt-in: it changes the keys of requests with an adapter or a salt, so that what is cached of them is not found any more.
Name it: `kvfix.apply(only=["KVF017", ...])`, or KVFIX="fix only=KVF017,...".

## Symptom
None. Wrong text with a LoRA adapter after the same prompt was asked of another one; a tenant's prompt, told by its
latency to another tenant.

## Cause
LMCache's in-process connector makes its keys of token ids, model and layout (vllm_v1_adapter.py of every release does
not name LoRA or cache_salt). vLLM's own prefix cache has both in its keys.

## Fix
A request with an adapter or a salt is looked up, stored and loaded under keys that hold a hash of the two, as a tag:
LMCache has those for `kv_transfer_params` that begin with `lmcache.tag.`. All other keys stay as they are. With
`use_layerwise` the adapter leaves the tags out where it calls the cache engine; it is told of them.

## Releases
LMCache 0.3.9 to 0.5.6, in process.

## Upstream
https://github.com/LMCache/LMCache/issues/2961, https://github.com/vllm-project/vllm/issues/44250 are open.

## Remove when
LMCache has LoRA and cache_salt in its keys.
"""

from __future__ import annotations

import copy
import hashlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import View, around
from kvfix.fix import Fix, Patch
from kvfix.fixes import _layerwise

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType

TAG = "lmcache.tag.kvfix"


def tagged(sampling_params: Any, lora_request: Any, salt: str | None) -> Any:
    """The sampling parameters with the tag among their transfer parameters; themselves where nothing is to be said."""
    if lora_request is None and not salt:
        return sampling_params
    name = (lora_request.lora_name, lora_request.lora_int_id) if lora_request is not None else None
    seen = copy.copy(sampling_params)
    extra = dict(seen.extra_args or {})
    tag = hashlib.sha256(repr((name, salt)).encode()).hexdigest()[:16]
    extra["kv_transfer_params"] = {**(extra.get("kv_transfer_params") or {}), TAG: tag}
    seen.extra_args = extra
    return seen


def correct_lookup(adapter: ModuleType) -> Callable[..., Any]:
    @around
    def get_num_new_matched_tokens(impl: Any, request: Any, num_computed_tokens: int) -> Generator[Any, Any, Any]:
        own = request.sampling_params
        seen = tagged(own, request.lora_request, getattr(request, "cache_salt", None))
        return (yield None if seen is own else (View(request, sampling_params=seen), num_computed_tokens))

    return get_num_new_matched_tokens


def correct_metadata(adapter: ModuleType) -> Callable[..., Any]:
    @around
    def build_connector_meta(impl: Any, scheduler_output: Any) -> Generator[Any, Any, Any]:
        new_requests, changed = [], False
        for new in scheduler_output.scheduled_new_reqs:
            salt = getattr(impl._unfinished_requests.get(new.req_id), "cache_salt", None)
            seen = tagged(new.sampling_params, new.lora_request, salt)
            if seen is not new.sampling_params:
                new, changed = copy.copy(new), True
                new.sampling_params = seen
            new_requests.append(new)
        if not changed:
            return (yield)
        output = copy.copy(scheduler_output)
        output.scheduled_new_reqs = new_requests
        return (yield (output,))

    return build_connector_meta


def _tell(call: dict[str, Any], request: Any) -> None:
    if request.request_configs:
        call.setdefault("request_configs", request.request_configs)


def correct_layer_loads(adapter: ModuleType) -> Callable[..., Any]:
    return _layerwise.loads(_tell)


def correct_layer_saves(adapter: ModuleType) -> Callable[..., Any]:
    return _layerwise.saves(_tell)


def lookup_shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """A request with a salt is looked up. Wrong is to ask for it without one."""
    asked: list[Any] = []

    def lookup(*_: Any, request_configs: Any = None, **__: Any) -> int:
        asked.append(request_configs)
        return 0

    client = SimpleNamespace(lookup_cache=lambda lookup_id: -1, lookup=lookup)
    hook(probe.scheduler_side(lookup_client=client), probe.request(300, lora_request=None, cache_salt="a"), 0)
    return not (asked and asked[0])


def metadata_shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """A new request with an adapter. Wrong is a tracker without a tag."""
    lora = SimpleNamespace(lora_name="a", lora_int_id=1)
    new = probe.request(300, req_id=probe.NAME, lora_request=lora, block_ids=(list(range(20)),))
    impl = probe.scheduler_side()
    hook(impl, probe.step(300, new=new))
    return not impl._request_trackers[probe.NAME].request_configs


def _layers(adapter: ModuleType, **meta: Any) -> tuple[Any, list[Any]]:
    """A worker that loads or saves one request by layers, and the configurations that its engine is handed."""
    import torch  # the adapter has imported it

    handed: list[Any] = []

    def layers(*_: Any, request_configs: Any = None, **__: Any) -> Any:
        handed.append(request_configs)
        return iter([None, None, None])

    request = SimpleNamespace(
        req_id=probe.NAME, token_ids=[0] * 16, slot_mapping=torch.arange(16), request_configs={TAG: "a"},
        load_spec=None, save_spec=None,
    )  # fmt: skip
    vars(request).update(meta)
    metadata = adapter.LMCacheConnectorMetadata()
    metadata.requests = [request]
    nothing = SimpleNamespace(
        update_interval_vllm_hit_tokens=lambda _: None, update_interval_prompt_tokens=lambda _: None
    )
    impl = SimpleNamespace(
        kv_role="kv_both", use_layerwise=True, enable_blending=False, kv_caches={"layer": None}, device="cpu",
        current_layer=0, layerwise_storers=[], _layerwise_save_storers={}, _lmcache_chunk_size=16,
        _stats_monitor=nothing,
        lmcache_engine=SimpleNamespace(retrieve_layer=layers, store_layer=layers), config=SimpleNamespace(),
        _parent=SimpleNamespace(_connector_metadata=metadata, _get_connector_metadata=lambda: metadata),
        _recent_load_errors=(),  # of patches/upstream/failed-load-poisons-cache
    )  # fmt: skip
    return impl, handed


def layer_loads_show_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """A request with a tag is loaded by layers. Wrong is to load it without."""
    impl, handed = _layers(adapter, load_spec=adapter.LoadSpec(0, 16, can_load=True))
    hook(impl, SimpleNamespace(attn_metadata=object()))
    return handed == [None]


def layer_saves_show_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """The same, saved."""
    impl, handed = _layers(adapter, save_spec=SimpleNamespace(skip_leading_tokens=0, can_save=True))
    hook(impl, "layer", None, None)
    return handed == [None]


ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"
FIX = Fix(
    __name__,
    __doc__,
    patches=tuple(
        Patch("lmcache", ADAPTER, f"LMCacheConnectorV1Impl.{function}", ">=0.3.9", shows, correct)
        for function, shows, correct in (
            ("get_num_new_matched_tokens", lookup_shows_bug, correct_lookup),
            ("build_connector_meta", metadata_shows_bug, correct_metadata),
            ("start_load_kv", layer_loads_show_bug, correct_layer_loads),
            ("save_kv_layer", layer_saves_show_bug, correct_layer_saves),
        )
    ),
    opt_in=True,
)
