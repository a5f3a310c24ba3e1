"""A request returns wrong text: LMCache loads a truncated chunk file from the local disk as if it were whole.

Symptom: With `local_disk`, LMCache logs `Retrieved 256 out of 256 required tokens`, and the request ends with HTTP 200
and wrong text. If the file is gone, LMCache logs `File not found on disk: ...`, and EngineCore dies with `KeyError`.

Cause: `read_file` does not compare the number of bytes that it read with the size of the chunk (0.5.6
local_disk_backend.py:812, 816). After a short read, the rest of the chunk's memory keeps its old content. A full disk,
a crash of the host, or another process in the same folder can cut a file short. If the file is missing, `read_file`
deletes the entry of the chunk (0.5.6:820), and `load_bytes_from_disk` then reads the deleted entry (0.5.6:773).

Fix: Before a read, the fix writes random bytes to the end of the chunk's memory. If these bytes are unchanged after
the read, or the file is smaller than the memory, the read was too short. The chunk then counts as not found. The fix
frees the chunk's memory, and deletes the chunk's entry and file. vLLM computes the tokens again, or ends the request
with an error (`kv_load_failure_policy`). If the fix itself raises during a read, the chunk counts as not found. With
`use_layerwise` the fix only logs a warning, because LMCache cannot report that a layerwise load failed.

Up to 0.4.3, if a chunk is not found, LMCache also drops the previous chunk, but reports the previous chunk as loaded
(0.4.3 cache_engine.py:1682). The fix reports only the chunks that LMCache loads.
- Releases: LMCache 0.3.9.post1 to 0.5.6. 0.3.9 also has the bug, but cannot report a failed load, so the fix leaves
  0.3.9 unchanged.
- Remove when: `read_file` raises an error when it reads fewer bytes than the chunk has.
"""

import ctypes
import os
import threading
from contextlib import suppress

from kvfix.fixes import api
from kvfix.fixes.api import Any, Fix, Steps, engine_log, fix_after, fix_around, fix_calls, positional, stubs

_MARK_BYTES = 16


class _Reads(threading.local):
    """The number of short reads of this thread. LMCache reads a file in the thread that asks for the chunk."""

    short = 0


_READS = _Reads()


@fix_around()
def fix_read(backend: Any, key: Any, buffer: Any, path: str) -> Steps:
    _READS.short += 1  # the read counts as short until the whole file is read
    size, entry = len(buffer), backend.dict.get(key)
    end = (ctypes.c_ubyte * min(_MARK_BYTES, size)).from_buffer(buffer, max(0, size - _MARK_BYTES))
    mark = os.urandom(len(end))
    end[:] = list(mark)
    yield
    if bytes(end) == mark:
        if entry is not None:  # LMCache deletes the entry of a missing file, but read_file's caller needs the entry
            backend.dict.setdefault(key, entry)
    elif os.path.getsize(path) >= size:  # a slightly short file overwrites a part of the mark
        _READS.short -= 1


def _read(load: Any, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """Call `load`. Return the result of the call, and True if no read was short."""
    before, answer = _READS.short, None
    try:
        answer = load(*args, **kwargs)
    except OSError:  # the disk failed during a read, so the read counts as short
        if _READS.short == before:
            raise
    return answer, _READS.short == before


@fix_calls
def fix_load(load: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a function whose first argument is the key of a chunk to load. Return None if a read was short."""
    memory, is_whole = _read(load, *args, **kwargs)
    if is_whole:
        return memory
    engine_log.guarded(f"{__name__}.load", lambda: _give_up(memory, *positional(load)(args, kwargs)[0]))
    return None


@fix_calls
def fix_prefetch(load: Any, *args: Any, **kwargs: Any) -> Any:
    """Load the chunks one by one, and stop at the first short read. LMCache accepts a list with fewer chunks."""
    where, before = f"{__name__}.load_all", _READS.short
    # The arguments 1 to 3 are paths, keys and memory objects.
    chunks = engine_log.guarded(where, lambda: list(zip(*positional(load)(args, kwargs)[0][1:4], strict=False)))
    if chunks is None:
        answer = load(*args, **kwargs)
        return answer if _READS.short == before else []
    # `retrieve_layer` loads the chunks of one layer, and does not accept a shorter list.
    if len({getattr(key, "layer_id", None) for _, key, _ in chunks} - {None}) == 1:
        answer = load(*args, **kwargs)
        if _READS.short != before:
            what = "is truncated or missing, and LMCache has loaded it (use_layerwise)"
            engine_log.guarded(where, _warn, what, chunks[0][0])
        return answer
    loaded = []
    for at, (path, key, memory) in enumerate(chunks):
        _, is_whole = _read(load, args[0], [path], [key], [memory])
        if not is_whole:
            engine_log.guarded(where, _give_up_all, args[0], chunks[at:])
            break
        loaded.append(memory)
    return loaded


def _give_up_all(backend: Any, chunks: list[tuple[Any, ...]]) -> None:
    """Release the chunks, and the pin that each chunk has for this load. Only the first chunk had a short read."""
    for at, (_, key, memory) in enumerate(chunks):
        if memory.is_pinned:
            memory.unpin()
        if at == 0:
            _give_up(memory, backend, key)
        else:
            backend.unpin(key)
            memory.ref_count_down()


def _give_up(memory: Any, backend: Any, key: Any, *_: Any) -> None:
    """Free the memory and delete the chunk. LMCache stores the chunk again when vLLM has computed its tokens."""
    if memory is not None:
        memory.ref_count_down()
    with backend.disk_lock:
        entry = backend.dict.pop(key, None)
        if entry is None:
            return
        backend.current_cache_size -= entry.size
        backend.usage -= entry.size
        backend.cache_policy.update_on_force_evict(key)
        with suppress(OSError):
            os.remove(entry.path)
    _warn("is truncated or missing; its tokens are computed", entry.path)


def _warn(what: str, path: str) -> None:
    folder = os.path.dirname(path)
    engine_log.warning(f"KVF037: a chunk file in {folder} {what}. Check the disk, and that nothing else writes there.")


@fix_after()
def fix_report(engine: Any, answer: Any, tokens: Any, mask: Any, ret_mask: Any, **_: Any) -> None:
    ret_mask[:] = False
    for _, _, start, end in answer[0]:
        ret_mask[start:end] = True


def shows_bug(hook: Any, module: Any) -> bool:
    """Read 32 bytes from an empty file. With the bug, the read ends without an error."""
    backend = stubs.Stub(os_disk_bs=4096, use_odirect=False, dict={})
    try:
        return hook(backend, stubs.NAME, bytearray(32), os.devnull) is None
    except OSError:
        return False


FIX = Fix(
    api.LOCAL_DISK_BACKEND.read_file(broken=">=0.3.9.post1", probe=shows_bug, fix=fix_read),
    api.LOCAL_DISK_BACKEND.load_bytes_from_disk(broken=">=0.3.9.post1", fix=fix_load, helper=True),
    api.LOCAL_DISK_BACKEND._load_chunk_into_memory(broken=">=0.5.2", fix=fix_load, helper=True),
    api.LOCAL_DISK_BACKEND.batched_async_load_bytes_from_disk(broken=">=0.3.9.post1", fix=fix_prefetch, helper=True),
    api.CACHE_ENGINE._process_tokens_internal(broken=">=0.3.9.post1,<0.4.4", fix=fix_report),
    effect="wrong output",
    proof="tests/runtime/test_local_disk.py, on LMCache's own backend, because the lab has no disk",
)
