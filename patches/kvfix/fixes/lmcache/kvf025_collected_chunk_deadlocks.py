"""The engine or the server hangs: to free a chunk, the garbage collector waits for a lock that its own thread holds.

Symptom: The hang can begin at any time. In `py-spy dump`, `__del__ (lmcache/v1/memory_management.py)` has called `free`
or `wrapper (lmcache/utils.py)`, which waits for a lock. An outer function in the same stack holds this lock.

Cause: `TensorMemoryObj.__del__` frees a chunk that was never released. `__del__` takes two non-reentrant locks: the
lock of `AddressManager`, and `_shared_observability_lock` (0.5.6 utils.py:714-731). If an exception leaves a chunk in a
reference cycle, the collector may call `__del__` while `allocate` or `PrometheusLogger.GetOrCreate` holds either lock.

Fix: `__del__` only puts the chunk into a list. The next `ref_count_down` of any chunk frees the chunks in the list.
- Upstream: https://github.com/LMCache/LMCache/pull/4675 (open) for `_shared_observability_lock`.
  https://github.com/LMCache/LMCache/issues/3533 (closed as stale) for the lock of the allocator's `AddressManager`.
- Remove when: `__del__` takes no lock, or the locks are reentrant.
"""

from collections import deque

from kvfix.fixes.api import TENSOR_MEMORY_OBJ, Any, Fix, Steps, fix_around, fix_before, instead, stubs

#: Chunks that the garbage collector has found. `append` and `popleft` are atomic.
COLLECTED: deque[Any] = deque()
#: A chunk with this attribute may be freed now.
FREE = "_kvfix_free"


@fix_around()
def fix(chunk: Any) -> Steps | None:
    if chunk.parent_allocator is None or not chunk.is_valid() or FREE in vars(chunk):
        return None
    COLLECTED.append(chunk)
    return instead(None)


def free_collected(*_: Any) -> None:
    while COLLECTED:
        try:
            gone = COLLECTED.popleft()
        except IndexError:  # another thread took the last chunk
            return
        vars(gone)[FREE] = True
        gone.__del__()


fix_release = fix_before(when=lambda *_: COLLECTED)(free_collected)


def shows_bug(hook: Any, module: Any) -> bool:
    """Call `__del__` of a chunk without references. With the bug, `__del__` frees the chunk at once."""
    freed: list[Any] = []
    allocator, meta = stubs.Stub(free=freed.append), stubs.Stub(ref_count=0, pin_count=0, address=0)
    hook(stubs.Stub(parent_allocator=allocator, is_valid=lambda: True, meta=meta))
    return bool(freed)


FIX = Fix(
    TENSOR_MEMORY_OBJ.target("__del__", broken=">=0.3.14", probe=shows_bug, fix=fix),
    TENSOR_MEMORY_OBJ.ref_count_down(broken=">=0.3.14", fix=fix_release, helper=True),
    effect="hang",
    let_go=free_collected,
    proof="tests/runtime/test_collected_chunks.py: the lab does not run the garbage collector in a step",
)
