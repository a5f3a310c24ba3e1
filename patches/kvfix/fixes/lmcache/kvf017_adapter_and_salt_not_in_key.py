"""Requests with different LoRA adapters or a different `cache_salt` share KV: LMCache's key has neither.

Symptom: Nothing is logged. A request with a LoRA adapter returns wrong text if another adapter was used with the same
prompt before. From the latency of a request, a tenant can detect that another tenant has sent the same prompt.

Cause: LMCache's in-process connector builds its keys from token ids, model and layout. No release of vllm_v1_adapter.py
mentions LoRA or cache_salt. vLLM's own prefix cache has adapter and salt in its keys.

Fix: If a request has a LoRA adapter or a salt, the fix gives the request a tag: a hash of adapter and salt. LMCache
adds each entry of `kv_transfer_params` whose name begins with `lmcache.tag.` to the request's keys. With
`use_layerwise`, LMCache does not pass tags to the cache engine, so the fix passes the tags.

Mixed roll-out: Use the fix in all engines that share a cache, or in none of them. For requests with an adapter or a
salt, engines with and without the fix do not find each other's chunks. An engine without the fix still shares KV
between adapters. After you add or remove the fix, requests with an adapter or a salt hit only chunks
that were stored after the change. Requests without adapter and salt keep their keys.
- Upstream: https://github.com/LMCache/LMCache/issues/2961, https://github.com/vllm-project/vllm/issues/44250 are open.
- Remove when: LMCache has LoRA and cache_salt in its keys.
"""

import copy
import hashlib

from kvfix.fixes import _closed, _lmcache
from kvfix.fixes.api import GO_ON, LMCACHE_V1, NEW_REQUESTS, Any, Fix, Steps, View, fix_around, stubs
from kvfix.session import session

TAG = "lmcache.tag.kvfix"


def tagged(sampling_params: Any, lora_request: Any, salt: str | None) -> Any:
    """Return a copy of the sampling parameters with the tag. Without adapter and salt, return the original."""
    if lora_request is None and not salt:
        return sampling_params
    name = (lora_request.lora_name, lora_request.lora_int_id) if lora_request is not None else None
    copied = copy.copy(sampling_params)
    extra = dict(copied.extra_args or {})
    tag = hashlib.sha256(repr((name, salt)).encode()).hexdigest()[:16]
    extra["kv_transfer_params"] = {**(extra.get("kv_transfer_params") or {}), TAG: tag}
    copied.extra_args = extra
    return copied


@fix_around(on_fault=_closed.no_hit)
def fix_lookup(impl: Any, request: Any, num_computed_tokens: int) -> Steps:
    own = request.sampling_params
    if request.request_id in session.before:
        return (yield)
    with_tag = tagged(own, request.lora_request, getattr(request, "cache_salt", None))
    return (yield None if with_tag is own else (View(request, sampling_params=with_tag), num_computed_tokens))


def _found_by_none(impl: Any, scheduler_output: Any, *_: Any, **__: Any) -> Any:
    """Give each new request a unique tag. So the request finds no chunks, and no other request finds its chunks."""
    for new in scheduler_output.scheduled_new_reqs:
        new.sampling_params = copy.copy(new.sampling_params)
        own_tag = {"kv_transfer_params": {TAG: f"error-{new.req_id}"}}
        new.sampling_params.extra_args = {**(new.sampling_params.extra_args or {}), **own_tag}
    return GO_ON


@fix_around(on_fault=_found_by_none)
def fix_metadata(impl: Any, scheduler_output: Any) -> Steps:
    new_requests, changed = [], False
    for new in scheduler_output.scheduled_new_reqs:
        salt = getattr(impl._unfinished_requests.get(new.req_id), "cache_salt", None)
        with_tag = tagged(new.sampling_params, new.lora_request, salt)
        if with_tag is not new.sampling_params and new.req_id not in session.before:
            new, changed = copy.copy(new), True
            new.sampling_params = with_tag
        new_requests.append(new)
    if not changed:
        return (yield)
    output = copy.copy(scheduler_output)
    output.scheduled_new_reqs = new_requests
    return (yield (output,))


def _layers_found_by_none(call: dict[str, Any]) -> None:
    call["request_configs"] = {TAG: f"error-{id(call)}"}


def _add_request_configs(call: dict[str, Any], request: Any) -> None:
    if request.request_configs:
        call.setdefault("request_configs", request.request_configs)


fix_layer_loads = _lmcache.layer_loads(_add_request_configs, _layers_found_by_none)
fix_layer_saves = _lmcache.layer_saves(_add_request_configs, _layers_found_by_none)


def lookup_shows_bug(hook: Any, adapter: Any) -> bool:
    """Look up a request with a salt. With the bug, the lookup has no request_configs."""
    client = stubs.Stub(lookup_cache=lambda lookup_id: -1, lookup=stubs.Calls(0))
    hook(stubs.scheduler_side(lookup_client=client), stubs.request(300, lora_request=None, cache_salt="a"), 0)
    return not (client.lookup and client.lookup[0][1].get("request_configs"))


def metadata_shows_bug(hook: Any, adapter: Any) -> bool:
    """Schedule a new request with an adapter. With the bug, the tracker of the request has no tag."""
    lora = stubs.Stub(lora_name="a", lora_int_id=1)
    new = stubs.request(300, req_id=stubs.NAME, lora_request=lora, block_ids=(list(range(20)),))
    impl = stubs.scheduler_side()
    hook(impl, stubs.step(300, new=new))
    return not impl._request_trackers[stubs.NAME].request_configs


def _layers(adapter: Any, **meta: Any) -> tuple[Any, list[Any]]:
    """Return a worker that loads or saves one request layer by layer, and the calls to the worker's cache engine."""
    calls = stubs.Calls(iter([None, None, None]))
    engine = stubs.Stub(retrieve_layer=calls, store_layer=calls)
    request = stubs.metadata(16, request_configs={TAG: "a"}, **meta)
    return stubs.worker_side(adapter, request, use_layerwise=True, lmcache_engine=engine), calls


def layer_loads_show_bug(hook: Any, adapter: Any) -> bool:
    """Load layer by layer for a request with a tag. With the bug, the load has no tag."""
    impl, calls = _layers(adapter, load_spec=adapter.LoadSpec(0, 16, can_load=True))
    hook(impl, stubs.Stub(attn_metadata=object()))
    return len(calls) == 1 and not calls[0][1].get("request_configs")


def layer_saves_show_bug(hook: Any, adapter: Any) -> bool:
    """Save layer by layer for a request with a tag. With the bug, the save has no tag."""
    impl, calls = _layers(adapter, save_spec=stubs.Stub(skip_leading_tokens=0, can_save=True))
    hook(impl, "layer", None, None)
    return len(calls) == 1 and not calls[0][1].get("request_configs")


FIX = Fix(
    LMCACHE_V1.get_num_new_matched_tokens(broken=">=0.3.9", probe=lookup_shows_bug, fix=fix_lookup, order=5),
    LMCACHE_V1.build_connector_meta(broken=">=0.3.9", probe=metadata_shows_bug, fix=fix_metadata, order=6),
    LMCACHE_V1.start_load_kv(broken=">=0.3.9", probe=layer_loads_show_bug, fix=fix_layer_loads, order=1),
    LMCACHE_V1.save_kv_layer(broken=">=0.3.9", probe=layer_saves_show_bug, fix=fix_layer_saves),
    effect="wrong output",
    scenarios=("cache-salt-not-in-key", "lora-not-in-key"),
    opt_in=True,
    attaches=NEW_REQUESTS,  # a request whose lookup had no tag must load without the tag
)
