"""The worker leaks the id of every ended request, and a request that reuses an id never frees its blocks.

Symptom: The memory of each worker grows by 100 to 150 bytes per request. If a client can choose request ids and uses an
id again, vLLM never frees the blocks of the second request, and the KV cache fills up.

Cause: The adapter keeps all ids that were reported as done (`_returned_finished`, vllm_multi_process_adapter.py
0.5.6:2034). With asynchronous scheduling two steps may ask about one id, but the adapter must report an id only once.

Fix: The fix keeps only the last 33 to 66 ids. If more requests end in one step, the fix keeps all ids of this step.
- Releases: LMCache 0.4.3 to 0.5.6, with its own connector and with vLLM's copy.
- Upstream: https://github.com/LMCache/LMCache/issues/5339 (open), https://github.com/LMCache/LMCache/pull/5363 (open),
  https://github.com/local-inference-lab/vllm/pull/525 (a fork whose review found the bug first).
- Remove when: `_returned_finished` is emptied.
"""

from collections import deque

from kvfix.fixes.api import MP_WORKER_ADAPTER, Any, Fix, fix_after, note, stubs

KEPT = 32


class Recent(set[str]):
    """A set that forgets ids. After more than KEPT new ids, the old ids are dropped, and the new ids become old."""

    old: frozenset[str] = frozenset()

    def __contains__(self, request_id: object) -> bool:
        if len(self) > KEPT:  # checked here and not in `update`, so that the ids of the last `update` remain
            note(__name__, f"{len(self.old)} ids of ended requests are dropped")
            self.old = frozenset(self)
            self.clear()
        return super().__contains__(request_id) or request_id in self.old


@fix_after()
def fix(adapter: Any, answer: None, *_: Any, **__: Any) -> None:
    adapter._returned_finished = Recent()


def shows_bug(hook: Any, module: Any) -> bool:
    """End one request in each of 128 steps. With the bug, the set that `__init__` makes keeps all ids."""
    adapter = stubs.Stub(
        finished_stores=set(), store_futures={}, previously_finished=set(), _returned_finished=set(),
        _returned_finished_steps=deque(),  # patches/upstream/mp-ended-ids-kept adds this attribute
        _update_and_get_finished_store=set,
    )  # fmt: skip
    for number in range(4 * KEPT):
        module.LMCacheMPWorkerAdapter._process_finished_stores(adapter, set(), {str(number)})
    return len(set(adapter._returned_finished)) == 4 * KEPT


FIX = Fix(
    MP_WORKER_ADAPTER.target("__init__", broken=">=0.4.3", probe=shows_bug, fix=fix),
    effect="wrong output",
    evidence={"KVR009": r"^worker_adapter\._returned_finished "},
    scenarios=("mp-ended-ids-kept", "mp-ended-ids-kept-in-tree"),
)
