"""What a prefill rank has said of the loads in one message of MooncakeConnector's decode. Of KVF365 and KVF369."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakKeyDictionary


def settled(worker: Any) -> set[str]:
    """Names of the loads that are written or have failed, for the rank of this coroutine: each message has its own."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    known: set[str] = set()
    if task is not None:
        known = vars(worker).setdefault("_kvfix_settled", WeakKeyDictionary()).setdefault(task, known)
    return known
