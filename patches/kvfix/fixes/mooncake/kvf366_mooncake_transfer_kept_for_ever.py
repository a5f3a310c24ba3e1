"""The prefill worker's memory grows: MooncakeConnector keeps transfers whose prefill request never comes.

Symptom: The memory grows by less than a kilobyte for each decode request that comes after its prefill's timeout, or
that names a wrong transfer_id. The log has only `Timeout waiting for P side ready`.

Cause: If a decode request's transfer has no entry in reqs_need_send, the prefill worker adds an entry
(mooncake_connector.py 0.32.0:1567). When the wait for the prefill times out, no code removes the entry (:1594).

Fix: The fix removes an entry that has no prefill and no waiting request. If a prefill comes later for an entry that
still exists, the fix writes the prefill's request id into the entry, so that the entry stays.
- Releases: vLLM 0.20.2 to 0.33.0. 0.32.0 and 0.33.0 were tested. For the other releases, only the code was read.
- Remove when: vLLM removes the entry at the timeout.
"""

from kvfix import clock
from kvfix.fixes import _mooncake
from kvfix.fixes.api import MOONCAKE_WORKER, Any, Fix, fix_before, note

#: Seconds between checks. An entry without a waiter stays until the second check, because a new entry has none yet.
_PAUSE = 0.25


@fix_before(when=lambda worker: not worker.is_kv_consumer and worker.reqs_need_send)
def get_finished(worker: Any) -> None:
    if clock.now() - vars(worker).get("_kvfix_looked", -_PAUSE) >= _PAUSE:
        worker._kvfix_looked = clock.now()
        _mooncake.in_sender(worker, _look, worker)


@fix_before(when=lambda worker, metadata: metadata.reqs_to_send and not worker.is_kv_consumer)
def start_load_kv(worker: Any, metadata: Any) -> None:
    names = [(transfer, name) for name, (transfer, _) in metadata.reqs_to_send.items()]
    _mooncake.in_sender(worker, _name, worker, names)


def _name(worker: Any, names: list[tuple[str, str]]) -> None:
    """Write each prefill request's id into its entry, in the sender's event loop, before `record_send_reqs` runs."""
    for transfer, name in names:
        sent = worker.reqs_need_send.get(transfer)
        if sent is not None and not sent.p_req_id:
            sent.p_req_id = name


def _look(worker: Any) -> None:
    left = {
        name
        for name, sent in worker.reqs_need_send.items()
        if not sent.p_req_id and not sent.ready.is_set() and not sent.ready._waiters
    }
    for name in left & vars(worker).get("_kvfix_left", set()):
        note(__name__, f"the transfer {name} is dropped")
        del worker.reqs_need_send[name]
    worker._kvfix_left = left


FIX = Fix(
    MOONCAKE_WORKER.send_kv_to_decode(broken=">=0.20", fix=None),
    MOONCAKE_WORKER.get_finished(broken=">=0.20", fix=get_finished, helper=True),
    MOONCAKE_WORKER.start_load_kv(broken=">=0.20", fix=start_load_kv, order=1, helper=True),
    effect="leak",
)
