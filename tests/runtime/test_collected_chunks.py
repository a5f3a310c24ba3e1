"""KVF025 on LMCache's own allocator: the garbage collector runs while its thread holds a lock of LMCache."""

import gc
import threading
from typing import Any

import pytest

import kvfix
from tests.conftest import ForkServer, release

#: Where the thread hangs, `__del__` of the other chunk would hang too.
KEPT: list[Any] = []


def host_memory() -> Any:
    """LMCache's allocator of 1 MiB of host memory."""
    try:
        from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
    except ModuleNotFoundError:  # up to 0.5.1
        from lmcache.v1.memory_management import HostMemoryAllocator
    return HostMemoryAllocator(1 << 20)


def collect(locked: str, limit: float, revert: bool = False) -> list[Any]:
    """Return True if the thread hangs, and otherwise the chunks allocated then and after the next release or `revert`.

    limit: maximum seconds to wait for the thread.
    """
    import lmcache.utils
    import lmcache.v1.memory_management as module
    import torch

    module.logger.disabled = True
    allocator = host_memory()

    def chunk() -> Any:
        return allocator.allocate(torch.Size([2, 2, 16, 8]), torch.float32, module.MemoryFormat.KV_2LTD)

    kept, cycle = chunk(), [chunk()]
    cycle.append(cycle)
    del cycle
    gc.disable()
    locks = {
        "allocator": allocator.allocator.address_manager._lock,
        "statistics": lmcache.utils._shared_observability_lock,
    }

    def run() -> None:
        with locks[locked]:
            gc.collect()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        KEPT.append(kept)
        return ["hangs"]
    after_collection = allocator.allocator.num_active_allocations
    if revert:
        kvfix.revert()
    else:
        kept.ref_count_down()
    return ["goes on", after_collection, allocator.allocator.num_active_allocations]


@pytest.mark.parametrize("name", ["0.3.14", "0.4.7", "0.5.6"])
@pytest.mark.parametrize("locked", ["allocator", "statistics"])
@pytest.mark.parametrize(
    ("fixes", "limit", "result"), [(False, 2, ["hangs"]), (True, 60, ["goes on", 2, 0])], ids=["released", "fixed"]
)
def test_a_chunk_that_is_collected(name, locked, fixes, limit, result, fork_server: ForkServer) -> None:  # type: ignore[no-untyped-def]
    assert fork_server(collect, release(name), locked, limit, fixes=fixes) == result


def test_revert_frees_what_is_kept(fork_server: ForkServer) -> None:
    assert fork_server(collect, release("0.5.6"), "allocator", 60, True, fixes=True) == ["goes on", 2, 1]
