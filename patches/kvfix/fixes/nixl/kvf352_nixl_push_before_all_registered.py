"""Decode dies or another request returns wrong text: NixlPushConnector writes to a rank that has not registered yet.

Symptom: In push mode, with more decode ranks than prefill ranks, the decode engine dies with `KeyError: ('<engine>',
0)` in `get_transfer_results`. Or a rank logs `push_reg_handshake_failed` and then `Unrecognized request ... notif (may
have expired).`, and another request returns wrong text with HTTP 200.

Cause: Each rank of the decode engine connects to the prefill engine by itself, and then registers its blocks. Prefill
takes the first registration and writes to all ranks (push_worker.py 0.32.0:308, :584). If a rank is still connecting
when the write is reported, the rank does not find its peer (base_worker.py 0.32.0:2940). If a rank could not connect,
the rank has freed its blocks. The freed blocks may belong to another request when prefill writes them.

Fix: A prefill rank begins to write only after all decode ranks that receive blocks have registered. If a rank never
registers, the decode engine waits for the blocks. With KVF322, the load fails when decode's registration times out.
- Releases: vLLM 0.26.0 to 0.33.0. 0.32.0 and 0.33.0 were tested. For the other releases, only the code was read.
- Remove when: vLLM writes to a rank only the blocks that this rank has registered.
"""

from contextlib import suppress

from kvfix.fixes import _closed, _nixl
from kvfix.fixes.api import NEW_REQUESTS, NIXL_PUSH_WORKER, Any, Fix, Steps, fix_around


@fix_around(on_fault=_closed.nothing)
def wait_for_all_ranks(worker: Any, notice: bytes) -> Steps:
    request, ranks = _registered(notice)
    needed = ranks // worker.world_size
    if needed > 1:
        came = vars(worker).setdefault("_kvfix_registered", {})
        came[request] = came.get(request, 0) + 1
        if came[request] < needed:
            while len(came) > 4096:  # forget the oldest requests
                del came[next(iter(came))]
            return None
        del came[request]
    return (yield)


def _registered(notice: bytes) -> tuple[str, int]:
    """Return the request id and the number of decode ranks in this registration, or ("", 0) if a value is missing."""
    module = NIXL_PUSH_WORKER.imported
    with suppress(module.msgspec.DecodeError, KeyError, TypeError):
        data = module.msgspec.msgpack.decode(notice[len(module.PUSH_REG_NOTIF_PREFIX) :])
        request, ranks = data["request_id"], data["decode_tp_size"]
        if isinstance(request, str) and isinstance(ranks, int):
            return request, ranks
    return "", 0


def shows_bug(hook: Any, module: Any) -> bool:
    """Handle the first of two registrations. With the bug, the write begins."""
    begun: list[Any] = []
    worker = _nixl.worker_side(_do_start_push_kv=lambda *arguments: begun.append(arguments))
    hook(worker, _nixl.registration(module, decode_tp_size=2))
    return bool(begun)


FIX = Fix(
    NIXL_PUSH_WORKER._handle_push_reg_notif(broken=">=0.26", order=1, probe=shows_bug, fix=wait_for_all_ranks),
    effect="wrong output",
    evidence={"KVR011": r"KeyError: \('", "KVR022": ""},
    scenarios=("nixl-push-before-all-registered", "nixl-push-notified-before-connected"),
    attaches=NEW_REQUESTS,
    no_patch={"vllm": "a fix needs the rank that sends a registration, but the message does not name the rank"},
)
