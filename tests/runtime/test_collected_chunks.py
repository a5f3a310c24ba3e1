"""Test KVF025 on LMCache's own allocator. A thread runs the garbage collector while it holds a lock of LMCache."""

import gc
import threading
from typing import Any

import pytest

import kvfix
from tests.conftest import answers

KEPT: list[Any] = []  # keeps the chunk `kept` alive if the thread hangs, because `__del__` would hang too


def host_memory() -> Any:
    try:
        from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
    except ModuleNotFoundError:  # LMCache up to 0.5.1
        from lmcache.v1.memory_management import HostMemoryAllocator
    return HostMemoryAllocator(1 << 20)


@pytest.mark.parametrize("release", ["0.3.14", "0.4.7", "0.5.6"])
@pytest.mark.parametrize("locked", ["allocator", "statistics"])
@pytest.mark.parametrize(
    ("fixes", "seconds", "revert", "answer"),
    [(False, 2, False, ["hangs"]), (True, 60, False, ["goes on", 2, 0]), (True, 60, True, ["goes on", 2, 1])],
    ids=["released", "fixed", "reverted"],
)
@answers(also="fixes release answer")
def test_a_chunk_that_is_collected(locked: str, seconds: float, revert: bool) -> list[Any]:
    """Return ["hangs"] or ["goes on", number of chunks after the collection, number of chunks at the end]."""
    import lmcache.v1.memory_management as module
    import torch
    from lmcache import utils

    allocator = host_memory()

    def chunk() -> Any:
        return allocator.allocate(torch.Size([2, 2, 16, 8]), torch.float32, module.MemoryFormat.KV_2LTD)

    kept, cycle = chunk(), [chunk()]
    cycle.append(cycle)
    del cycle
    gc.disable()
    locks = {"allocator": allocator.allocator.address_manager._lock, "statistics": utils._shared_observability_lock}

    def run() -> None:
        with locks[locked]:
            gc.collect()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        KEPT.append(kept)
        return ["hangs"]
    after_collection = allocator.allocator.num_active_allocations
    if revert:
        kvfix.revert()
    else:
        kept.ref_count_down()
    return ["goes on", after_collection, allocator.allocator.num_active_allocations]
