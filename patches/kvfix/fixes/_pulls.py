"""Remember which loads of one message to a prefill rank have ended, in MooncakeConnector. For KVF365 and KVF369."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakKeyDictionary


def settled(worker: Any) -> set[str]:
    """Return the names of the ended loads of this message. Each message to a rank has its own coroutine."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    known: set[str] = set()
    if task is not None:
        known = vars(worker).setdefault("_kvfix_settled", WeakKeyDictionary()).setdefault(task, known)
    return known
