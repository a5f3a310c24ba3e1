"""A decode engine returns wrong text: NixlConnector reads blocks after their lease has ended.

Symptom: The prefill engine logs `Releasing expired KV blocks for request ...`, and `Potentially invalid KV blocks for
unrecognized request ... were retrieved by a decode worker. They may have expired.` The decode engine logs nothing.

Cause: The prefill engine keeps the blocks for `kv_lease_duration` (30 s by default), and longer if the decode engine
renews the lease with heartbeats (base_worker.py 0.32.0:3042). If the router or the decode engine hangs for longer than
the lease, the prefill engine frees the blocks. The decode engine does not know when the lease ends. vLLM sets
`remote_blocks_expiry_time` only if prefill reads from decode (pull_scheduler.py 0.32.0:269). NIXL ignores leases.

Fix: With the fix, the prefill engine tells the decode engine when the lease ends. The decode engine moves this end when
its heartbeats renew the lease. If a read ends after the lease, the fix reports a failed load, and vLLM applies
`kv_load_failure_policy`. With `bidirectional_kv_xfer`, vLLM checks the time itself, and the fix does nothing.

Mixed roll-out: Use the fix in the prefill and the decode engine, or in neither. Otherwise, the decode engine still
reads blocks whose lease has ended. The prefill engine adds `remote_blocks_expiry_time` to the returned
`kv_transfer_params`. The router must pass this key on. A decode engine with `bidirectional_kv_xfer` declines reads
after the time in this key, even if heartbeats renewed the lease. So both engines need the same `bidirectional_kv_xfer`.
- Remove when: vLLM fails a read that ends after its lease.
"""

from kvfix.fixes import _closed, _nixl, api
from kvfix.fixes.api import NEW_REQUESTS, Any, Fix, Steps, View, fix_after, fix_around, replaced

#: Heartbeats sent in a lease's last MARGIN seconds do not count. A late heartbeat may arrive after the lease's end.
MARGIN = 1.0


def _ended(connector: Any, answer: tuple[bool, Any], *_: Any, **__: Any) -> tuple[bool, Any]:
    """Report the lease as ended. A decode engine with this fix then counts no block as loaded."""
    return answer[0], {**answer[1], "remote_blocks_expiry_time": 0.0} if answer[1] else answer[1]


@fix_after(when=lambda impl, answer, *_: answer[0] and not impl.is_bidirectional_kv_xfer_enabled, on_fault=_ended)
def request_finished(connector: Any, answer: tuple[bool, Any], request: Any, *_: Any) -> None:
    # A returned result would count as an action of the fix. But the fix acts only later, in the decode engine.
    answer[1]["remote_blocks_expiry_time"] = connector._reqs_need_send[request.request_id]


@fix_around(when=lambda worker, meta: meta.heartbeat_by_engine, on_fault=_closed.set_to("_kvfix_heartbeats", {}))
def _send_heartbeats(worker: Any, metadata: Any) -> Steps:
    """For each request that waits for a load, record when heartbeats were sent."""
    now, agent, not_sent = _nixl.now(), worker.nixl_wrapper, set()

    def send_notif(*args: Any, **kwargs: Any) -> Any:
        try:
            return agent.send_notif(*args, **kwargs)
        except Exception:
            not_sent.add(kwargs.get("notif_msg"))
            raise

    with replaced(worker, nixl_wrapper=View(agent, send_notif=send_notif)):
        yield
    before_that = getattr(worker, "_kvfix_heartbeats", {})
    waiting = {meta.remote.request_id for meta in worker._recving_metadata.values()}
    sent = {name: times for name, times in before_that.items() if name in waiting}
    for engine, info in metadata.heartbeat_by_engine.items():
        is_sent = engine in worker._remote_agents and f"HB:{','.join(info.req_ids)}".encode() not in not_sent
        for name in info.req_ids:
            times = before_that.get(name, ())
            sent[name] = (*times, now) if is_sent else times
    worker._kvfix_heartbeats = sent


def _all_fail(worker: Any, answer: tuple[set[str], set[str]], transfers: Any, *_: Any, **__: Any) -> Any:
    done, failed = answer
    return (done, failed | done) if transfers is worker._recving_transfers else answer


@fix_after(when=lambda worker, answer, *_: answer[0] and not worker._bidirectional_kv_xfer_enabled, on_fault=_all_fail)
def _pop_done_transfers(worker: Any, answer: tuple[set[str], set[str]], transfers: Any) -> Any:
    done, failed = answer
    if transfers is not worker._recving_transfers:
        return answer
    late = {name for name in done - failed if _too_late(worker, name, _nixl.now())}
    return (done, failed | late) if late else answer


def _too_late(worker: Any, name: str, now: float) -> bool:
    meta = worker._recving_metadata.get(name)
    end = meta.remote.blocks_expiry_time if meta is not None else None
    offset = worker._engine_clock_offset.get(meta.remote.engine_id) if end is not None else None
    if end is None or offset is None:
        return False
    until = end - offset
    for sent in getattr(worker, "_kvfix_heartbeats", {}).get(meta.remote.request_id, ()):
        if sent + MARGIN < until:
            until = max(until, sent + worker._lease_extension)
    return bool(now >= until)


def shows_bug(hook: Any, module: Any) -> bool:
    """End a prefill. With the bug, the returned parameters lack the end of the lease."""
    _, params = hook(_nixl.scheduler_side(), _nixl.finished_prefill(8), ([1],))
    return params.get("remote_blocks_expiry_time") is None


FIX = Fix(
    api.NIXL_PULL_SCHEDULER.request_finished(broken=">=0.32", order=1, probe=shows_bug, fix=request_finished),
    api.NIXL_BASE_WORKER._send_heartbeats(broken=">=0.32", fix=_send_heartbeats, helper=True),
    api.NIXL_BASE_WORKER._pop_done_transfers(broken=">=0.32", fix=_pop_done_transfers, helper=True),
    effect="wrong output",
    evidence={"KVR017": ""},
    attaches=NEW_REQUESTS,
    no_patch={"vllm": "all routers would have to pass on a parameter with the end of the lease"},
    opt_in=True,
)
