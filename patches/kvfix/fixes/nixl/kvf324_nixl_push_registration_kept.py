"""The prefill worker's memory grows: NixlPushConnector keeps registrations of requests that it does not have.

## Symptom
With NixlPushConnector the memory of the prefill engine's worker grows with some requests of the decode engine. These
are requests whose prefill was aborted, or had ended before the registration came, or whose KV was pushed to another
request.

## Cause
A registration that comes before its request has ended waits in `_pending_d_registrations`, under the decode engine's id
of the request. The worker drops it by the prefill engine's id (push_worker.py 0.32.0:276, `_evict_finished_inbox`). The
two ids end differently (`-` and eight digits), so the worker never drops it.

The worker compares ids without this suffix (:413). So it writes the KV of a later request with the same id into the
blocks of the old registration, and the later request's own registration waits.

## Fix
In get_transfer_results the fix drops a registration that has waited for `push_registration_timeout`. The decode engine
has dropped it by then.

## Releases
vLLM 0.32.0 and 0.33.0. Earlier releases were not tested.

## Upstream
None known.

## Remove when
vLLM drops registrations for which nothing is pushed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from kvfix.acting import note
from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import NIXL_PUSH_WORKER
from kvfix.wrapping import before


def fix(module: ModuleType) -> Callable[..., Any]:
    def get_transfer_results(worker: Any) -> None:
        now, waiting = module.time.perf_counter(), list(worker._pending_d_registrations)
        known = getattr(worker, "_kvfix_came", {})
        worker._kvfix_came = came = {name: known.get(name, now) for name in waiting}
        for name, at in came.items():
            if now - at > _timeout(worker):
                note(__name__, f"the registration of request {name} is dropped")
                worker._evict_finished_inbox.put(name)  # the thread that has them drops it

    return before(get_transfer_results, when=lambda worker: worker._pending_d_registrations)


def _timeout(worker: Any) -> float:
    extra = worker.vllm_config.kv_transfer_config.get_from_extra_config
    return float(extra("push_registration_timeout", extra("decoder_kv_blocks_ttl", 480)))


FIX = Fix(
    __name__,
    __doc__,
    effect="wrong output",
    targets=(NIXL_PUSH_WORKER.get_transfer_results(broken=">=0.32", place=1, probe=stubs.cannot_tell, fix=fix),),
    evidence={"LAB022": ""},
    scenarios=("nixl-push-registration-kept",),
)
