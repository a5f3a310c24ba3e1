"""Loads and saves by layers, on LMCache's real adapter in the worker's role and its real cache engine.

As released the adapter does not tell the engine whose tokens it loads (0.5.6 vllm_v1_adapter.py:842), nor under which
tags it saves (:1088). With a GPU connector that moves nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import ADAPTER, ForkServer
from tests.lab.test_async_release import ENGINE

WORKER = (
    ENGINE
    + f"""
from types import SimpleNamespace
import {ADAPTER} as adapter
kind = adapter.LMCacheConnectorV1Impl
worker = kind.__new__(kind)
quiet = type("Quiet", (), {{{{"__getattr__": lambda self, name: lambda *_, **__: None}}}})()
vars(worker).update(
    kv_role="kv_both", config=config, async_loading=False, _block_size=16, _lmcache_chunk_size=16, num_layers=1,
    _stats_monitor=quiet, _invalid_block_ids=set(), device=torch.device("cpu"), use_layerwise=True,
    enable_blending=False, layerwise_retrievers=[], layerwise_storers=[], _layerwise_save_storers={{{{}}}},
    current_layer=0, kv_caches={{{{"layer": torch.zeros(1)}}}},
    _vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False)),
)
if isinstance(getattr(kind, "lmcache_engine", None), property):
    worker._manager = SimpleNamespace(lmcache_engine=engine, lookup_client=None)
else:
    worker.lmcache_engine = engine
tokens = list(range(64))
def asks(name, tag, load):
    save = adapter.SaveSpec(skip_leading_tokens=0, can_save=not load)
    spec = adapter.LoadSpec(vllm_cached_tokens=0, lmcache_cached_tokens=64, can_load=True) if load else None
    meta = adapter.ReqMeta(req_id=name, token_ids=list(tokens), slot_mapping=torch.arange(64), save_spec=save,
                           load_spec=spec, is_last_prefill=True)
    meta.request_configs = {{{{"lmcache.tag.kvfix": tag}}}} if tag else None
    return meta
def step(*requests):
    metadata = adapter.LMCacheConnectorMetadata()
    metadata.requests = list(requests)
    worker._parent = SimpleNamespace(_connector_metadata=metadata, _get_connector_metadata=lambda: metadata)
    worker.start_load_kv(SimpleNamespace(attn_metadata=object()))
    worker.wait_for_layer_load("layer")
    worker.save_kv_layer("layer", torch.zeros(1), None)
    worker.wait_for_save()
def found(name, tag):
    configs = {{{{"lmcache.tag.kvfix": tag}}}} if tag else None
    return engine.lookup(tokens, lookup_id=name, pin=True, request_configs=configs)
"""
)
TENANTS = """
step(asks("one", "a", False), asks("other", "b", False))
result = [found("again", "a"), found("another", "b"), found("stranger", "c"), found("untagged", None)]
loaded = []
load = engine.retrieve_layer
def recorded(tokens, *args, **more):
    loaded.append(more.get("request_configs"))
    return load(tokens, *args, **more)
engine.retrieve_layer = recorded
step(asks("another", "b", True), asks("again", "a", True))
result.append([configs["lmcache.tag.kvfix"] for configs in loaded if configs])
result.append(engine.retrieve_layer is recorded)
"""
PINS = """
step(asks("one", None, False))
found("r", None), found("waits", None)
step(asks("r", None, True))
cached = engine.storage_manager.local_cpu_backend.hot_cache.values()
result = [chunk.meta.pin_count for chunk in cached]
"""


@pytest.mark.parametrize("name", ["0.4.6", "0.5.6"])
@pytest.mark.parametrize(
    ("only", "found"), [("only=[]", [0, 0, 0, 64, []]), ('only=["KVF017"]', [64, 64, 0, 0, ["b", "a"]])]
)
def test_each_tenant_has_keys_of_its_own(
    only: str, found: list[Any], name: str, fork_server: ForkServer, release: Any
) -> None:
    """What two tenants store of the same prompt; then what each finds, and with which tag it loads."""
    assert fork_server((WORKER + TENANTS).format(only=only, mode="layers"), release(name)) == [*found, True]


@pytest.mark.parametrize(("only", "pins"), [("only=[]", 0), ("", 1)], ids=["released", "fixed"])
def test_a_load_leaves_the_pins_of_others(only: str, pins: int, fork_server: ForkServer, release: Any) -> None:
    """The adapter does not say which request it loads, so KVF018 has to know."""
    assert fork_server((WORKER + PINS).format(only=only, mode="layers"), release("0.5.6")) == [pins] * 4
