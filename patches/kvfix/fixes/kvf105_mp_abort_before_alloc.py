"""A request aborted between its lookup and its admission keeps the read locks of the server until they time out.

## Symptom
Nothing in the log of vLLM. Chunks that were looked up stay read-locked in the LMCache server for the read TTL
(`read_ttl_seconds`, 300 s by default): under pressure the server finds nothing to evict, and stores fail. Up to LMCache
0.5.4, and in vLLM's copy, the scheduler also keeps the lookup of every such request for ever, and a later request with
the same id is answered with its hit.

## Cause
A lookup locks what it finds until the chunks are retrieved or given back with `free_lookup_locks`. `request_finished`
ends the session (lmcache_mp_connector.py 0.5.6:1579), which releases no lock (modules/lookup.py 0.5.6:462), and a
prefetch that is under way goes on and locks what it brings.

## Fix
A request that was looked up and never admitted gives its locks back before `request_finished`, while the session is
there to say which they are, and its lookup is forgotten. If the answer has not come yet, the session stays until it has
come: it is asked for in the steps that follow.

## Releases
LMCache 0.4.5 to 0.5.6, and 0.4.4 to 0.5.5 with lmcache_mp_connector_0180 and _0201. vLLM 0.26.0 to 0.32.0, its own copy
of the connector.

## Upstream
https://github.com/vllm-project/vllm/issues/44100, https://github.com/vllm-project/vllm/pull/44101 (open),
https://github.com/LMCache/LMCache/pull/5248; of a prefetch that is under way:
https://github.com/LMCache/LMCache/issues/5339 (open).

## Remove when
`request_finished` frees the locks of a lookup that was not used.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvfix.correction import around, before, replaced
from kvfix.fix import Fix
from kvfix.fixes import _mp

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType


#: By connector: what frees the locks of a request that ended before its lookup was answered.
_LOOKING: WeakKeyDictionary[Any, dict[str, Callable[..., Any]]] = WeakKeyDictionary()


def correct(module: ModuleType) -> Callable[..., Any]:
    prefetching = module.LMCacheMPRequestState.PREFETCHING

    def request_finished(connector: Any, request: Any, block_ids: Any) -> Generator[None, Any, Any] | None:
        name, adapter = request.request_id, connector.scheduler_adapter
        tracker = connector.request_trackers[name]
        known = ("cache_salt", "request_configs")  # what the lookup was sent with
        more = {each: getattr(tracker, each) for each in known if hasattr(tracker, each)}
        tokens = _mp.token_ids(tracker)
        free = functools.partial(adapter.free_lookup_locks, token_ids=tokens, start=0, request_id=name, **more)
        locked = _mp.tokens(tracker, "num_lmcache_hit", _mp.block_size(connector)) or _found(adapter, name)
        if locked is None:
            _LOOKING.setdefault(connector, {})[name] = free
            return _session_kept(adapter, name)
        if locked:
            free(end=locked)
        adapter.cleanup_lookup_result(name)
        return None

    # Of one that is admitted they have gone with that, or go with the load.
    return around(request_finished, when=_mp.in_state("prefetching"), prefetching=prefetching)


def _found(adapter: Any, name: str) -> int | None:
    """What a lookup has found whose answer nobody has read. None: it has not come."""
    answer: int | None = adapter.check_lookup_result(name) if name in adapter._pending_lookups else 0
    return answer


def _session_kept(adapter: Any, name: str) -> Generator[None, Any, Any]:
    """The hook ends it and forgets the lookup; that is done later, by `correct_step`."""
    ends = ("cleanup_lookup_result", "end_session")
    with replaced(adapter, **{end: _but_for(name, getattr(adapter, end)) for end in ends}):
        return (yield)


def _but_for(name: str, end: Callable[..., Any]) -> Callable[..., Any]:
    """The same, of all requests but this one, however it is called."""

    def but_for(*args: Any, **kwargs: Any) -> Any:
        return None if name in (*args, *kwargs.values()) else end(*args, **kwargs)

    return but_for


def correct_step(module: ModuleType) -> Callable[..., Any]:
    def build_connector_meta(connector: Any, scheduler_output: Any) -> None:
        adapter, looking = connector.scheduler_adapter, _LOOKING.get(connector, {})
        for name, free in list(looking.items()):
            locked = adapter.check_lookup_result(name)
            if locked is not None:
                del looking[name]
                if locked:
                    free(end=locked)
                adapter.cleanup_lookup_result(name)
                adapter.end_session(name)
        if not looking:
            _LOOKING.pop(connector, None)

    return before(build_connector_meta, when="looking.data", looking=_LOOKING)  # the dict in it: nobody is asked


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """512 tokens were found for a request that goes away before it is admitted."""
    connector, request = _mp.scheduler_side(module), _mp.request()
    tracker = connector.request_trackers[request.request_id] = module.LMCacheMPRequestTracker(request)
    _mp.set_tokens(tracker, "num_lmcache_hit", 512)
    hook(connector, request, [])
    return "free_lookup_locks" not in connector.scheduler_adapter.names()


def step_shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """It goes away before the answer has come, which is 512 tokens, and a step follows."""
    connector, request = _mp.scheduler_side(module, found=None), _mp.request()
    connector.request_trackers[request.request_id] = module.LMCacheMPRequestTracker(request)
    connector.scheduler_adapter._pending_lookups.add(request.request_id)
    correct(module)(inspect.unwrap(type(connector).request_finished))(connector, request, [])  # the other half
    connector.scheduler_adapter.found = 512
    hook(
        connector,
        SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[]),
            num_scheduled_tokens={},
            total_num_scheduled_tokens=0,
            preempted_req_ids=set(),
        ),
    )
    return "free_lookup_locks" not in connector.scheduler_adapter.names()


_RELEASES = {"lmcache": ">=0.4.5,<=0.5.6", "vllm": ">=0.26.0"}
FIX = Fix(
    __name__,
    __doc__,
    patches=(
        *_mp.patches("request_finished", shows_bug, correct, **_RELEASES),
        *_mp.patches("build_connector_meta", step_shows_bug, correct_step, **_RELEASES),
    ),
)
