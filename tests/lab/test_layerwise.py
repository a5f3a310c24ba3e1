"""Layerwise loads and saves, with LMCache's real adapter in the worker role and its real cache engine (KVF017, KVF018,
KVF026). The GPU connector copies nothing.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.conftest import ADAPTER, answers
from tests.lab.test_async_release import TOKENS, make_engine


class Worker:
    """The adapter in the worker's role over LMCache's engine."""

    def __init__(self) -> None:
        from kvfix_tools.lab.connectors.v1 import adapter_in_worker

        self.engine = make_engine("layers")
        self.module: Any = import_module(ADAPTER)
        self.adapter = adapter_in_worker(
            self.module.LMCacheConnectorV1Impl, self.engine.cache_engine, ["layer"], kv_role="kv_both",
            config=self.engine.config, async_loading=False, _block_size=16, _lmcache_chunk_size=16,
            _stats_monitor=mock.Mock(), layerwise_storers=[],
            _vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False)),
        )  # fmt: skip

    def _meta(self, name: str, tag: str, load: bool, hit: int) -> Any:
        import torch

        save = self.module.SaveSpec(skip_leading_tokens=0, can_save=not load or hit < len(TOKENS))
        spec = self.module.LoadSpec(vllm_cached_tokens=0, lmcache_cached_tokens=hit, can_load=True) if load else None
        meta = self.module.ReqMeta(
            req_id=name, token_ids=list(TOKENS), slot_mapping=torch.arange(64), save_spec=save, load_spec=spec,
            is_last_prefill=True,
        )  # fmt: skip
        meta.request_configs = {"lmcache.tag.kvfix": tag} if tag else None
        return meta

    def step(self, requests: dict[str, str], load: bool, hit: int = 64) -> None:
        """One step that loads or saves these requests, each with its tag. If not all is hit, the rest is saved."""
        import torch

        metadata = self.module.LMCacheConnectorMetadata()
        metadata.requests = [self._meta(name, tag, load, hit) for name, tag in requests.items()]
        self.adapter._parent = SimpleNamespace(_connector_metadata=metadata, _get_connector_metadata=lambda: metadata)
        self.adapter.start_load_kv(SimpleNamespace(attn_metadata=object()))
        self.adapter.wait_for_layer_load("layer")
        self.adapter.save_kv_layer("layer", torch.zeros(1), None)
        self.adapter.wait_for_save()

    def found(self, name: str, tag: str = "") -> int:
        configs = {"lmcache.tag.kvfix": tag} if tag else None
        return int(self.engine.cache_engine.lookup(TOKENS, lookup_id=name, pin=True, request_configs=configs))


@pytest.mark.parametrize("release", ["0.4.6", "0.5.6"])
@answers([0, 0, 0, 64, [], True], [64, 64, 0, 0, ["b", "a"], True], also="release", fixes=["KVF017"])
def test_each_tenant_has_keys_of_its_own() -> list[Any]:
    """Two tenants store one prompt. Return the hits of tenants, and the tag of each tenant's load."""
    worker = Worker()
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


@answers([0] * 4, [1] * 4)
def test_a_load_leaves_the_pins_of_others() -> list[int]:
    """The adapter does not say which request it loads, so KVF018 has to know. Another one waits for the same chunks."""
    worker = Worker()
    worker.step({"one": ""}, load=False)
    worker.found("r")
    worker.found("waits")
    worker.step({"r": ""}, load=True)
    return worker.engine.pins()


#: (fixes, chunks left of those that are hit, tokens of the hit, the report of the load and the chunks after it)
SHORT = [
    (False, 0, 64, ["dies", 0]), (False, 2, 64, [[], 2]), (["KVF026"], 0, 64, [[0, 1, 2, 3], 0]),
    (True, 2, 64, [[2, 3], 2]), (True, 4, 64, [[], 4]),
    # One chunk is left of two. The step computes the others on tokens that were not loaded: none of them is stored.
    (["KVF026"], 1, 32, [[1], 4]), (True, 1, 32, [[1], 1]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fixes", "left", "hit", "answer", "release"),
    [*((*each, "0.5.6") for each in SHORT), *((*each, "0.3.15") for each in SHORT if each[2] == 64)],
)
@answers(also="fixes release answer")
def test_a_load_that_comes_short(left: int, hit: int) -> tuple[Any, int]:
    """Return the report of a load whose last chunks are missing, and the cached chunks after it.

    The report is "dies" if the worker dies.
    """
    worker = Worker()
    worker.step({"one": ""}, load=False)
    cached = worker.engine.cache_engine.storage_manager.local_cpu_backend.hot_cache
    for key in list(cached)[left:]:
        del cached[key]
    try:
        worker.step({"r": ""}, load=True, hit=hit)
    except UnboundLocalError:
        return "dies", len(cached)
    return sorted(worker.adapter._invalid_block_ids), len(cached)
