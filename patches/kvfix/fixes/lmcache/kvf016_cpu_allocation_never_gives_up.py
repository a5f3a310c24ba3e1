"""The worker hangs: a load waits without end for memory of the CPU cache that is never freed.

Symptom: LMCache logs this line every 0.1 seconds, for ever: `No eviction candidates found in local cpu backend. Local
cpu memory is under pressure. Waiting for 0.1 seconds before retrying.` vLLM logs `Running: N reqs` and no throughput.

Cause: `allocate` evicts only chunks of the CPU cache. There is nothing to evict if every chunk is pinned, or if
`local_cpu` is false and CPU memory only stages chunks for another backend (0.5.6 local_cpu_backend.py:686-745).

Fix: A load waits for memory for at most ten seconds in total. Then the load fails, and vLLM computes the tokens.
`allocate` does not know which load calls it, so the fix adds up the waits of each thread. After a minute without a
wait, the thread may wait ten seconds again. Stores do not wait. A load from disk that gets no memory returns None.
- Upstream: https://github.com/LMCache/LMCache/issues/2942 (open), https://github.com/LMCache/LMCache/issues/3804.
  Without the fix, set `local_cpu: true`, set a larger `max_local_cpu_size`, or send fewer requests at once.
- Remove when: `allocate` has a timeout.
"""

import threading
import time

from kvfix import clock, engine_log
from kvfix.fixes.api import LOCAL_CPU_BACKEND, LOCAL_DISK_BACKEND, Any, Fix, fix_calls, positional, stubs

LONGEST_WAIT, BETWEEN = 10.0, 0.1
#: Positions of the arguments `eviction` and `busy_loop`, by function. All releases have the same positions.
PLACES = {"allocate": (4, 5), "batched_allocate": (5, 6)}


class _Waits(threading.local):
    """left: seconds that the thread may still wait at time `at`. `left` grows back to LONGEST_WAIT within a minute."""

    left = LONGEST_WAIT
    at = 0.0

    def begin(self) -> None:
        now = clock.now()
        self.left = min(LONGEST_WAIT, self.left + (now - self.at) * LONGEST_WAIT / 60)
        self.at = now

    def wait(self) -> bool:
        """Wait for BETWEEN seconds. If the thread has no seconds left to wait, return False at once."""
        if self.left <= 0:
            return False
        time.sleep(BETWEEN)
        now = clock.now()
        self.left, self.at = self.left - (now - self.at), now
        return True


_WAITS = _Waits()


@fix_calls
def fix(allocate: Any, *args: Any, **kwargs: Any) -> Any:
    evicts, loops = PLACES.get(allocate.__name__, (4, 5))
    given, _ = positional(allocate)(args, kwargs)
    if len(given) <= loops or not (given[evicts] and given[loops]):
        return allocate(*args, **kwargs)
    _WAITS.begin()
    while True:
        memory = allocate(*given[:loops], False, *given[loops + 1 :])
        if memory is not None:
            return memory
        if not _WAITS.wait():
            engine_log.warning(
                f"KVF016: LMCache's CPU cache had no memory for a load for {LONGEST_WAIT:.0f} s. The load has failed, "
                "and vLLM computes its tokens. Check local_cpu and max_local_cpu_size."
            )
            return None


@fix_calls
def fix_disk(load: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return load(*args, **kwargs)
    except AssertionError as error:
        if "Memory allocation failed" not in str(error):
            raise
        return None


def disk_shows_bug(hook: Any, module: Any) -> bool:
    """Load a chunk without free memory. The load must return None. With the bug, the load raises AssertionError."""
    backend = stubs.Stub(local_cpu_backend=stubs.Stub(allocate=lambda *_, **__: None))
    try:
        return hook(backend, None, "", dtype=None, shape=None, fmt=None) is not None
    except AssertionError:
        return True


FIX = Fix(
    LOCAL_CPU_BACKEND.allocate(broken=">=0.3.9", fix=fix),
    LOCAL_CPU_BACKEND.batched_allocate(broken=">=0.3.9", fix=fix),
    LOCAL_DISK_BACKEND.load_bytes_from_disk(broken=">=0.3.9", probe=disk_shows_bug, fix=fix_disk),
    effect="hang",
    evidence={"KVD402": ""},
    proof="tests/runtime/test_cpu_allocation.py, on LMCache's own backend, because the lab's cache is never full",
)
