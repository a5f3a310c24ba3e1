"""The prefill worker's memory grows: NixlPushConnector keeps registrations of requests that it does not have.

Symptom: Memory grows with each decode request whose prefill is aborted, or whose KV expires or goes to another request.

Cause: A registration names the decode engine's blocks. Until the prefill ends, `_pending_d_registrations` keeps the
registration under decode's request id. To drop the registration, the worker uses prefill's request id (push_worker.py
0.32.0:276, `_evict_finished_inbox`). The two ids have different ends (`-` and eight hex digits), so the worker drops
nothing. To find a prefill's registration, the worker compares ids without the ends (:409). So the worker can write KV
of a later request with the same id into the blocks of the old registration. The later decode request gets no KV.

Fix: The fix drops a registration after `push_registration_timeout`. The decode engine's own timeout has ended by then.
- Remove when: vLLM drops registrations for which nothing is pushed.
"""

from kvfix.fixes import _nixl
from kvfix.fixes.api import NIXL_PUSH_WORKER, Any, Fix, fix_before, note


@fix_before(when=lambda worker: worker._pending_d_registrations)
def fix(worker: Any) -> None:
    now, waiting = _nixl.now(), list(worker._pending_d_registrations)
    known = getattr(worker, "_kvfix_came", {})
    extra = worker.vllm_config.kv_transfer_config.get_from_extra_config
    timeout = extra("push_registration_timeout", extra("decoder_kv_blocks_ttl", 480))
    worker._kvfix_came = came = {name: known.get(name, now) for name in waiting}
    for name, at in came.items():
        if now - at > float(timeout):
            note(__name__, f"the registration of request {name} is dropped")
            worker._evict_finished_inbox.put(name)  # the thread that owns the registrations drops the registration


FIX = Fix(
    NIXL_PUSH_WORKER.get_transfer_results(broken=">=0.32", order=1, fix=fix),
    effect="wrong output",
    evidence={"LAB022": ""},
)
