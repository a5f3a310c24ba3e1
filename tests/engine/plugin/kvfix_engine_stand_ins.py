"""Replace LMCache's GPU connector on a machine without a GPU. The stand-in copies whole KV blocks on the CPU.

vLLM for the CPU registers one tensor `[blocks, kv_heads, block_size, 2 * head_size]` per layer. Each head of a block
stores K of all tokens and then V of all tokens. So the chunk size must be a multiple of the block size.
"""

import os
from pathlib import Path
from typing import Any

import torch

from kvfix_tools.roundtrip import cuda_stand_in

#: While this file exists, the stand-in adds 1.0 to all loaded KV, and the test checks that the outputs change.
SPOIL = Path(os.environ.get("KVFIX_TEST_SPOIL", "/nonexistent"))


def make(interface: Any, metadata: Any) -> Any:
    """Return the stand-in. Its class implements `interface`, which is LMCache's base class of GPU connectors."""
    layers, two, _, heads, head_size = metadata.kv_shape

    class BlockCopy(interface):  # type: ignore[misc]
        def _blocks(self, start: int, end: int, **more: Any) -> tuple[list[Any], Any]:
            caches = more["kvcaches"]
            size = caches[0].shape[2]
            slots = more["slot_mapping"][start:end]
            assert start % size == 0, (start, size)
            assert len(slots) % size == 0, (start, end, size)
            return caches, slots[::size] // size

        def from_gpu(self, memory_obj: Any, start: int, end: int, **more: Any) -> None:
            caches, blocks = self._blocks(start, end, **more)
            memory_obj.tensor.view(-1).copy_(torch.stack([cache[blocks] for cache in caches]).view(-1))

        def to_gpu(self, memory_obj: Any, start: int, end: int, **more: Any) -> None:
            import kvfix_engine_test

            caches, blocks = self._blocks(start, end, **more)
            loaded = memory_obj.tensor.view(len(caches), len(blocks), *caches[0].shape[1:])
            for cache, layer in zip(caches, loaded, strict=True):
                cache[blocks] = layer + (1.0 if SPOIL.exists() else 0.0)
            kvfix_engine_test.note("load", tokens=end - start)

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **more: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(memory_obj, start, end, **more)

        def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **more: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(memory_obj, start, end, **more)

        def get_shape(self, num_tokens: int) -> torch.Size:
            return torch.Size([two, layers, num_tokens, heads * head_size])

    return BlockCopy()


def current_releases(module: Any) -> None:
    """Replace the function that makes the GPU connector in LMCache 0.4 and later. LMCache 0.3 lacks this function."""
    if hasattr(module, "CreateGPUConnector"):
        module.CreateGPUConnector = lambda config, metadata, *_, **__: make(module.GPUConnectorInterface, metadata)


def early_releases(adapter: Any) -> None:
    """Replace the function of LMCache 0.3 that makes LMCache's engine and GPU connector. The function needs a GPU."""
    if not hasattr(adapter, "_init_lmcache_engine"):
        return
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    torch.cuda.Stream = cuda_stand_in.Stream

    def init(config: Any, vllm_config: Any, role: str) -> Any:
        from lmcache.integration.vllm.utils import create_lmcache_metadata
        from lmcache.v1.gpu_connector import GPUConnectorInterface

        metadata, _ = create_lmcache_metadata(vllm_config)
        metadata.role = role
        made = make(GPUConnectorInterface, metadata) if role != "scheduler" else None
        get = adapter.LMCacheEngineBuilder.get_or_create
        return get(adapter.ENGINE_NAME, config, metadata, made, lambda tensor, src: tensor, lambda obj, src: obj)

    adapter._init_lmcache_engine = init
    impl = adapter.LMCacheConnectorV1Impl
    # vLLM 0.32 calls two functions that LMCache 0.3 lacks. LMCache 0.3 takes KV tensors from the forward context.
    impl.register_kv_caches = lambda self, kv_caches: setattr(self, "kv_caches", kv_caches)
    impl.get_kv_events = lambda self: []


def in_tree(connector: Any) -> None:
    """Replace CUDA in vLLM's own multi-process connector, which marks each step with a CUDA event."""
    if isinstance(connector.torch, cuda_stand_in.Torch):  # the parent process has replaced CUDA before the fork
        return
    connector.torch = cuda_stand_in.Torch()
    owner = connector.LMCacheMPConnectorUpstream
    register = owner.register_kv_caches

    def register_kv_caches(self: Any, kv_caches: dict[str, torch.Tensor]) -> None:
        shown = {}  # LMCache 0.4.6 expects K rows, then V rows. A view works, because LMCache moves only whole blocks
        for name, cache in kv_caches.items():
            blocks, heads, block_size, both = cache.shape
            shown[name] = cache.view(blocks, 2, heads, block_size, both // 2)
        register(self, shown)

    owner.register_kv_caches = register_kv_caches


def patient_pings(module: Any) -> None:
    """Make LMCache wait 100 s for the answer to a ping. By default LMCache continues without the server after 10 s."""
    send_ping = module.send_ping
    module.send_ping = lambda client, timeout, **more: send_ping(client, timeout=100.0, **more)
