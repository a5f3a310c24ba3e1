"""Plant hangs in a real engine, each at the place of a real hang, as soon as the file SPOIL exists."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPOIL = Path(os.environ.get("KVFIX_TEST_SPOIL", "/nonexistent"))
#: What is planted, and the processes of the LMCache server.
WHAT, SERVER = os.environ.get("KVFIX_TEST_HANG", ""), os.environ.get("KVFIX_TEST_SERVER", "")


def plant(connector: Any) -> None:
    """Into the connector of the role in which it begins; "" plants nothing."""
    role, planted = PLANTS.get(WHAT, ("", None))
    if planted is not None and connector.role.name == role:
        planted(connector)


def _before(owner: Any, name: str, act: Callable[[], Any]) -> None:
    original = getattr(owner, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        if SPOIL.exists():
            act()
        return original(*args, **kwargs)

    setattr(owner, name, function)


def lookup_thread_ends(connector: Any) -> None:
    """LMCache's thread of the worker that answers lookups ends, as of an exception that it does not catch."""

    def end() -> None:
        raise SystemExit

    _before(connector._lmcache_engine.lmcache_engine, "lookup", end)


def server_stops(connector: Any) -> None:
    """The LMCache server runs, but does not answer from the next lookup on."""

    def stop() -> None:
        for pid in SERVER.split():
            os.kill(int(pid), signal.SIGSTOP)

    _before(connector.scheduler_adapter, "maybe_submit_lookup_request", stop)


def hook_waits(connector: Any) -> None:
    """A hook of the worker waits in a C function that does not come back."""
    reading, _ = os.pipe()
    read, buffer = ctypes.CDLL(None).read, ctypes.create_string_buffer(1)
    _before(connector.worker_adapter, "create_recorded_event", lambda: read(reading, buffer, 1))


PLANTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "lookup_thread_ends": ("WORKER", lookup_thread_ends),
    "server_stops": ("SCHEDULER", server_stops),
    "hook_waits": ("WORKER", hook_waits),
}
