"""EngineCore dies or returns wrong text: MooncakeConnector reports loads as failed after they have ended, or too early.

Symptom: Minutes after the prefill engine has ended, EngineCore of the decode engine dies with `assert req_id in
self.requests` in `_update_from_kv_xfer_finished`. With KVF201, running requests fail or start again instead. The log
has `pulling kv_caches for [...] failed: transfer failed: Resource temporarily unavailable`, and names ended requests.
If several prefill ranks write to one decode rank, requests return wrong text after a load that failed at one rank.

Cause: Decode sends each prefill rank one message for all loads of a step. If the connection of the message fails,
decode reports all loads in the message as failed (mooncake_connector.py 0.32.0:2370), even loads whose KV is written.
The first rank that fails ends the load (:2402), and vLLM frees the blocks while other ranks still write into them.

Fix: The fix reports a load as failed only after all ranks have reported, and counts at most one report of each rank.
- Releases: vLLM 0.32.0, the first release that reports failed loads.
"""

from collections.abc import Collection

from kvfix.fixes import _mooncake
from kvfix.fixes.api import MOONCAKE_WORKER, Any, Fix, Steps, View, fix_around, stubs

#: A load that has failed at one rank keeps the reason in this attribute until all ranks have reported.
_REASON = "_kvfix_reason"


@fix_around()
def handle_failed_recv(worker: Any, metas: dict[str, Any], names: Collection[str], reason: str) -> Steps:
    settled, last = _mooncake.settled(worker), []
    for name in names:
        meta = metas.get(name)
        if meta is None or name in settled:
            continue
        settled.add(name)
        if meta.pull_tasks_count > 1:
            meta.pull_tasks_count -= 1
            setattr(meta, _REASON, reason)
        else:
            last.append(name)
    if list(names) == last:
        return (yield)
    return (yield (metas, last, reason))


@fix_around(when=lambda worker, response, metas: response.ok_reqs)
def process_pulling_result(worker: Any, response: Any, metas: dict[str, Any]) -> Steps:
    written = []
    for name in response.ok_reqs:
        meta = metas.get(name)
        if meta is not None and meta.pull_tasks_count == 1 and hasattr(meta, _REASON):
            worker._handle_failed_recv(metas, [name], getattr(meta, _REASON))
        else:
            written.append(name)
    _mooncake.settled(worker).update(written)
    if len(written) == len(response.ok_reqs):
        return (yield)
    return (yield (View(response, ok_reqs=written), metas))


def shows_bug(hook: Any, module: Any) -> bool:
    """Let the load fail at one of two ranks. With the bug, the load is reported before the second rank has ended."""
    ended: set[str] = set()
    worker = stubs.Stub(
        xfer_stats=stubs.Stub(record_failed_recv=lambda: None), _is_hma_required=False,
        _invalid_block_ids=stubs.Stub(put=lambda blocks: None), finished_recving_reqs=ended,
        _complete_pull_task=lambda meta: None,
    )  # fmt: skip
    meta = module.PullReqMeta("r", "t", [[1]], "p", "http://p:1", pull_tasks_count=2)
    hook(worker, {"r": meta}, ["r"], "kvfix tests whether a failed load is reported too early")
    return bool(ended)


FIX = Fix(
    MOONCAKE_WORKER._handle_failed_recv(broken=">=0.32,<0.33", probe=shows_bug, fix=handle_failed_recv),
    MOONCAKE_WORKER.process_pulling_result(broken=">=0.32,<0.33", fix=process_pulling_result, order=1, helper=True),
    effect="wrong output",
    # If the fix raises, vLLM's own function reports the loads. A request whose load is not reported waits for ever.
    on_fault="original",
    no_patch={"vllm": "vLLM 0.33.0 does not have this bug"},
)
