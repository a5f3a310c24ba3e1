"""Requests of a decode engine wait for ever: NixlPushConnector waits for blocks that no engine will push.

## Symptom
With NixlPushConnector, requests of the decode engine stay in WAITING_FOR_REMOTE_KVS and keep their blocks. The decode
engine logs `registration for request ... timed out after 480.0s without a push completion`. For an aborted request it
logs nothing. `GPU KV cache usage` rises, until no request runs.

## Cause
The decode engine sends the ids of its blocks to the prefill engine and waits. If the prefill engine cannot write to
these blocks, it never reports this. For example, the prefill engine may not have the request any more, because the
request was aborted or its lease is over. Other examples: the prefill engine served another request with the same id,
could not connect, could not write, or has ended. If the router sends requests to both engines at once, each engine may
also have a request that waits for the other engine's blocks.

After `push_registration_timeout`, build_connector_meta drops the registration and logs this (push_scheduler.py
0.32.0:297-330), but the worker continues to wait. vLLM keeps the blocks of an aborted request until the worker has an
answer (v1/core/sched/scheduler.py 0.32.0:2703).

## Fix
The fix adds an end time to the registration. After this time the prefill engine's worker begins no write. Five seconds
later the decode engine's worker reports the load as failed, and `kv_load_failure_policy` decides.

## Mixed roll-out
The prefill engine and the decode engine must both have the fix. In the prefill engine alone it changes nothing. In the
decode engine alone it can be worse than the released code. The decode engine then frees the blocks of a load that has
timed out, and a prefill engine without the fix may still write into them. Restart the prefill engines with the fix
first. Remove the fix from the decode engines first.

## Releases
vLLM 0.32.0 and 0.33.0. Earlier releases were not tested.

## Upstream
None known.

## Remove when
vLLM fails a load whose registration has timed out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.acting import note
from kvfix.fixes import _closed, stubs
from kvfix.fixes.api import NEW_REQUESTS, Fix
from kvfix.fixes.targets import NIXL_PUSH_SCHEDULER, NIXL_PUSH_WORKER
from kvfix.wrapping import after, around, before, instead

#: Of the registration: its end, by the clock of the decode engine's scheduler.
_UNTIL = "kvfix_until"
#: Seconds that a write which has begun by then is given.
_GRACE = 5.0


def names_the_end(module: ModuleType) -> Callable[..., Any]:
    def update_state_after_alloc(connector: Any, answer: None, request: Any, *_: Any) -> None:
        until = connector._push_registration_deadlines.get(request.request_id)
        registration = connector._push_pending_registrations[request.request_id]
        if until is not None:
            registration.setdefault(_UNTIL, until)
        return answer

    return after(
        update_state_after_alloc,
        when=lambda connector, answer, request, *_: request.request_id in connector._push_pending_registrations,
    )


def notes_the_end(module: ModuleType) -> Callable[..., Any]:
    def start_load_kv(worker: Any, metadata: Any) -> None:
        now = module.time.perf_counter()
        ends = vars(worker).setdefault("_kvfix_ends", {})
        for name, registration in metadata.push_registrations.items():
            if _UNTIL in registration:
                ends[name] = now + registration[_UNTIL] - (metadata.scheduler_clock or now)

    return before(start_load_kv, when=lambda worker, metadata: metadata.push_registrations)


def gives_up(module: ModuleType) -> Callable[..., Any]:
    def get_transfer_results(worker: Any) -> None:
        now = module.time.perf_counter()
        for name, until in list(worker._kvfix_ends.items()):
            if name not in worker._recving_metadata:
                del worker._kvfix_ends[name]
            elif now > until + _GRACE:
                del worker._kvfix_ends[name]
                note(__name__, f"request {name}: its load has timed out")
                worker._failed_recv_reqs.put(name)

    return before(get_transfer_results, when=lambda worker: getattr(worker, "_kvfix_ends", None))


def begins_in_time(module: ModuleType) -> Callable[..., Any]:
    def _do_start_push_kv(
        worker: Any, request_id: str, local_block_ids: Any, registration_data: Any
    ) -> Generator[Any, Any, Any] | None:
        offset = worker._engine_clock_offset.get(registration_data["decode_engine_id"])
        if offset is None or module.time.perf_counter() < registration_data[_UNTIL] - offset:
            return None  # without an offset it connects first, and comes again
        if request_id in worker._reqs_to_process:  # else its lease is over
            worker._push_finished_blocks.setdefault(request_id, local_block_ids)  # for another one
        return instead(None)

    return around(
        _do_start_push_kv,
        when=lambda worker, request_id, local_block_ids, registration_data: _UNTIL in registration_data,
        on_fault=_closed.nothing,  # nothing is written; the decode engine gives up at its timeout
    )


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A registration. Wrong is that it does not name its end."""
    blocks = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: ([1],))
    connector = stubs.push_decode()
    params = {
        "do_remote_prefill": True, "remote_engine_id": "p", "remote_host": "p", "remote_port": 1, "tp_size": 1,
    }  # fmt: skip
    hook(connector, stubs.request(8, kv_transfer_params=params), blocks, 8)
    known = {
        "request_id", "decode_engine_id", "decode_host", "decode_port", "decode_tp_size", "local_block_ids",
        "remote_engine_id", "remote_host", "remote_port", "remote_tp_size", "remote_pp_size",
    }  # fmt: skip
    return not set(next(iter(connector._push_pending_registrations.values()))) - known


FIX = Fix(
    __name__,
    __doc__,
    effect="hang",
    targets=(
        NIXL_PUSH_SCHEDULER.update_state_after_alloc(broken=">=0.32", probe=shows_bug, fix=names_the_end),
        *(
            getattr(NIXL_PUSH_WORKER, name)(broken=">=0.32", probe=stubs.cannot_tell, fix=fix, helper=True)
            for name, fix in (
                ("start_load_kv", notes_the_end),
                ("get_transfer_results", gives_up),
                ("_do_start_push_kv", begins_in_time),
            )
        ),
    ),
    evidence={
        "KVD688": "",
        "KVR009": r"^_recving_metadata ",
        "LAB003": "WAITING_FOR_REMOTE_KVS",
        "LAB020": "of the decode engine",
    },
    scenarios=(
        "nixl-push-never-arrives",
        "nixl-push-abort-keeps-blocks",
        "nixl-push-engines-wait-for-each-other",
    ),
    attaches=NEW_REQUESTS,
    no_patch={"vllm": "how long a write may take has to be agreed between both engines: a change of NIXL's messages"},
    opt_in=True,
    on_fault="closed",
)
