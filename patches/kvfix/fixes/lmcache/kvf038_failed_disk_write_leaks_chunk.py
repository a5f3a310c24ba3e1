"""After a failed disk write the chunk stays in CPU memory for ever, and LMCache never stores that chunk again.

Symptom: If the disk of `local_disk` is full, LMCache logs `Stored 256 out of total 256 tokens`, but has no later hit.
In the end LMCache logs `No eviction candidates found in local cpu backend. Local cpu memory is under pressure.`

Cause: After `write_file`, `async_save_bytes_to_disk` releases the memory, marks the task as done and adds the entry
(0.5.6 local_disk_backend.py:699-716). If the write raises, LMCache does none of these three things. The memory stays in
use. The task stays registered, so LMCache skips every later store of the chunk (0.5.6:381). A part of the file stays on
the disk, and the chunk's size still counts against `max_local_disk_size`. No code reads the exception (0.5.6:428).

Fix: After a failed write the fix logs the error, frees the memory, ends the task and deletes the file. The size of the
chunk no longer counts. LMCache can then store the chunk again. With `use_odirect`, a file descriptor still leaks.
- Remove when: `async_save_bytes_to_disk` handles an error of `write_file`.
"""

import os
from contextlib import nullcontext, suppress

from kvfix.fixes.api import LOCAL_DISK_BACKEND, Any, Fix, engine_log, fix_calls, positional, stubs


@fix_calls
def fix(save: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return save(*args, **kwargs)
    except OSError as error:
        engine_log.guarded(f"{__name__}.undo", lambda cause: _undo(cause, *positional(save)(args, kwargs)[0]), error)
        raise  # as without the fix, the exception goes into a future that no code reads


def _undo(error: OSError, backend: Any, key: Any, memory: Any, *_: Any) -> None:
    if not backend.disk_worker.exists_in_put_tasks(key):  # the write succeeded before the error
        return
    path, size = backend._key_to_path(key), memory.get_physical_size()
    backend.usage -= len(memory.byte_array)
    with suppress(OSError):
        os.remove(path)
    memory.ref_count_down()
    with backend.disk_lock:
        backend.current_cache_size -= size
        backend.cache_policy.update_on_force_evict(key)
    backend.disk_worker.remove_put_task(key)
    engine_log.warning(
        f"KVF038: LMCache cannot write a chunk to {os.path.dirname(path)} ({error.strerror}); the chunk is not stored. "
        "Free space there, or lower max_local_disk_size."
    )


def shows_bug(hook: Any, module: Any) -> bool:
    """Let a write fail. With the bug, the memory stays in use."""
    size, release = stubs.Calls(0), stubs.Calls()
    memory = stubs.Stub(tensor=id, byte_array=b"", get_size=size, get_physical_size=size, ref_count_down=release)
    backend = module.LocalDiskBackend.__new__(module.LocalDiskBackend)  # unlike a stub, this object has all methods
    vars(backend).update(
        _key_to_path=lambda key: os.devnull + "/none", write_file=stubs.Calls(OSError("no space")), usage=0,
        current_cache_size=0, disk_lock=nullcontext(), stats_monitor=stubs.Nothing(), disk_worker=stubs.Nothing(),
        cache_policy=stubs.Nothing(),
    )  # fmt: skip
    with suppress(OSError):
        hook(backend, stubs.NAME, memory)
    return not release


FIX = Fix(
    LOCAL_DISK_BACKEND.async_save_bytes_to_disk(broken=">=0.3.9", probe=shows_bug, fix=fix),
    effect="leak",
    proof="tests/runtime/test_local_disk.py, on LMCache's own backend, because the lab has no disk",
)
