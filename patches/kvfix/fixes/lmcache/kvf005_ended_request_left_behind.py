"""LMCache leaks the LoadSpec, hit, priority and pins of a request that ends before it is admitted.

Symptom: Nothing is logged at first. `load_specs` and `_requests_priority` grow. The pinned chunks cannot be evicted.
After 300 seconds LMCache logs `Pin timeout detected for MemoryObj ...`. A later request with the same id gets the hit
of the ended request. LMCache then logs `Num retrieved tokens: 0, num expected tokens: ...`.

Cause: A lookup pins the chunks that it finds, and LMCache keeps the hit until vLLM admits the request. If the client
disconnects earlier, the pins and the hit leak, because `request_finished` releases neither. The workers release pins
only for requests that are in a step's metadata. With asynchronous loading, an abort also leaks the fetched chunks if
another connector of a MultiConnector loads the request's KV.

LMCache removes priority and decode instance (`disagg_spec`) at admission, but not when vLLM resumes a request.

Fix: When a request ends, the scheduler drops the LoadSpec, priority, `disagg_spec` and hit. The workers drop the pins.
- Upstream: https://github.com/LMCache/LMCache/pull/4512 is open (pins only).
- Remove when: `request_finished` and `get_finished` release everything that the fix releases.
"""

from kvfix.fixes.api import LMCACHE_V1, Any, Fix, fix_after, note, stubs


def _kept(impl: Any) -> Any:
    """Return the three dicts in which LMCache may leave an entry of an ended request. The keys are request ids."""
    return impl.load_specs, impl._requests_priority, LMCACHE_V1.imported.tmp_disagg_tracker


@fix_after(when=lambda impl, answer, request, *_, **__: any(request.request_id in each for each in _kept(impl)))
def fix_scheduler(impl: Any, answer: Any, request: Any, block_ids: Any) -> None:
    name = request.request_id
    note(__name__, f"request {name} has ended before it was admitted")
    for each in _kept(impl):
        each.pop(name, None)
    # With async loading, `request_finished` cancels the lookup. LMCache drops the lookup when the result arrives.
    if impl.lookup_client is not None and not getattr(impl, "async_loading", False):
        impl.lookup_client.clear_lookup_status(name)


@fix_after(when=lambda impl, answer, finished_req_ids, *_, **__: finished_req_ids)
def fix_worker(impl: Any, answer: Any, finished_req_ids: Any) -> None:
    # With asynchronous loading, `lookup_unpin` also releases the chunks that the lookup has fetched.
    engine = impl.lmcache_engine
    if engine is not None:
        for name in finished_req_ids:
            engine.lookup_unpin(name)


def scheduler_shows_bug(hook: Any, adapter: Any) -> bool:
    """End a request that has not used its LoadSpec. With the bug, the LoadSpec stays."""
    impl = stubs.scheduler_side(lookup_client=stubs.Nothing(), load_specs={stubs.NAME: object()})
    hook(impl, stubs.request(16), [])
    return stubs.NAME in impl.load_specs


def worker_shows_bug(hook: Any, adapter: Any) -> bool:
    """Tell the worker that a request has ended. With the bug, the worker does not unpin the request's chunks."""
    unpin = stubs.Calls()
    hook(stubs.Stub(lmcache_engine=stubs.Stub(lookup_unpin=unpin), async_loading=False), {stubs.NAME})
    return not unpin


FIX = Fix(
    LMCACHE_V1.request_finished(broken=">=0.3.9", probe=scheduler_shows_bug, fix=fix_scheduler, order=2),
    LMCACHE_V1.get_finished(broken=">=0.3.9", probe=worker_shows_bug, fix=fix_worker),
    effect="leak",
    evidence={
        "KVD401": "",
        "KVR009": r"^(load_specs|tmp_disagg_tracker|_request_trackers|_unfinished_requests|_requests_priority"
        r"|lookup_client\.reqs_status) |^(pins|fetched chunks) of the worker ",
    },
    scenarios=(
        "abort-while-waiting", "async-abort-while-other-loads", "decoder-left-after-resume",
        "priority-left-after-resume", "reused-id-gets-dead-hit",
    ),
)  # fmt: skip
