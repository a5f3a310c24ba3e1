"""A worker dies or reads wrong KV: LMCache releases a chunk twice after an asynchronous load.

Symptom: The next request that hits the chunk finds a memory object without a tensor, and the worker dies at `assert
memory_obj.tensor is not None`. Or the request reads wrong KV. LMCache may first log `Double unpin occurred somewhere.`

Cause: `retrieve` releases the loaded chunks (0.5.6 cache_engine.py:962-964) and the unneeded chunks (:1733). Then
`lookup_unpin` cleans up the lookup, and releases the loaded and the unneeded chunks again (:1409-1441).

Fix: `lookup_unpin` releases only chunks that `retrieve` has not released. The fix also unpins the unneeded chunks.
- Releases: LMCache 0.4.1 to 0.5.6, with `enable_async_loading`. Up to 0.5.1, only unneeded chunks are released twice.
- Upstream: https://github.com/LMCache/LMCache/issues/5090, https://github.com/LMCache/LMCache/pull/5120 are open.
- Remove when: `cleanup_memory_objs` no longer releases the chunks that `retrieve` has released.
"""

from _thread import get_ident
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from kvfix.fixes import _lmcache
from kvfix.fixes.api import CACHE_ENGINE, Any, Fix, Steps, fix_around, replaced


def _noted(call: Callable[[], Any], names: set[int], name: int, thread: int) -> Any:
    if get_ident() == thread:
        names.add(name)
    return call()


@fix_around()
def fix(engine: Any, tokens: Any, mask: Any = None, **more: Any) -> Steps:
    lookup_id = more.get("req_id")
    consumes = engine.async_loading and not engine.remove_after_retrieve
    chunks = {id(chunk): chunk for chunk in _lmcache.fetched(engine, lookup_id)} if consumes else {}
    if not chunks:
        return (yield)
    released, unpinned, thread = set[int](), set[int](), get_ident()
    try:
        with ExitStack() as stack:
            for name, chunk in chunks.items():
                down = partial(_noted, chunk.ref_count_down, released, name, thread)
                unpin = partial(_noted, chunk.unpin, unpinned, name, thread)
                stack.enter_context(replaced(chunk, ref_count_down=down, unpin=unpin))
            return (yield)
    finally:
        for name in released - unpinned:
            _lmcache.unpin(chunks[name])
        _lmcache.keep_fetched(engine, lookup_id, lambda chunk: id(chunk) not in released)


FIX = Fix(
    CACHE_ENGINE.retrieve(broken=">=0.4.1", fix=fix, order=2),
    effect="wrong output",
    evidence={"KVD115": "", "KVD403": ""},
    proof="tests/lab/test_async_release.py, on LMCache's own functions: the lab has no asynchronous storage backend",
)
