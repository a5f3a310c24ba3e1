"""Plant known hangs in a real engine. Each hang except `abort_comes_first` begins when the file SPOIL exists."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPOIL = Path(os.environ.get("KVFIX_TEST_SPOIL", "/nonexistent"))
#: WHAT: a key of HANGS. SERVER: pids of the LMCache server.
WHAT, SERVER = os.environ.get("KVFIX_TEST_HANG", ""), os.environ.get("KVFIX_TEST_SERVER", "")


def plant(connector: Any) -> None:
    """Plant the hang WHAT in this connector, if the hang begins in a connector of this role."""
    if connector.role.name == ("SCHEDULER" if WHAT in ("server_stops", "abort_comes_first") else "WORKER"):
        HANGS[WHAT](connector)


def _before(owner: Any, name: str, act: Callable[[], Any]) -> None:
    original = getattr(owner, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        if SPOIL.exists():
            act()
        return original(*args, **kwargs)

    setattr(owner, name, function)


def abort_comes_first(connector: Any) -> None:
    """Make EngineCore handle an abort before the first step, so vLLM never asks the connector about the request."""
    from vllm.v1.engine.core import EngineCoreProc

    step, abort = EngineCoreProc._process_engine_step, EngineCoreProc.abort_requests
    aborted: list[str] = []

    def abort_requests(core: Any, requests: list[str]) -> None:
        aborted.extend(requests)
        abort(core, requests)

    def _process_engine_step(core: Any) -> Any:
        while not aborted:
            time.sleep(0.01)
            core._process_input_queue()
        return step(core)

    EngineCoreProc.abort_requests = abort_requests  # type: ignore[method-assign]
    EngineCoreProc._process_engine_step = _process_engine_step  # type: ignore[method-assign]


def locked_out(connector: Any) -> None:
    """Let the worker report two loads as finished only when both loads have finished."""
    adapter = connector.worker_adapter
    begin, finished, held = adapter.batched_submit_retrieve_requests, adapter.get_finished, set[str]()
    begun: list[str] = []

    def batched_submit_retrieve_requests(requests: Any, *args: Any, **kwargs: Any) -> Any:
        answer = begin(requests, *args, **kwargs)
        for name in requests if SPOIL.exists() else ():
            begun.append(name)
            SPOIL.with_suffix(f".{len(begun)}").touch()
        return answer

    def get_finished(*args: Any, **kwargs: Any) -> Any:
        stored, loaded = finished(*args, **kwargs)
        held.update(loaded or ())
        if SPOIL.exists() and len(held) < 2:
            return stored, set()
        loaded = set(held)
        held.clear()
        return stored, loaded

    adapter.batched_submit_retrieve_requests, adapter.get_finished = batched_submit_retrieve_requests, get_finished


def hook_waits(connector: Any) -> None:
    """Let a hook of the worker wait in a C function that never returns."""
    reading, _ = os.pipe()
    read, buffer = ctypes.CDLL(None).read, ctypes.create_string_buffer(1)
    _before(connector.worker_adapter, "create_recorded_event", lambda: read(reading, buffer, 1))


#: For each hang, the function that plants the hang in a connector.
HANGS: dict[str, Callable[[Any], None]] = {
    # In the first two hangs, the worker's lookup thread ends, as after an uncaught exception, or waits for ever.
    "lookup_thread_ends": lambda connector: _before(connector._lmcache_engine.lmcache_engine, "lookup", sys.exit),
    "lookup_thread_waits": lambda connector: _before(
        connector._lmcache_engine.lmcache_engine, "lookup", threading.Event().wait
    ),
    "server_stops": lambda connector: _before(
        connector.scheduler_adapter, "maybe_submit_lookup_request",
        lambda: [os.kill(int(pid), signal.SIGSTOP) for pid in SERVER.split()],
    ),
    "load_is_lost": lambda connector: _before(
        connector.worker_adapter, "get_finished", lambda: connector.worker_adapter.retrieve_futures.clear()
    ),
    "abort_comes_first": abort_comes_first, "locked_out": locked_out, "hook_waits": hook_waits,
}  # fmt: skip
