"""The state of a running engine as plain data: `collect()` reads it in one of the engine's processes.

`collect()` may run at any point of the main thread, even inside a step. So it changes nothing, takes no lock, imports
no new module, does not wait and does not raise. The modules of this package import only the standard library and each
other, by relative names, because `kvfix look` loads them in a process without kvfix.

The state has counts, ids of requests and numbers of blocks; with `full`, also hashes of blocks. It has no tokens,
prompts or host names. None: not known. Times are seconds before the look.

    {"schema": 1, "pid": 1, "process": "EngineCore", "mono": 12, "wall": 34, "milliseconds": 2.1,
     "versions": {"vllm": "0.32.0", "lmcache": "0.5.6"},
     "kvfix": {"mode": "observe", "version": "0.1.0", "fixes": ["KVF001"]} or None,
     "stack": ["recv (zmq/sugar/socket.py:980)", ...],  of the main thread, innermost first
     "hook": "get_num_new_matched_tokens",              hook of a connector on that stack; "" if none
     "in_step": True,                                   the scheduler works: its queues are not complete
     "scheduler": {...} or None,                        see scheduler.py
     "connectors": [{...}],                             of the scheduler and of the worker: see connectors.py
     "unread": {"scheduler": "AttributeError ..."}}     what could not be read, and why
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import connectors, places
from . import scheduler as schedulers

#: Incremented when a name is removed or changes its meaning.
SCHEMA = 1


def collect(full: bool = False, scheduler: Any = None, workers: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the state of this process.

    full: include the numbers and hashes of each request's blocks, so that the lab can rebuild the request.
    scheduler, workers: the scheduler and the workers' connectors. By default, `collect` searches for them.
    """
    began = time.perf_counter()
    unread: dict[str, str] = {}

    def read(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001  an error here must not stop the engine
            unread[what] = places.where(error)
            return None

    frames = read("frames", places.frames) or []
    engine = None
    if scheduler is None:
        engine = read("engine", places.engine, frames)
        scheduler = getattr(engine, "scheduler", None)
    found = [getattr(scheduler, "connector", None), *(workers or [read("worker", places.worker_connector)])]
    held = read("connectors", connectors.read, [each for each in found if each is not None])
    events = read("recorder", places.recorded) or {}
    rows = connectors.by_request(held or ())
    state = {
        "schema": SCHEMA,
        "pid": os.getpid(),
        "process": read("process", places.process_name),
        "mono": time.monotonic_ns(),
        "wall": time.time_ns(),
        "versions": read("versions", places.versions),
        "kvfix": read("kvfix", places.kvfix),
        "stack": read("stack", places.stack, frames),
        "hook": read("hook", places.hook, frames),
        "in_step": read("in_step", places.in_step, frames),
        "scheduler": read("scheduler", schedulers.read, scheduler, engine, rows, events, full),
        "connectors": held,
        "unread": unread,
    }
    return {**state, "milliseconds": round((time.perf_counter() - began) * 1e3, 3)}
