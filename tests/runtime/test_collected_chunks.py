"""KVF025 on LMCache's own allocator: the garbage collector runs while its thread holds a lock of LMCache."""

import pytest

from tests.conftest import ForkServer

CASE = """
import gc, threading
import kvfix
kvfix.apply({only})
import torch
import lmcache.utils
import lmcache.v1.memory_management as module
try:
    from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
except ModuleNotFoundError:  # up to 0.5.1
    HostMemoryAllocator = module.HostMemoryAllocator
module.logger.disabled = True
allocator = HostMemoryAllocator(1 << 20)
def chunk():
    return allocator.allocate(torch.Size([2, 2, 16, 8]), torch.float32, module.MemoryFormat.KV_2LTD)
kept, cycle = chunk(), [chunk()]
cycle.append(cycle)
del cycle
gc.disable()
lock = {lock}
def collect():
    with lock:
        gc.collect()
thread = threading.Thread(target=collect, daemon=True)
thread.start()
thread.join(10)
result = ["hangs" if thread.is_alive() else "goes on"]
if not thread.is_alive():
    result.append(allocator.allocator.num_active_allocations)
    kept.ref_count_down()
    result.append(allocator.allocator.num_active_allocations)
"""
LOCKS = {
    "allocator": "allocator.allocator.address_manager._lock",
    "statistics": "lmcache.utils._shared_observability_lock",
}


@pytest.mark.parametrize("name", ["0.3.14", "0.4.7", "0.5.6"])
@pytest.mark.parametrize("lock", LOCKS)
@pytest.mark.parametrize(
    ("only", "result"), [("only=[]", ["hangs"]), ("", ["goes on", 2, 0])], ids=["released", "fixed"]
)
def test_a_chunk_that_is_collected(name, lock, only, result, fork_server: ForkServer, release) -> None:  # type: ignore[no-untyped-def]
    assert fork_server(CASE.format(only=only, lock=LOCKS[lock]), release(name)) == result
