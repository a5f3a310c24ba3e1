"""`lmcache-v2`, `lmcache-v3`, `lmcache-layerwise`: the GPU connectors of the installed LMCache.

On a GPU they run as they are. LMCache has none for the CPU: there the same classes run on CPU tensors, with two things
stood in for (and named in the report): their `torch.cuda` has streams that do everything at once, and the assertions
that a device is CUDA are left out. What moves the bytes is LMCache's own in both cases: `lmcache.device_ops`, whose
operations are compiled ones for CUDA or, silently, LMCache's torch fall-back. The report says which.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
from dataclasses import replace
from typing import Any

import torch

from kvfix_tools.roundtrip import cuda_stand_in
from kvfix_tools.roundtrip.backends import Backend
from kvfix_tools.roundtrip.backends.torch_copy import layers
from kvfix_tools.roundtrip.cell_check import CellCheck, Refused, Transfer
from kvfix_tools.roundtrip.layout import Geometry
from kvfix_tools.roundtrip.region import Region

#: LMCache's memory objects, outermost first: KV_2LTD, and KV_T2D for each layer (0.5.6 memory_management.py).
AXES = {"v2": "kv layer token head", "v3": "kv layer token head", "layerwise": "token kv head"}
CLASSES = {
    "v2": "VLLMPagedMemGPUConnectorV2",
    "v3": "VLLMPagedMemGPUConnectorV3",
    "layerwise": "VLLMPagedMemLayerwiseGPUConnector",
}
#: Those that LMCache has a format for (0.5.6 kv_format/specs) and that reach its in-process connectors from vLLM.
LAYOUTS = ("nhd", "nhd-block-first", "hnd", "hnd-block-first", "packed", "packed-hnd", "packed-pool", "mla")
#: vLLM hands on a view whose axes are always in one order, whatever they are in memory: HND as NHD, and, from 0.26 on,
#: NHD as HND (0.20.2 flash_attn.py:138, 0.26.0 flash_attn.py:131).
VIEWS = {
    **dict.fromkeys(("hnd", "hnd-block-first"), (0, 1, 3, 2, 4)),
    **dict.fromkeys(("packed", "packed-pool"), (0, 2, 1, 3)),
}
#: What vLLM tells LMCache of the layout (0.5.6 integration/vllm/utils.py:43).
HND = ("hnd", "hnd-block-first", "packed-hnd", "packed-cpu")


def missing(device: torch.device) -> str | None:
    return None if importlib.util.find_spec("lmcache") else "LMCache is not installed"


class Connector(Transfer):
    """One of LMCache's GPU connectors and its memory objects, which are views of the host region."""

    def __init__(self, kind: str, check: CellCheck, buffer: bool = True) -> None:
        """buffer: chunks go by a buffer on the device, as the engine has it by default."""
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
            for _ in self.connector.batched_from_gpu(self.by_layer, self.starts, self.ends, sync=True, **to):
                pass
        else:
            self.connector.batched_from_gpu(self.objects, self.starts, self.ends, **to)

    def load(self, slots: torch.Tensor, skip: int) -> None:
        to = {"kvcaches": self.caches, "slot_mapping": slots}
        if self.kind == "layerwise":
            mover = self.connector.batched_to_gpu(self.starts, self.ends, sync=True, **to)
            next(mover)
            for objects in self.by_layer:
                mover.send(objects)
            for _ in mover:
                pass
            return
        # The engine asks for the chunks from the one on in which its own tokens end (0.5.6 vllm_v1_adapter.py).
        chunks = slice(skip // self.chunk, None)
        wanted = self.objects[chunks], self.starts[chunks], self.ends[chunks]
        self.connector.batched_to_gpu(*wanted, vllm_cached_tokens=skip, **to)


def as_vllm(check: CellCheck) -> tuple[Geometry, list[torch.Tensor]]:
    """The KV cache as vLLM hands it on: a tensor for each layer, and fp8 as uint8 (0.32.0 utils/torch_utils.py:33)."""
    geometry = check.geometry
    if geometry.layout.one_tensor and geometry.layout.name not in VIEWS:
        raise Refused("LMCache's connectors take a tensor for each layer")
    if geometry.dtype.itemsize == 1:
        geometry = replace(geometry, dtype=torch.uint8)
    tensors = [tensor.view(geometry.dtype) for tensor in layers(check.cache.typed(), geometry)]
    view = VIEWS.get(geometry.layout.name)
    return geometry, [tensor.permute(view) if view else tensor for tensor in tensors]


def memory_objects(region: Region, geometry: Geometry, kind: str) -> list[Any]:
    """LMCache's own memory objects over the tensors of a host region."""
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    split = MemoryFormat.KV_T2D if kind == "layerwise" else MemoryFormat.KV_2LTD
    objects = []
    for section, rows in zip(region.sections, region.tensors(), strict=True):
        tokens, width = section.sizes["token"], geometry.heads * geometry.head_size
        planes = [geometry.planes] if kind != "layerwise" or geometry.planes == 2 else []
        lead = [tokens, *planes] if kind == "layerwise" else [*planes, geometry.layers, tokens]
        shape = torch.Size([*lead, width])
        raw = rows.reshape(-1).view(torch.uint8)
        about = MemoryObjMetadata(
            shape=shape, dtype=geometry.dtype, address=0, phy_size=raw.nbytes, ref_count=1,
            fmt=MemoryFormat.KV_MLA_FMT if geometry.layout.latent else split, shapes=[shape], dtypes=[geometry.dtype],
        )  # fmt: skip
        objects.append(TensorMemoryObj(raw, about, None))
    return objects


def make(name: str, geometry: Geometry, check: CellCheck, buffer: bool = True) -> tuple[Any, Any]:
    """One of LMCache's GPU connectors, and its metadata."""
    chunk, module = int(check.cell.chunk), connectors(check.device.type)
    from lmcache.v1.metadata import LMCacheMetadata

    metadata = LMCacheMetadata(
        model_name="kvfix", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0, kv_dtype=geometry.dtype,
        kv_shape=(geometry.layers, geometry.planes, chunk, geometry.heads, geometry.head_size),
        use_mla=geometry.layout.latent, role="worker", chunk_size=chunk,
    )  # fmt: skip
    made = getattr(module, name).from_metadata
    return made(metadata, buffer, check.device, layout_hints=hints(geometry)), metadata


def hints(geometry: Geometry) -> dict[str, str]:
    return {"kv_layout": "HND" if geometry.layout.name in HND else "NHD"}  # of a pool, too: the strides tell


@functools.cache
def connectors(device: str) -> Any:
    """LMCache's module of GPU connectors; on the CPU, with the stand-ins."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    from lmcache.v1.gpu_connector import gpu_connectors

    if device == "cpu":
        cuda_stand_in.on_cpu(gpu_connectors)
        # It would take the layout of vLLM's CPU attention for granted (0.5.6 kv_format/detectors/vllm.py:31).
        with contextlib.suppress(ImportError):
            detector = importlib.import_module("lmcache.v1.gpu_connector.kv_format.detectors.vllm")
            detector.__dict__["torch_device_type"] = "cuda"
    return gpu_connectors


def operations(device: torch.device, name: str) -> str:
    """Which of LMCache's operations moves the bytes: compiled, or the fall-back that it takes without a word."""
    module = connectors(device.type)
    ops = getattr(module, "device_ops", getattr(module, "lmc_ops", None))
    if not hasattr(ops, name):
        raise Refused(f"LMCache {importlib.metadata.version('lmcache')} has no {name} on this machine")
    move = getattr(ops, name)
    compiled = not hasattr(move, "__code__") and not hasattr(move, "__func__")
    kind = "its compiled operations" if compiled else "its torch fall-back"
    stood_in = "; torch.cuda stood in for" if device.type == "cpu" else ""
    return f"lmcache {importlib.metadata.version('lmcache')}, {name} of {kind}{stood_in}"


def _backend(kind: str) -> Backend:
    axes = {"layout": LAYOUTS, **({"skip": ("none",)} if kind == "layerwise" else {})}
    summary = f"LMCache's {CLASSES[kind]}"
    return Backend(f"lmcache-{kind}", summary, lambda check: Connector(kind, check), missing, "lmcache", axes)


BACKENDS = tuple(_backend(kind) for kind in CLASSES)
