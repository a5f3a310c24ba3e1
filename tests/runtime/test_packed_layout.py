"""KVF020 and KVF021 move the right rows for each size and memory order. tests/roundtrip runs whole connectors."""

import contextlib
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from kvfix.fixes.lmcache import kvf020_packed_layout_moved_wrong as kvf020
from kvfix.fixes.lmcache import kvf021_layerwise_takes_heads_for_tokens as kvf021
from kvfix_tools.roundtrip import cuda_stand_in
from tests.conftest import answers

LAYERS, BLOCKS, BLOCK, HEADS = 2, 5, 4, 3
SLOTS = torch.tensor([7, 0, 19, 5, 12])


def caches(width: int, dtype: torch.dtype, order: str) -> list[torch.Tensor]:
    """Return random KV [blocks, heads, tokens, 2 * width] per layer. order: axes in memory (pool: layers in blocks)."""
    size = BLOCKS * HEADS * BLOCK * 2 * width * LAYERS
    held = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    if order == "HND":
        return list(held.view(LAYERS, BLOCKS, HEADS, BLOCK, 2 * width))
    if order == "NHD":
        return list(held.view(LAYERS, BLOCKS, BLOCK, HEADS, 2 * width).transpose(2, 3))
    return list(held.view(BLOCKS, LAYERS, BLOCK, HEADS, 2 * width).transpose(2, 3).unbind(1))


def rows(caches: list[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """Return the K and V that vLLM's attention reads for these slots, as bytes [2, layers, tokens, all heads]."""
    found = torch.stack([cache[slots // BLOCK, :, slots % BLOCK] for cache in caches])
    return found.unflatten(3, (2, -1)).permute(3, 0, 1, 2, 4).flatten(3).contiguous().view(torch.uint8)


@pytest.mark.parametrize("order", ["HND", "NHD", "pool"])
@pytest.mark.parametrize(
    ("width", "dtype"), [(32, torch.bfloat16), (3, torch.bfloat16), (1, torch.uint8), (3, torch.float32)], ids=str
)
def test_each_row_goes_where_it_belongs(order: str, width: int, dtype: torch.dtype) -> None:
    engine = caches(width, dtype, order)
    held = torch.zeros(2, LAYERS, len(SLOTS), HEADS * width, dtype=dtype)
    kvf020.gather(torch, held, engine, SLOTS)
    assert torch.equal(held.view(torch.uint8), rows(engine, SLOTS))
    others, every = caches(width, dtype, order), torch.arange(BLOCKS * BLOCK)
    right = rows(others, every)
    right[:, :, [8, 9]] = held.view(torch.uint8)[:, :, 3:]
    kvf020.scatter(torch, held, others, torch.tensor([-1, 3, -1, 8, 9]), skip=2)  # slot 3 is skipped
    assert torch.equal(rows(others, every), right)


def test_the_widest_word_that_fits() -> None:
    assert kvf020._word(torch, caches(32, torch.bfloat16, "NHD"), 64) is torch.int64
    assert kvf020._word(torch, caches(3, torch.bfloat16, "NHD"), 6) is torch.int16
    assert kvf020._word(torch, caches(1, torch.uint8, "NHD"), 1) is torch.uint8


class Elsewhere:  # stands in for a tensor in host memory while the KV cache is on a GPU
    device, is_cuda = torch.device("meta"), False

    def __init__(self, held: torch.Tensor) -> None:
        self.held, self.shape, self.dtype = held, held.shape, held.dtype

    def copy_(self, staging: torch.Tensor, non_blocking: bool) -> None:
        self.held.copy_(staging)

    def to(self, device: torch.device, non_blocking: bool) -> torch.Tensor:
        return self.held.to(device, copy=True)


def test_store_and_load_through_a_staging_buffer() -> None:
    engine, stream = caches(32, torch.bfloat16, "NHD"), mock.Mock()
    tensor = torch.zeros(2, LAYERS, len(SLOTS), HEADS * 32, dtype=torch.bfloat16)
    here = SimpleNamespace(torch=cuda_stand_in.Torch())
    connector, chunk = SimpleNamespace(store_stream=stream, use_mla=False), SimpleNamespace(tensor=Elsewhere(tensor))
    more = {"kvcaches": engine, "slot_mapping": torch.cat([SLOTS, SLOTS])}
    assert kvf020.fix_store(here)(theirs)(connector, chunk, 5, 10, **more) is None
    assert torch.equal(tensor.view(torch.uint8), rows(engine, SLOTS))
    stream.synchronize.assert_called_once()
    others = caches(32, torch.bfloat16, "NHD")
    more["kvcaches"] = others
    assert kvf020.fix_load(here)(theirs)(connector, chunk, 5, 10, **more) is None
    assert torch.equal(rows(others, SLOTS), rows(engine, SLOTS))


def theirs(connector: Any, memory_obj: Any, start: int, end: int, **more: Any) -> str:
    return "LMCache's own"


@pytest.mark.parametrize(
    ("mla", "kvcaches"),
    [(False, [torch.zeros(2, 5, 4, 3, 8)]), (True, [torch.zeros(5, 4, 8)]), (False, [(SLOTS, SLOTS)])],
    ids=["split", "MLA", "K and V apart"],
)
def test_lmcache_handles_other_layouts_itself(mla: bool, kvcaches: Any) -> None:
    for fix in (kvf020.fix_store, kvf020.fix_load):
        hook = fix(SimpleNamespace(torch=torch))(theirs)
        assert hook(SimpleNamespace(use_mla=mla), None, 0, 5, kvcaches=kvcaches, slot_mapping=SLOTS) == "LMCache's own"


@answers(
    # The fix releases "wrong" and does not store "wrong". LMCache stores "right", and then releases "right".
    {"stored": ["of right"], "released": ["wrong", "right"], "retrieved": [False, False, False, True, True]},
    fixes=True,
)
def test_what_cannot_be_moved_is_not_stored_and_not_loaded() -> dict[str, Any]:
    """LMCache's own connector and storage manager get a memory object whose size does not fit the KV cache."""
    connectors = import_module("lmcache.v1.gpu_connector.gpu_connectors")
    manager = import_module("lmcache.v1.storage_backend.storage_manager").StorageManager
    connector = connectors.VLLMPagedMemGPUConnectorV2.__new__(connectors.VLLMPagedMemGPUConnectorV2)
    vars(connector).update(store_stream=mock.Mock(), use_mla=False)
    released, stored = [], []
    wrong, right = (
        SimpleNamespace(
            tensor=torch.zeros(2, LAYERS, 5, HEADS * 31, dtype=torch.bfloat16),
            ref_count_down=lambda name=name: released.append(name),
        )
        for name in ("wrong", "right")
    )
    more = {"kvcaches": caches(32, torch.bfloat16, "NHD"), "slot_mapping": SLOTS}
    connector.from_gpu(wrong, 0, 5, **more)
    backend = SimpleNamespace(batched_submit_put_task=lambda keys, _, **__: stored.extend(keys))
    backend.get_allocator_backend = lambda: backend
    storage = manager.__new__(manager)
    vars(storage).update(
        allocator_backend=backend, storage_backends={"cpu": backend}, _bypass_lock=contextlib.nullcontext(),
        _bypassed_backends=(),
    )  # fmt: skip
    storage.batched_put(["of wrong", "of right"], [wrong, right])
    connector.to_gpu(wrong, 0, 3, **more)
    engine = SimpleNamespace(gpu_connector=connector)
    retrieve = kvf020.fix_retrieve(connectors)(lambda engine, tokens: torch.ones(5, dtype=torch.bool))
    return {"stored": stored, "released": released, "retrieved": retrieve(engine, []).tolist()}


@pytest.mark.parametrize("fixed", [False, True])
@answers(True)
def test_kvf021_leaves_stored_chunks_readable(fixed: bool) -> bool:
    """KVF021 correctly loads a chunk that was stored without KVF021. The blocks have as many tokens as heads."""
    operations = import_module(kvf021.FIX.targets[-1].module)
    function = operations.single_layer_kv_transfer
    load = kvf021.fix(operations)(function) if fixed else function
    layout, ways = operations.EngineKVFormat.NL_X_TWO_NB_NH_BS_HS, operations.TransferDirection
    cache, back, held = torch.rand(2, 3, 4, 4, 8), torch.zeros(2, 3, 4, 4, 8), torch.zeros(2, 8, 32)
    function(held, cache, torch.arange(8), ways.D2H, layout)
    load(held, back, torch.arange(4, 12), ways.H2D, layout)
    return torch.equal(back[:, 1:], cache[:, :2])
