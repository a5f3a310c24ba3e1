"""What a running engine waits for, as plain data: `collect()` reads it in one of the engine's processes.

It reads and changes nothing: no lock, no import of what is not loaded, no call that waits, no exception. So it may run
between any two bytecodes of the main thread. Its modules import the standard library and each other, by relative names
alone: `kvfix look` brings them into a process that has no kvfix.

There are no tokens, prompts or names of hosts in it: counts, ids of requests, numbers of blocks and, with `full`,
hashes of blocks. None: not known. Times are seconds before the look.

    {"schema": 1, "pid": 1, "process": "EngineCore", "mono": 12, "wall": 34, "milliseconds": 2.1,
     "versions": {"vllm": "0.32.0", "lmcache": "0.5.6"},
     "kvfix": {"mode": "observe", "version": "0.1.0", "fixes": ["KVF001"]} or None,
     "stack": ["recv (zmq/sugar/socket.py:980)", ...],  of the main thread, the innermost first
     "hook": "get_num_new_matched_tokens",              of a connector on that stack; ""
     "in_step": True,                                   the scheduler is at work: its queues are not complete
     "scheduler": {...} or None,                        scheduler.py has its fields
     "connectors": [{...}],                             of the scheduler and of the worker: connectors.py
     "unread": {"scheduler": "AttributeError ..."}}     what could not be read, and why
"""

from __future__ import annotations

import os
import time

from . import connectors, places, recorded
from . import scheduler as schedulers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

#: Raised when a name changes its meaning or goes.
SCHEMA = 1


def collect(full: bool = False, scheduler: Any = None, workers: Sequence[Any] = ()) -> dict[str, Any]:
    """The state of this process.

    full: with the numbers and hashes of each request's blocks, from which the lab can build it again.
    scheduler, workers: the scheduler and the workers' connectors, where they are known; else they are looked for.
    """
    began = time.perf_counter()
    unread: dict[str, str] = {}

    def read(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001  the engine goes on whatever is wrong here
            unread[what] = places.where(error)
            return None

    frames = read("frames", places.frames) or []
    engine = None
    if scheduler is None:
        engine = read("engine", places.engine, frames)
        scheduler = getattr(engine, "scheduler", None)
    found = [getattr(scheduler, "connector", None), *(workers or [read("worker", places.worker_connector)])]
    held = read("connectors", connectors.read, [each for each in found if each is not None])
    events = read("recorder", recorded.by_request) or {}
    rows = connectors.by_request(held or ())
    state = {
        "schema": SCHEMA,
        "pid": os.getpid(),
        "process": read("process", places.process_name),
        "mono": time.monotonic_ns(),
        "wall": time.time_ns(),
        "versions": read("versions", places.versions),
        "kvfix": read("kvfix", recorded.kvfix),
        "stack": read("stack", places.stack, frames),
        "hook": read("hook", places.hook, frames),
        "in_step": read("in_step", places.in_step, frames),
        "scheduler": read("scheduler", schedulers.read, scheduler, engine, rows, events, full),
        "connectors": held,
        "unread": unread,
    }
    return {**state, "milliseconds": round((time.perf_counter() - began) * 1e3, 3)}
