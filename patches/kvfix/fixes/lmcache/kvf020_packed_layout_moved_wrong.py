"""Every hit returns wrong text with vLLM 0.26 and later: LMCache's in-process connector moves half of each token's KV.

Symptom: LMCache logs nothing. If LMCache has loaded KV for a prompt, the output is wrong. With `use_gpu_connector_v3`
the first full chunk raises `The size of tensor a (1024) must match the size of tensor b (2048) at non-singleton
dimension 3`. To see the bug, run `kvfix roundtrip --backend lmcache --layout packed --no-fixes`.

Cause: vLLM 0.26 stores K and V of a head next to each other. A layer's cache has the shape `[blocks, heads, block size,
2 * head size]`, with any strides (0.26.0 flash_attn.py:141). LMCache's transfer operation treats this cache as a single
plane. The memory object `[2, layers, tokens, heads * head size]` has two planes, for K and V. The operation moves
only the first plane and half of each slot, because a plane is half as wide as a slot (0.5.6 gpu_connectors.py:327).

Fix: For layers of this shape, the fix copies K into the first plane of the memory object and V into the second plane.
With older vLLM, LMCache does the same. Chunks stored without the fix stay wrong, so clear the disk and remote caches.
- Releases: LMCache 0.4.3 to 0.5.6 (`use_gpu_connector_v3`: 0.5.0 to 0.5.6) with vLLM 0.26 and later. LMCache 0.4.3 to
  0.4.6 and the layerwise connector raise an error instead of wrong text. The multi-process mode is not affected.
- Upstream: https://github.com/LMCache/LMCache/issues/4463; open: https://github.com/LMCache/LMCache/pull/4467 and
  https://github.com/LMCache/LMCache/pull/4887.
- Remove when: `kvfix roundtrip --backend lmcache --layout packed packed-hnd --no-fixes` passes.
"""

from collections.abc import Iterator

from kvfix.fixes import api
from kvfix.fixes.api import Any, Fix, Steps, Wrapper, around, fix_after, fix_around, instead

#: A memory object with this attribute is not filled. On a connector, the attribute lists tokens that were not loaded.
_EMPTY = "_kvfix_empty"


def fix_store(connectors: Any) -> Wrapper:
    def from_gpu(connector: Any, memory_obj: Any, start: int, end: int, **more: Any) -> Any:
        parts = _parts(connector, memory_obj, more)
        if not parts:
            return None
        _store(connectors.torch, connector, parts, more["slot_mapping"][start:end])
        return instead(None)

    return around(from_gpu, on_fault=_not_stored)


def fix_load(connectors: Any) -> Wrapper:
    def to_gpu(connector: Any, memory_obj: Any, start: int, end: int, **more: Any) -> Any:
        parts = _parts(connector, memory_obj, more)
        if not parts:
            return None
        skip = min(end - start, max(0, more.get("vllm_cached_tokens", 0) - start))
        for tensor, held in parts:
            moved = tensor.to(held[0].device, non_blocking=True)
            scatter(connectors.torch, moved, held, more["slot_mapping"][start:end], skip)
        return instead(None)

    return around(to_gpu, on_fault=_not_loaded)


def _not_stored(connector: Any, memory_obj: Any, *_: Any, **__: Any) -> None:
    setattr(memory_obj, _EMPTY, True)


def _not_loaded(connector: Any, memory_obj: Any, start: int, end: int, *_: Any, **__: Any) -> None:
    """Note these tokens as not loaded. `fix_retrieve` then makes LMCache report their blocks as failed."""
    vars(connector).setdefault(_EMPTY, []).append((start, end))


def _is_empty(memory_obj: Any) -> bool:
    return _EMPTY in getattr(memory_obj, "__dict__", ())


def _put_nothing(manager: Any, keys: Any, memory_objs: Any, *_: Any, **__: Any) -> None:
    for each in memory_objs:
        each.ref_count_down()


@fix_around(when=lambda manager, keys, memory_objs, *_, **__: any(map(_is_empty, memory_objs)), on_fault=_put_nothing)
def fix_put(manager: Any, keys: Any, memory_objs: Any, *more: Any, **named: Any) -> Steps:
    for each in filter(_is_empty, memory_objs):
        each.ref_count_down()
    filled = [(key, each) for key, each in zip(keys, memory_objs, strict=True) if not _is_empty(each)]
    return (yield ([key for key, _ in filled], [each for _, each in filled], *more))


@fix_after(
    when=lambda engine, *_, **__: _EMPTY in getattr(engine.gpu_connector, "__dict__", ()),
    on_fault=lambda engine, mask, *_, **__: mask & False,
)
def fix_retrieve(engine: Any, mask: Any, *_: Any, **__: Any) -> None:
    for start, end in vars(engine.gpu_connector).pop(_EMPTY):
        mask[start:end] = False


def _parts(connector: Any, memory_obj: Any, more: Any) -> list[tuple[Any, list[Any]]]:
    """Return pairs (tensor of the memory object, caches of its layers). Return [] if LMCache's own code must run."""
    caches = more.get("kvcaches")
    if not caches or connector.use_mla or getattr(caches[0], "ndim", 0) != 4:  # only the packed layout has four axes
        return []
    if not hasattr(connector, "_initialize_kv_cache_pointers"):
        return [(memory_obj.tensor, caches)]
    try:
        connector.initialize_kvcaches_ptr(**more)
        connector._initialize_kv_cache_pointers()
    except Exception:  # noqa: BLE001 - V3 rejects this layout, and LMCache's own code raises this error again
        return []
    groups = connector.metadata.kv_layer_groups_manager.kernel_groups
    return [
        (memory_obj.get_tensor(number), [caches[layer] for layer in group.layer_indices])
        for number, group in enumerate(groups)
    ]


def _store(torch: Any, connector: Any, parts: Any, slots: Any) -> None:
    with torch.cuda.stream(connector.store_stream):
        for tensor, caches in parts:
            if tensor.device == caches[0].device:
                gather(torch, tensor, caches, slots)
            else:
                staging = torch.empty(tensor.shape, dtype=tensor.dtype, device=caches[0].device)
                gather(torch, staging, caches, slots)
                tensor.copy_(staging, non_blocking=True)
    if not all(tensor.is_cuda for tensor, _ in parts):
        connector.store_stream.synchronize()


def gather(torch: Any, tensor: Any, caches: Any, slots: Any) -> None:
    """Copy the KV from `slots` [tokens] into `tensor` [2, layers, tokens, heads * head size]."""
    slots = slots.to(caches[0].device).clamp(min=0)  # a token without a slot has slot -1, and its KV is never used
    for held, cache, block in _layers(torch, tensor, caches):
        held.copy_(cache[slots // block, slots % block])


def scatter(torch: Any, tensor: Any, caches: Any, slots: Any, skip: int) -> None:
    """Copy the KV from `tensor` into `slots`, except for the first `skip` tokens. `scatter` reverses `gather`."""
    slots = slots.to(caches[0].device)
    wanted = slots >= 0
    wanted[:skip] = False
    kept = wanted.nonzero()[:, 0]
    slots = slots[kept]
    for held, cache, block in _layers(torch, tensor, caches):
        cache[slots // block, slots % block] = held[kept]


def _layers(torch: Any, tensor: Any, caches: Any) -> Iterator[tuple[Any, Any, int]]:
    """Yield (KV [tokens, 2, heads, words], cache [blocks, slots, 2, heads, words], slots of a block) of each layer."""
    heads, block, width = caches[0].shape[1:]
    word = _word(torch, [*caches, tensor], width * caches[0].element_size() // 2)
    held = tensor.view(2, len(caches), -1, tensor.shape[3] * tensor.shape[0] // 2).view(word)
    held = held.unflatten(3, (heads, -1)).permute(1, 2, 0, 3, 4)
    for layer, cache in enumerate(caches):
        paged = cache.view(word).unflatten(3, (2, -1)).permute(0, 2, 3, 1, 4)
        if held.shape[2:] != paged.shape[2:]:
            raise ValueError(f"memory object of {tuple(tensor.shape)} for a KV cache of {tuple(cache.shape)}")
        yield held[layer], paged, block


def _word(torch: Any, tensors: Any, row: int) -> Any:
    """Return the widest integer dtype whose size divides `row`, all strides and all offsets (in bytes)."""
    places = {row}
    for tensor in tensors:
        size = tensor.element_size()
        places.update(step * size for step in (*tensor.stride()[:-1], tensor.storage_offset()))
    for word in (torch.int64, torch.int32, torch.int16):
        if not any(place % word.itemsize for place in places):
            return word
    return torch.uint8


FIX = Fix(
    api.GPU_CONNECTOR_V2.from_gpu(broken=">=0.4.3", fix=fix_store),
    api.GPU_CONNECTOR_V2.to_gpu(broken=">=0.4.3", fix=fix_load),
    api.GPU_CONNECTOR_V3.from_gpu(broken=">=0.5.0", fix=fix_store),
    api.GPU_CONNECTOR_V3.to_gpu(broken=">=0.5.0", fix=fix_load),
    api.STORAGE_MANAGER.batched_put(broken=">=0.4.3", fix=fix_put, helper=True),
    api.CACHE_ENGINE.retrieve(broken=">=0.4.3", fix=fix_retrieve, order=4, helper=True),
    effect="wrong output",
    no_patch={
        "lmcache": "https://github.com/LMCache/LMCache/pull/4467 and https://github.com/LMCache/LMCache/pull/4887"
        " are open; pull request 4887 also fixes the compiled operations, which cannot be tested without a GPU"
    },
    proof="tests/runtime/test_packed_layout.py, on LMCache's own kernels, because the lab moves hashes, not tensors",
)
