"""Decode waits eight minutes for an aborted prefill and holds blocks: MooncakeConnector does not report the abort.

Symptom: The decode engine keeps the blocks of the request for VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (480 s). Both engines
then log `Timeout waiting for P side ready`. The prefill engine may keep transfers of ended requests for ever.

Cause: When a prefill is aborted, its worker drops the transfer, and does not tell the decode engine that waits for the
transfer (mooncake_connector.py 0.32.0:2584). If the prefill was aborted before it was scheduled, the worker has no
transfer. The worker's `pop` then raises KeyError in a coroutine that no code awaits. The worker then fails to drop the
remaining transfers of this step. If a preemption has already freed the prefill's blocks, the scheduler does not tell
the worker that the prefill has ended (:1160).

Fix: If a decode request waits for the dropped transfer, or asks for it before the timeout, the prefill worker reports
the transfer as failed. In the decode engine, kv_load_failure_policy then decides whether the request fails or vLLM
computes its prompt.
- Releases: vLLM 0.20.2 to 0.33.0. 0.32.0 and 0.33.0 were tested. For the other releases, only the code was read.
- Remove when: The worker reports an aborted prefill to the decode requests that wait for it.
"""

import asyncio

from kvfix.fixes import _mooncake, api
from kvfix.fixes.api import NEW_REQUESTS, Any, Fix, Steps, View, fix_after, fix_around, note, stubs


@fix_around(when=lambda worker, metadata: metadata.reqs_not_processed and not worker.is_kv_consumer)
def start_load_kv(worker: Any, metadata: Any) -> Steps:
    for transfer in metadata.reqs_not_processed:
        _mooncake.in_sender(worker, _drop, worker, transfer)
    return (yield (View(metadata, reqs_not_processed=set()),))


@fix_after()
def request_finished(connector: Any, answer: tuple[bool, Any], request: Any, *_: Any) -> None:
    """Tell the worker about a prefill whose blocks are not sent."""
    params = request.kv_transfer_params or {}
    asked = params.get("do_remote_decode") and isinstance(params.get("transfer_id"), str)
    if asked and not answer[0] and not connector.is_kv_consumer:
        connector._reqs_not_processed.add(params["transfer_id"])


def _drop(worker: Any, transfer: str) -> None:
    """Drop the transfer in the sender's event loop. The sender reports a ready transfer without blocks as failed."""
    module = api.MOONCAKE_WORKER.imported
    dropped = worker.reqs_need_send.get(transfer)
    if dropped is None:
        dropped = worker.reqs_need_send[transfer] = module.SendBlockMeta(
            p_req_id="", transfer_id=transfer, local_block_ids=[], ready=asyncio.Event()
        )
    elif dropped.ready.is_set():  # the transfer has blocks to send, or was dropped before
        return
    # vLLM removes an entry when its `sent` reaches `need_send`. This entry must stay until `_forget` removes it.
    dropped.p_req_id, dropped.local_block_ids, dropped.need_send = "", [], 1 << 30
    dropped.ready.set()
    note(__name__, f"prefill reports the aborted transfer {transfer} as failed")
    worker.sender_loop.call_later(module.envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, _forget, worker, dropped)


def _forget(worker: Any, dropped: Any) -> None:
    """Forget the dropped transfer at the timeout, unless a later prefill has added its blocks to the same entry."""
    if not dropped.local_block_ids and worker.reqs_need_send.get(dropped.transfer_id) is dropped:
        del worker.reqs_need_send[dropped.transfer_id]


def shows_bug(hook: Any, module: Any) -> bool:
    """Abort a prefill that the worker does not know. With the bug, the hook raises KeyError, or decode waits."""
    worker = stubs.Stub(reqs_need_send={}, sender_loop=stubs.Stub(call_later=lambda *_: None))
    steps = hook(worker, stubs.Stub(reqs_to_send={}, reqs_not_processed={"t"}))
    try:
        steps.send(None)
    except KeyError:
        return True
    except StopIteration:
        sent = worker.reqs_need_send.get("t")
        return sent is None or not sent.ready.is_set()
    finally:
        steps.close()
    raise ValueError("the probe expects that record_send_reqs does not wait")


FIX = Fix(
    api.MOONCAKE_WORKER.record_send_reqs(broken=">=0.20", probe=shows_bug, fix=None),
    api.MOONCAKE_WORKER.start_load_kv(broken=">=0.20", fix=start_load_kv, helper=True),
    api.MOONCAKE_SCHEDULER.request_finished(broken=">=0.20", fix=request_finished, order=3, helper=True),
    effect="hang",
    attaches=NEW_REQUESTS,
)
