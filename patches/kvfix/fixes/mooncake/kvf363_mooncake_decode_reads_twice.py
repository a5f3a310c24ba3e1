"""A decode request waits for minutes or for ever: MooncakeConnector lets two decode requests read one prefill.

Symptom: A router sends a decode request again with the same transfer_id, or a client asks for several outputs (`n`).
The second request takes eight minutes, or stays in WAITING_FOR_REMOTE_KVS. Prefill logs `Request ... expired before
sending on P side`, or nothing.

Cause: Prefill frees the blocks when it has sent them to one request (mooncake_connector.py 0.32.0:1688), even while it
sends them to a second request. The second request then gets KV of other requests. A request that is aborted before it
is scheduled also counts as a reader. If the second request comes after the blocks are free, prefill waits 480 s for a
new prefill request with this transfer_id (:1567). If prefill frees the blocks while the second request waits, prefill's
answer does not name this request (:1628). Decode then waits for ever.

Fix: In each decode engine, only the first request with a transfer_id reads blocks. A later request with the same
remote_engine_id and transfer_id computes its prompt itself, and sends prefill no notice, even when it is aborted. The
fix does not know what other engines have read. So a router that retries a request must send it to prefill again.
- Releases: vLLM 0.32.0. Earlier releases were not tested. In 0.33.0 (source read only), the second request times out.
- Remove when: Prefill refuses the second read.
"""

from kvfix.fixes import _mooncake, _prefills
from kvfix.fixes.api import MOONCAKE_SCHEDULER, Any, Fix


def _prefill(connector: Any, params: Any) -> tuple[Any, ...] | None:
    prefill = params.get("remote_engine_id"), params.get("transfer_id")
    return prefill if all(isinstance(each, str) for each in prefill) else None


# Without the second wrapper, an abort of the second request makes prefill free blocks that the first request reads.
promise_once, end_once = _prefills.for_the_first(_prefill)


def shows_bug(hook: Any, module: Any) -> bool:
    """Look up two requests for one prefill. With the bug, the connector promises tokens to both requests."""
    connector, peer = _mooncake.scheduler_side("kv_consumer"), dict.fromkeys(_mooncake.PEER, "p")
    return _prefills.promised_twice(hook, connector, **peer)


FIX = Fix(
    MOONCAKE_SCHEDULER.get_num_new_matched_tokens(broken=">=0.32", probe=shows_bug, fix=promise_once, order=1),
    MOONCAKE_SCHEDULER.request_finished(broken=">=0.32", fix=end_once, order=-1, helper=True),
    effect="hang",
    scenarios=("mooncake-decode-reads-twice", "mooncake-second-reader-aborted"),
    no_patch={"vllm": "prefill has to refuse the second read"},
)
