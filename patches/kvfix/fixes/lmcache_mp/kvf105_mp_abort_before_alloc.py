"""The server cannot evict chunks: a request that is aborted before its admission keeps read locks until they time out.

Symptom: vLLM logs nothing. Chunks that a lookup has found stay read-locked in the LMCache server for the read TTL
(`read_ttl_seconds`, 300 s by default). Under pressure the server finds nothing to evict, and stores fail. Up to LMCache
0.5.4, and in vLLM's copy, a later request with the same id also gets the hit of the aborted request.

Cause: A lookup locks the chunks that it finds. Later a load or `free_lookup_locks` releases the locks.
`request_finished` ends the session (lmcache_mp_connector.py 0.5.6:1579), but the end of a session releases no lock
(modules/lookup.py 0.5.6:462). A prefetch in flight continues and locks the chunks that it fetches.

Fix: Before `request_finished`, the fix deletes the lookup of a request that was never admitted, and releases the locks.
If the server has not answered the lookup yet, or is unhealthy, the fix keeps the session and asks again in later steps.
- Upstream: https://github.com/vllm-project/vllm/issues/44100, https://github.com/vllm-project/vllm/pull/44101 (open),
  https://github.com/LMCache/LMCache/pull/5248, https://github.com/LMCache/LMCache/issues/5339 (prefetch; open).
- Remove when: `request_finished` frees the locks of a lookup that was not used.
"""

import functools
import inspect
from collections.abc import Callable

from kvfix.fixes import _mp
from kvfix.fixes.api import Any, Fix, Steps, fix_around, fix_before, multi_process, note, replaced, stubs

#: Attribute of a connector: {id of a request that ended during its lookup: function that frees the locks}.
_LOOKING = "_kvfix_looking"


# An admitted request needs no fix, because its admission or its load releases the locks.
@fix_around(when=lambda connector, request, *_: _mp.is_in(connector, request, "PREFETCHING"))
def fix(connector: Any, request: Any, block_ids: Any) -> Steps:
    name, adapter = request.request_id, connector.scheduler_adapter
    tracker = connector.request_trackers[name]
    known = ("cache_salt", "request_configs")  # arguments of the lookup
    more = {each: getattr(tracker, each) for each in known if hasattr(tracker, each)}
    tokens = _mp.token_ids(tracker)
    free = functools.partial(adapter.free_lookup_locks, token_ids=tokens, start=0, request_id=name, **more)
    is_pending = name in adapter._pending_lookups
    locked = _mp.tokens(tracker, "num_lmcache_hit", _mp.block_size(connector))
    if not locked and is_pending:  # no code has read the answer yet. Without an answer, `locked` becomes None
        locked = adapter.check_lookup_result(name)
    if locked is None or (is_pending and not adapter.is_healthy):
        note(__name__, f"request {name} was aborted during its lookup")
        vars(connector).setdefault(_LOOKING, {})[name] = free
        # `request_finished` would end session and lookup now. `fix_step` ends session and lookup later.
        ends = ("cleanup_lookup_result", "end_session")
        with replaced(adapter, **{end: functools.partial(_end_others, name, getattr(adapter, end)) for end in ends}):
            return (yield)
    if locked:
        note(__name__, f"request {name} was aborted with {locked} locked tokens: its locks are released")
        free(end=locked)
    adapter.cleanup_lookup_result(name)
    return (yield)


def _end_others(name: str, end: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `end`, but not for the request `name`. The id may be a positional or a keyword argument."""
    return None if name in (*args, *kwargs.values()) else end(*args, **kwargs)


@fix_before(when=lambda connector, *_: getattr(connector, _LOOKING, None))
def fix_step(connector: Any, scheduler_output: Any) -> None:
    adapter, looking = connector.scheduler_adapter, getattr(connector, _LOOKING)
    if not adapter.is_healthy:
        return  # check_lookup_result of an unhealthy adapter returns 0 and asks no server
    for name, free in list(looking.items()):
        locked = adapter.check_lookup_result(name)
        if locked is not None:
            del looking[name]
            if locked:
                free(end=locked)
            adapter.cleanup_lookup_result(name)
            adapter.end_session(name)


def shows_bug(hook: Any, module: Any) -> bool:
    """End a request with a hit of 512 tokens before its admission. With the bug, no lock is freed."""
    request = stubs.request(2048)
    connector, _ = _mp.tracked(module, request, num_lmcache_hit=512)
    hook(connector, request, [])
    return "free_lookup_locks" not in connector.scheduler_adapter.names()


def step_shows_bug(hook: Any, module: Any) -> bool:
    """End a request before the server answers its lookup, then run a step. With the bug, no lock is freed."""
    request = stubs.request(2048)
    connector, _ = _mp.tracked(module, request, found=None)
    connector.scheduler_adapter._pending_lookups.add(request.request_id)
    fix(module)(inspect.unwrap(type(connector).request_finished))(connector, request, [])  # the fix of request_finished
    connector.scheduler_adapter.found = 512
    hook(connector, stubs.step())
    return "free_lookup_locks" not in connector.scheduler_adapter.names()


FIX = Fix(
    *multi_process("request_finished", shows_bug, fix, order=2),
    *multi_process("build_connector_meta", step_shows_bug, fix_step, order=1),
    effect="leak",
    evidence={"KVR009": r"^scheduler_adapter\.|^read locks of the server "},
    scenarios=(
        "mp-abort-before-alloc", "mp-abort-before-alloc-in-tree",
        "mp-abort-while-prefetching", "mp-abort-while-prefetching-in-tree",
    ),
)  # fmt: skip
