"""Shared code of MooncakeConnector's fixes: which loads of a message have ended, calls in the sender's loop, stubs."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

from kvfix.fixes.api import Any, engine_log, stubs

#: The parameters of a request that name its peer.
PEER = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")


def settled(worker: Any) -> set[str]:
    """Return the loads of the current task's message that have ended. Fixes add loads to this set."""
    known: set[str] = set()
    with suppress(RuntimeError):  # no event loop runs
        if (task := asyncio.current_task()) is not None:
            known = vars(worker).setdefault("_kvfix_settled", WeakKeyDictionary()).setdefault(task, known)
    return known


def in_sender(worker: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Run code of a fix in the loop of the sender. An error is logged."""
    where = f"{function.__module__}.{function.__name__}"
    worker.sender_loop.call_soon_threadsafe(engine_log.guarded, where, function, *arguments)


def scheduler_side(role: str, **more: Any) -> Any:
    """For probes: return the attributes that MooncakeConnector's scheduler reads; `more` adds or replaces some."""
    return stubs.stub(
        more, kv_role=role, is_kv_producer=role == "kv_producer", is_kv_consumer=role == "kv_consumer", block_size=16,
        _get_remote_prefill_token_count=lambda tokens: tokens, get_sw_clipped_blocks=lambda blocks: list(blocks),
        _reqs_need_recv={}, _reqs_need_send={}, _reqs_not_processed=set(),
    )  # fmt: skip


def finished_prefill(tokens: int, status: Any, **more: Any) -> Any:
    """For probes: return an ended request of a prefill engine. Decode asks for this request."""
    params = {"do_remote_decode": True, "transfer_id": "t"}
    return stubs.request(tokens, kv_transfer_params=params, status=status, **more)
