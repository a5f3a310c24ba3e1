"""Copy KV with the compiled operations or the torch fallback of the installed LMCache (docs/roundtrip.md).

- `lmcache-engine`: kvfix cannot see the host memory, and checks only the loaded KV and the number of loaded tokens.
- `lmcache-mp`: LMCache issue 4463 (wrong KV) does not affect this backend, so packed layouts must pass.
"""

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
from collections import deque
from typing import Any

import torch

from kvfix_tools.roundtrip import cuda_stand_in
from kvfix_tools.roundtrip.backends import Backend
from kvfix_tools.roundtrip.backends.torch_copy import layers
from kvfix_tools.roundtrip.backends.vllm_offload import block_ids
from kvfix_tools.roundtrip.cell_check import CellCheck, Refused, Transfer
from kvfix_tools.roundtrip.layout import Geometry
from kvfix_tools.roundtrip.region import Region

#: Axes of the memory objects, outermost first. KV_2LTD has all layers, KV_T2D has one (0.5.6 memory_management.py).
#: If the engine packs K and V in one axis, `lmcache-mp` packs K and V too (0.5.6 torch_ops/mp_mem_kernels.py:285).
AXES = {
    **dict.fromkeys(("v2", "v3", "split"), "kv layer token head"),
    "layerwise": "token kv head",
    "fused": "layer token head kv",
}
CLASSES = {
    "v2": "VLLMPagedMemGPUConnectorV2",
    "v3": "VLLMPagedMemGPUConnectorV3",
    "layerwise": "VLLMPagedMemLayerwiseGPUConnector",
}
#: Layouts that vLLM passes to in-process connectors and for which LMCache has a format (0.5.6 kv_format/specs).
LAYOUTS = ("nhd", "nhd-block-first", "hnd", "hnd-block-first", "packed", "packed-hnd", "packed-pool", "mla")
#: vLLM passes a view whose axes may have another order than in memory. The view is NHD before vLLM 0.26
#: (0.20.2 flash_attn.py:138), and HND since 0.26 (0.26.0 flash_attn.py:131).
VIEWS = {
    **dict.fromkeys(("hnd", "hnd-block-first"), (0, 1, 3, 2, 4)),
    **dict.fromkeys(("packed", "packed-pool"), (0, 2, 1, 3)),
}
#: Layouts that vLLM reports to LMCache as HND (LMCache 0.5.6 integration/vllm/utils.py:43).
HND = ("hnd", "hnd-block-first", "packed-hnd", "packed-cpu")
NUMBERS = itertools.count()


def missing(device: torch.device) -> str | None:
    return None if importlib.util.find_spec("lmcache") else "LMCache is not installed"


class Connector(Transfer):
    """A transfer by a GPU connector of LMCache. The memory objects are views of the host region."""

    def __init__(self, kind: str, check: CellCheck, buffer: bool = True) -> None:
        """buffer: True to copy chunks through a buffer on the device, which is the engine's default."""
        geometry, self.caches = as_vllm(check)
        self.connector, _ = make(CLASSES[kind], geometry, check, buffer)
        self.kind, self.count, self.chunk = kind, check.cell.count, int(check.cell.chunk)
        if kind == "layerwise" and check.cell.skipped:
            raise Refused("the layerwise connector loads whole chunks")
        self.host: Region = check.host(AXES[kind])
        self.objects = memory_objects(self.host, geometry, kind)
        self.by_layer = [self.objects[layer :: geometry.layers] for layer in range(geometry.layers)]
        self.starts = list(range(0, self.count, self.chunk))
        self.ends = [min(start + self.chunk, self.count) for start in self.starts]
        moved_by = "single_layer_kv_transfer" if kind == "layerwise" else "multi_layer_kv_transfer"
        self.operations = operations(check.device, moved_by)

    def store(self, slots: torch.Tensor) -> None:
        to = {"kvcaches": self.caches, "slot_mapping": slots}
        if self.kind == "layerwise":
            deque(self.connector.batched_from_gpu(self.by_layer, self.starts, self.ends, sync=True, **to), maxlen=0)
        else:
            self.connector.batched_from_gpu(self.objects, self.starts, self.ends, **to)

    def load(self, slots: torch.Tensor, skip: int) -> None:
        to = {"kvcaches": self.caches, "slot_mapping": slots}
        if self.kind == "layerwise":
            mover = self.connector.batched_to_gpu(self.starts, self.ends, sync=True, **to)
            next(mover)
            for objects in self.by_layer:
                mover.send(objects)
            deque(mover, maxlen=0)
            return
        # A load begins at the chunk with the first token that the engine does not have (0.5.6 vllm_v1_adapter.py).
        chunks = slice(skip // self.chunk, None)
        wanted = self.objects[chunks], self.starts[chunks], self.ends[chunks]
        self.connector.batched_to_gpu(*wanted, vllm_cached_tokens=skip, **to)


class ThroughEngine(Transfer):
    def __init__(self, check: CellCheck) -> None:
        (geometry, self.caches), cell = as_vllm(check), check.cell
        connector, metadata = make(CLASSES["v2"], geometry, check)
        from lmcache.v1.cache_engine import LMCacheEngine
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.token_database import ChunkedTokenDatabase

        self.chunk, name = int(cell.chunk), f"kvfix-{next(NUMBERS)}"
        self.count, self.tokens = cell.count, list[int]()
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=self.chunk, local_cpu=True, save_unfull_chunk=True,
            max_local_cpu_size=2 * check.result.moved / (1 << 30) + 0.02,  # GiB, with space for alignment
            lmcache_instance_id=name,
        )  # fmt: skip
        keys = ChunkedTokenDatabase(config, metadata)
        # A new cache engine runs gc.collect(). Without freeze(), collect() would scan vLLM's objects for over a second.
        gc.freeze()
        self.engine = LMCacheEngine(config, metadata, keys, connector, lambda tensor, _: tensor, lambda thing, _: thing)
        gc.unfreeze()
        self.engine.post_init()
        self.operations = f"{operations(check.device, 'multi_layer_kv_transfer')}; V2, cache engine, LocalCPUBackend"

    def store(self, slots: torch.Tensor) -> None:
        first = next(NUMBERS) * self.count  # new tokens, because LMCache does not store a chunk twice
        self.tokens = list(range(first, first + self.count))
        everything = torch.ones(len(self.tokens), dtype=torch.bool)
        self.engine.store(self.tokens, mask=everything, offset=0, **self._more(slots))

    def load(self, slots: torch.Tensor, skip: int) -> None:
        wanted = torch.ones(len(self.tokens), dtype=torch.bool)
        wanted[: skip // self.chunk * self.chunk] = False
        found = self.engine.retrieve(self.tokens, wanted, vllm_cached_tokens=skip, **self._more(slots))
        if int(found.sum()) != int(wanted.sum()):
            raise RuntimeError(f"retrieved {int(found.sum())} of {int(wanted.sum())} tokens")

    def close(self) -> None:
        self.engine.close()

    def _more(self, slots: torch.Tensor) -> dict[str, Any]:
        return {"kvcaches": self.caches, "slot_mapping": slots, "req_id": "kvfix"}


class BlockTransfer(Transfer):
    def __init__(self, check: CellCheck) -> None:
        connectors(check.device.type)
        try:
            from lmcache.v1.multiprocess.transfer_context import base
        except ImportError as error:
            raise Refused("the multi-process mode of this LMCache has another interface") from error
        (geometry, layers), chunk = as_vllm(check), int(check.cell.chunk)
        self.block, self.per_chunk = geometry.block, chunk // geometry.block
        if chunk % geometry.block or check.cell.count % chunk:
            raise Refused("this backend copies only whole chunks of whole blocks")
        self.gather, self.scatter = base.gather_paged_kv_to_cpu, base.scatter_cpu_to_paged_kv
        self.caches = {str(layer): tensor for layer, tensor in enumerate(layers)}
        self.host: Region = check.host(AXES["fused" if geometry.layout.fused else "split"])
        width, planes = geometry.planes * geometry.heads * geometry.head_size, [geometry.layers, chunk]
        shape = [*planes, width] if geometry.planes == 1 or geometry.layout.fused else [2, *planes, width // 2]
        self.chunks = [rows.view(geometry.dtype).view(shape) for rows in self.host.tensors()]
        self.hints = hints(geometry)
        self.operations = operations(check.device, "multi_layer_block_kv_transfer")

    def store(self, slots: torch.Tensor) -> None:
        self.gather(self.caches, block_ids(slots, self.block), self.per_chunk, out=self.chunks, layout_hints=self.hints)

    def load(self, slots: torch.Tensor, skip: int) -> None:
        ids = block_ids(slots, self.block)
        self.scatter(self.caches, ids, self.chunks, self.per_chunk, skip_first_n_tokens=skip, layout_hints=self.hints)


def as_vllm(check: CellCheck) -> tuple[Geometry, list[torch.Tensor]]:
    """Return the tensors of all layers as vLLM passes them, with fp8 as uint8 (vLLM 0.32.0 utils/torch_utils.py:33)."""
    geometry = check.geometry
    if geometry.layout.one_tensor and geometry.layout.name not in VIEWS:
        raise Refused("LMCache's connectors need a tensor for each layer")
    if geometry.dtype.itemsize == 1:
        geometry = geometry._replace(dtype=torch.uint8)
    tensors = [tensor.view(geometry.dtype) for tensor in layers(check.cache.typed(), geometry)]
    view = VIEWS.get(geometry.layout.name)
    return geometry, [tensor.permute(view) if view else tensor for tensor in tensors]


def memory_objects(region: Region, geometry: Geometry, kind: str) -> list[Any]:
    """Make LMCache's memory objects over the tensors of a host region."""
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    split = MemoryFormat.KV_T2D if kind == "layerwise" else MemoryFormat.KV_2LTD
    objects = []
    for section, rows in zip(region.sections, region.tensors(), strict=True):
        tokens, width = section.sizes["token"], geometry.heads * geometry.head_size
        planes = [geometry.planes] if kind != "layerwise" or geometry.planes == 2 else []
        shape = torch.Size(
            [tokens, *planes, width] if kind == "layerwise" else [*planes, geometry.layers, tokens, width]
        )
        raw = rows.reshape(-1).view(torch.uint8)
        about = MemoryObjMetadata(
            shape=shape, dtype=geometry.dtype, address=0, phy_size=raw.nbytes, ref_count=1,
            fmt=MemoryFormat.KV_MLA_FMT if geometry.layout.latent else split, shapes=[shape], dtypes=[geometry.dtype],
        )  # fmt: skip
        objects.append(TensorMemoryObj(raw, about, None))
    return objects


def make(name: str, geometry: Geometry, check: CellCheck, buffer: bool = True) -> tuple[Any, Any]:
    chunk, module = int(check.cell.chunk), connectors(check.device.type)
    from lmcache.v1.metadata import LMCacheMetadata

    metadata = LMCacheMetadata(
        model_name="kvfix", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0, kv_dtype=geometry.dtype,
        kv_shape=(geometry.layers, geometry.planes, chunk, geometry.heads, geometry.head_size),
        use_mla=geometry.layout.latent, role="worker", chunk_size=chunk,
    )  # fmt: skip
    return getattr(module, name).from_metadata(metadata, buffer, check.device, layout_hints=hints(geometry)), metadata


def hints(geometry: Geometry) -> dict[str, str]:
    return {"kv_layout": "HND" if geometry.layout.name in HND else "NHD"}  # for packed-pool, LMCache reads the strides


@functools.cache
def connectors(device: str) -> Any:
    """Import LMCache's module of GPU connectors. On the CPU, replace `torch` in this module by the CUDA stand-in."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    from lmcache.v1.gpu_connector import gpu_connectors

    if device == "cpu":
        cuda_stand_in.on_cpu(gpu_connectors)
        # On the CPU, LMCache would assume the layout of vLLM's CPU attention (0.5.6 kv_format/detectors/vllm.py:31).
        with contextlib.suppress(ImportError):
            detector = importlib.import_module("lmcache.v1.gpu_connector.kv_format.detectors.vllm")
            detector.__dict__["torch_device_type"] = "cuda"
    return gpu_connectors


def operations(device: torch.device, name: str) -> str:
    """Return a text that says whether a compiled operation or LMCache's silent torch fallback moves the bytes."""
    module = connectors(device.type)
    ops = getattr(module, "device_ops", getattr(module, "lmc_ops", None))
    if not hasattr(ops, name):
        raise Refused(f"LMCache {importlib.metadata.version('lmcache')} has no {name} on this machine")
    move = getattr(ops, name)
    compiled = not hasattr(move, "__code__") and not hasattr(move, "__func__")
    kind = "its compiled operations" if compiled else "its torch fallback"
    stood_in = "; torch.cuda is a stand-in" if device.type == "cpu" else ""
    return f"lmcache {importlib.metadata.version('lmcache')}, {name} of {kind}{stood_in}"


MP_AXES = {
    "layout": LAYOUTS,
    "tokens": ("chunk", "512"),  # one chunk, and at least two chunks
    "block": ("16", "32"),
    "chunk": ("32", "64", "128", "256"),
    "slots": ("blocks", "contiguous"),
    "skip": ("none",),
}
MP = "the block transfer of LMCache's multi-process mode"
ENGINE = "LMCache's cache engine and its CPU storage"
LAYERWISE_AXES = {"layout": LAYOUTS, "skip": ("none",)}
BACKENDS = (
    *(
        Backend(
            f"lmcache-{kind}", f"LMCache's {name}", functools.partial(Connector, kind), missing, "lmcache",
            LAYERWISE_AXES if kind == "layerwise" else {"layout": LAYOUTS},
        )
        for kind, name in CLASSES.items()
    ),
    Backend("lmcache-mp", MP, BlockTransfer, missing, "lmcache", MP_AXES),
    Backend("lmcache-engine", ENGINE, ThroughEngine, missing, axes={"layout": LAYOUTS}),
)  # fmt: skip
