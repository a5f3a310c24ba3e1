"""A decode request waits for minutes or for ever: MooncakeConnector lets two decode requests read one prefill.

Symptom: A router sends a decode request again with the same transfer_id, or a client asks for several outputs (`n`).
The second request takes eight minutes, or stays in WAITING_FOR_REMOTE_KVS. Prefill logs `Request ... expired before
sending on P side`, or nothing.

Cause: Prefill frees the blocks when one request has read all blocks (mooncake_connector.py 0.32.0:1688), even while a
second request reads. The second request then gets KV of other requests. A decode request that is aborted before its
admission also counts as a reader. If the second request comes after the blocks are free, prefill waits 480 s for a new
prefill request with this transfer_id (:1567). If prefill frees the blocks while the second request waits, prefill's
answer does not name the second request (:1628). Decode then waits for ever.

Fix: In each decode engine, only the first request with a transfer_id reads blocks. A later request with the same
remote_engine_id and transfer_id computes its prompt itself. Even if a later request is aborted, prefill gets no notice.
The fix does not know the requests of other decode engines. So a router must send a retried request to prefill again.
- Releases: vLLM 0.32.0. Earlier releases were not tested. In 0.33.0 (source read only), the second request times out.
- Remove when: Prefill refuses the second read.
"""

from kvfix.fixes import _mooncake, _prefills
from kvfix.fixes.api import MOONCAKE_SCHEDULER, Any, Fix


def _prefill(connector: Any, params: Any) -> tuple[Any, ...] | None:
    prefill = params.get("remote_engine_id"), params.get("transfer_id")
    return prefill if all(isinstance(each, str) for each in prefill) else None


# Without `end_once`, an abort of the second request makes prefill free blocks that the first request still reads.
promise_once, end_once = _prefills.for_the_first(_prefill)


def shows_bug(hook: Any, module: Any) -> bool:
    """Look up two decode requests for one prefill request. With the bug, both decode requests get prefill's tokens."""
    connector, peer = _mooncake.scheduler_side("kv_consumer"), dict.fromkeys(_mooncake.PEER, "p")
    return _prefills.promised_twice(hook, connector, **peer)


FIX = Fix(
    MOONCAKE_SCHEDULER.get_num_new_matched_tokens(broken=">=0.32", probe=shows_bug, fix=promise_once, order=1),
    MOONCAKE_SCHEDULER.request_finished(broken=">=0.32", fix=end_once, order=-1, helper=True),
    effect="hang",
    scenarios=("mooncake-decode-reads-twice", "mooncake-second-reader-aborted"),
    no_patch={"vllm": "prefill has to refuse the second read"},
)
