"""Code that the fixes for MooncakeConnector share."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

from kvfix.fixes.api import Any, engine_log, stubs

#: Keys of `kv_transfer_params` by which a decode request names its prefill request.
PEER = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")


def settled(worker: Any) -> set[str]:
    """Return the ids of the loads that have ended or failed in the current asyncio task. Fixes add ids to this set."""
    known: set[str] = set()
    with suppress(RuntimeError):  # no event loop runs
        if (task := asyncio.current_task()) is not None:
            known = vars(worker).setdefault("_kvfix_settled", WeakKeyDictionary()).setdefault(task, known)
    return known


def in_sender(worker: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Run a fix's function in the worker's `sender_loop`. If the function raises, kvfix logs the error."""
    where = f"{function.__module__}.{function.__name__}"
    worker.sender_loop.call_soon_threadsafe(engine_log.guarded, where, function, *arguments)


def scheduler_side(role: str, **more: Any) -> Any:
    """Return a stub of MooncakeConnector's scheduler for probes. `more` adds or replaces attributes."""
    return stubs.stub(
        more, kv_role=role, is_kv_producer=role == "kv_producer", is_kv_consumer=role == "kv_consumer", block_size=16,
        _get_remote_prefill_token_count=lambda tokens: tokens, get_sw_clipped_blocks=lambda blocks: list(blocks),
        _reqs_need_recv={}, _reqs_need_send={}, _reqs_not_processed=set(),
    )  # fmt: skip


def finished_prefill(tokens: int, status: Any, **more: Any) -> Any:
    """Return, for probes, a request that has ended on the prefill instance. Decode will read the request's blocks."""
    params = {"do_remote_decode": True, "transfer_id": "t"}
    return stubs.request(tokens, kv_transfer_params=params, status=status, **more)
