"""Loads and saves by layers, on LMCache's real adapter in the worker's role and its real cache engine.

As released the adapter does not tell the engine whose tokens it loads (0.5.6 vllm_v1_adapter.py:842), nor under which
tags it saves (:1088). With a GPU connector that moves nothing.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.conftest import ADAPTER, RELEASES, Once
from tests.lab.test_async_release import make_engine

TOKENS = list(range(64))


class Worker:
    """The adapter in the worker's role over LMCache's engine."""

    def __init__(self, only: list[str] | None) -> None:
        self.engine = make_engine("layers", only)
        import torch

        self.module: Any = import_module(ADAPTER)
        kind = self.module.LMCacheConnectorV1Impl
        self.adapter = kind.__new__(kind)
        vars(self.adapter).update(
            kv_role="kv_both", config=self.engine.config, async_loading=False, _block_size=16, _lmcache_chunk_size=16,
            num_layers=1, _stats_monitor=mock.Mock(), _invalid_block_ids=set(), device=torch.device("cpu"),
            use_layerwise=True, enable_blending=False, layerwise_retrievers=[], layerwise_storers=[],
            _layerwise_save_storers={}, current_layer=0, kv_caches={"layer": torch.zeros(1)},
            _vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False)),
        )  # fmt: skip
        if isinstance(getattr(kind, "lmcache_engine", None), property):
            self.adapter._manager = SimpleNamespace(lmcache_engine=self.engine.cache_engine, lookup_client=None)
        else:
            self.adapter.lmcache_engine = self.engine.cache_engine

    def _meta(self, name: str, tag: str, load: bool) -> Any:
        import torch

        save = self.module.SaveSpec(skip_leading_tokens=0, can_save=not load)
        spec = self.module.LoadSpec(vllm_cached_tokens=0, lmcache_cached_tokens=64, can_load=True) if load else None
        meta = self.module.ReqMeta(
            req_id=name, token_ids=list(TOKENS), slot_mapping=torch.arange(64), save_spec=save, load_spec=spec,
            is_last_prefill=True,
        )  # fmt: skip
        meta.request_configs = {"lmcache.tag.kvfix": tag} if tag else None
        return meta

    def step(self, requests: dict[str, str], load: bool) -> None:
        """One step that loads or saves these requests, each with its tag."""
        import torch

        metadata = self.module.LMCacheConnectorMetadata()
        metadata.requests = [self._meta(name, tag, load) for name, tag in requests.items()]
        self.adapter._parent = SimpleNamespace(_connector_metadata=metadata, _get_connector_metadata=lambda: metadata)
        self.adapter.start_load_kv(SimpleNamespace(attn_metadata=object()))
        self.adapter.wait_for_layer_load("layer")
        self.adapter.save_kv_layer("layer", torch.zeros(1), None)
        self.adapter.wait_for_save()

    def found(self, name: str, tag: str = "") -> int:
        configs = {"lmcache.tag.kvfix": tag} if tag else None
        return int(self.engine.cache_engine.lookup(TOKENS, lookup_id=name, pin=True, request_configs=configs))


def tenants(only: list[str] | None) -> list[Any]:
    """What two tenants store of the same prompt; then what each finds, and with which tag it loads."""
    worker = Worker(only)
    worker.step({"one": "a", "other": "b"}, load=False)
    found = [worker.found(*each) for each in (("again", "a"), ("another", "b"), ("stranger", "c"), ("untagged",))]
    loaded = []
    engine = worker.engine.cache_engine
    load = engine.retrieve_layer

    def recorded(tokens: Any, *args: Any, **more: Any) -> Any:
        loaded.append(more.get("request_configs"))
        return load(tokens, *args, **more)

    engine.retrieve_layer = recorded
    worker.step({"another": "b", "again": "a"}, load=True)
    tags = [configs["lmcache.tag.kvfix"] for configs in loaded if configs]
    return [*found, tags, engine.retrieve_layer is recorded]


def pins(only: list[str] | None) -> list[int]:
    """Pins of each chunk after a load, where another request waits for the same ones."""
    worker = Worker(only)
    worker.step({"one": ""}, load=False)
    worker.found("r")
    worker.found("waits")
    worker.step({"r": ""}, load=True)
    return [chunk.meta.pin_count for chunk in worker.engine.cached()]


@pytest.mark.parametrize("name", ["0.4.6", "0.5.6"])
@pytest.mark.parametrize(("only", "found"), [([], [0, 0, 0, 64, []]), (["KVF017"], [64, 64, 0, 0, ["b", "a"]])])
def test_each_tenant_has_keys_of_its_own(only: list[str], found: list[Any], name: str, once: Once) -> None:
    assert once(tenants, RELEASES / name, only) == [*found, True]


@pytest.mark.parametrize(("only", "count"), [([], 0), (None, 1)], ids=["released", "fixed"])
def test_a_load_leaves_the_pins_of_others(only: list[str] | None, count: int, once: Once) -> None:
    """The adapter does not say which request it loads, so KVF018 has to know."""
    assert once(pins, RELEASES / "0.5.6", only) == [count] * 4
