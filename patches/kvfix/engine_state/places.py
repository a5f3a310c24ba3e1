"""Find objects of the engine and of kvfix in this process, on the main thread's stack or in imported modules.

EngineCore's loop is on this stack as long as the engine lives (`run_busy_loop`, v1/engine/core.py 0.32.0:1547). An
engine in the user's own process is on the stack while the engine computes. At other times, a variable of the user's
program holds the engine. `gc` cannot find the engine, as vLLM freezes the heap (`freeze_gc_heap`, core.py 0.32.0:253).
"""

import faulthandler
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

#: Hooks of vLLM's connectors (v1/base.py 0.33.0). Since vLLM 0.32, `get_transfer_results` may replace `get_finished`.
HOOKS = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "update_connector_output",
    "request_finished", "request_finished_all_groups", "on_new_request", "reset_cache", "register_kv_caches",
    "unregister_kv_caches", "restore_kv_caches", "handle_preemptions", "start_load_kv", "wait_for_save",
    "get_finished", "get_transfer_results", "get_block_ids_with_load_errors", "shutdown",
)  # fmt: skip
#: Hooks that run once per layer in every step.
LAYER_HOOKS = ("wait_for_layer_load", "save_kv_layer")
_ALL_HOOKS = frozenset((*HOOKS, *LAYER_HOOKS))
#: Functions outside connectors have these names too.
_COMMON = frozenset(("request_finished", "on_new_request", "reset_cache", "get_finished", "shutdown"))
#: _ENGINE: methods of EngineCore. _STEP: methods of the scheduler that change the scheduler's queues.
_ENGINE = ("run_busy_loop", "step", "step_with_batch_queue", "_process_engine_step")
_STEP = ("schedule", "update_from_output", "finish_requests", "add_request", "reset_prefix_cache")
#: A function call on a stack: (function name, file, line).
Call = tuple[str, str, int]
#: faulthandler's limit. `stacks` returns only the newest MOST threads, and the innermost MOST calls of each thread.
MOST = 100
#: These patterns match a thread and a call in the output of faulthandler.
_THREAD = re.compile(r"hread 0x0*([0-9a-f]+) .*\n((?:  .*\n)*)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)\n')


def process_name() -> str:
    """Return the name that vLLM gives this process in `multiprocessing`, or "" if `multiprocessing` is not imported."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    return str(multiprocessing.current_process().name) if multiprocessing else ""


def versions() -> dict[str, str]:
    """Return {"vllm": version, "lmcache": version}. Omit a package that this process has not imported."""
    found = {}
    for dist in ("vllm", "lmcache"):
        for name in (f"{dist}._version", f"{dist}.version", dist):
            value = getattr(sys.modules.get(name), "__version__", None)
            if isinstance(value, str) and dist not in found:
                found[dist] = value
    return found


def frames() -> list[FrameType]:
    """Return the stack of the main thread, innermost first, without the frames of kvfix.

    Call `frames` only in the main thread. Python may crash if another thread reads the frames (cpython issue 99110).
    """
    found = list(outwards(sys._getframe()))
    # `kvfix look` may have injected the innermost code. The file name of injected code is "<string>".
    while found and (_is_ours(found[0]) or found[0].f_code.co_filename.startswith("<")):
        del found[0]
    return found


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield this frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    """Compare the frame's package with __package__ too, because `kvfix look` loads this package under another name."""
    package = str(frame.f_globals.get("__package__") or "")
    return package == __package__ or package.startswith("kvfix.")


def calls(frames: Iterable[FrameType]) -> list[Call]:
    return [(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno) for frame in frames]


def dump() -> str:
    """Return faulthandler's text with the stacks of all threads. During the call, no other thread can run Python."""
    with open(os.memfd_create("kvfix"), "w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def stacks() -> dict[int, list[Call]]:
    """Return {thread id: stack of the thread, innermost call first}. Any thread may call this function."""
    return {
        int(thread, 16): [(name, file, int(line)) for file, line, name in _CALL.findall(found)]
        for thread, found in _THREAD.findall(dump())
    }


def stack(calls: Iterable[Call]) -> list[str]:
    """Return the text "function (folder/file:line)" for each call."""
    return [f"{name} ({_short(file)}:{line})" for name, file, line in calls]


def _short(file: str) -> str:
    return "/".join(file.replace(os.sep, "/").split("/")[-2:])


def hook(calls: Iterable[Call]) -> str:
    """Return the name of the outermost connector hook on this stack, or ""."""
    found = [name for name, file, _ in calls if _is_hook(name, file)]
    return found[-1] if found else ""


def _is_hook(function: str, file: str) -> bool:
    """For a function name in _COMMON, the path of the file decides."""
    path = file.lower()
    return function in _ALL_HOOKS and (function not in _COMMON or "connector" in path or "lmcache" in path)


def in_step(calls: Iterable[Call]) -> bool:
    """Return True if a function in _STEP is on the stack. A request may then be in none of the scheduler's queues."""
    return any(name in _STEP and "/sched/" in file for name, file, _ in calls)


def engine(frames: list[FrameType]) -> Any:
    """Return vLLM's EngineCore, or None if this process has no EngineCore or kvfix cannot find it."""
    for frame in reversed(frames):
        if frame.f_code.co_name in _ENGINE:
            found = frame.f_locals.get("self")
            if _is_engine(found):
                return found
    if "vllm.v1.engine.core" not in sys.modules:
        return None
    for frame in reversed(frames):  # an `LLM` in a variable of the user's program
        for value in list(frame.f_locals.values()):
            client = getattr(getattr(value, "llm_engine", None), "engine_core", None)
            found = getattr(client, "engine_core", None)
            if _is_engine(found):
                return found
    return None


def _is_engine(found: Any) -> bool:
    return hasattr(found, "scheduler") and hasattr(found, "model_executor")


def worker_connector() -> Any:
    """Return the connector of the worker in this process (kv_transfer_state.py 0.32.0:16), or None."""
    return getattr(sys.modules.get("vllm.distributed.kv_transfer.kv_transfer_state"), "_KV_CONNECTOR_AGENT", None)


def where(error: Exception) -> str:
    """Return an exception's type and the line that raised it. Omit the text, which may contain user data."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    at = "" if trace is None else f" ({_short(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})"
    return type(error).__name__ + at


def kvfix() -> dict[str, Any] | None:
    """Return kvfix's mode, version and applied fixes, or None if kvfix does nothing in this process."""
    session: Any = getattr(sys.modules.get("kvfix.session"), "session", None)
    if session is None or session.config is None:
        return None
    keys = {key for wrapped in list(session.wrapped.values()) for key in list(wrapped._wrappers)}
    version = getattr(sys.modules.get("kvfix.version"), "VERSION", "")
    return {"mode": session.mode, "version": version, "fixes": sorted(key for key in keys if key.startswith("KVF"))}


def recorded() -> dict[str, dict[str, Any]]:
    """Return {request id: row} from the recorded events, or {} without a recorder. A row has these fields:

    {"asked": computed tokens at the last lookup, "promised": promised tokens, "granted": tokens that got blocks,
     "loading": [start, end], "loaded": end, "stored": end, "event": last event, "since": seconds since this event}
    """
    recorder = sys.modules.get("kvfix.connector_events.recorder")
    if recorder is None:
        return {}
    now, found = time.monotonic_ns(), dict[str, "dict[str, Any]"]()
    for entry in recorder.snapshot():
        event, kind = entry.event, type(entry.event).__name__
        row = found.setdefault(event.request, {})
        row["event"], row["since"] = kind, round((now - entry.mono) / 1e9, 3)
        if kind == "Asked":
            row.update(asked=event.computed, promised=event.promised, granted=None, loading=None, loaded=None)
        elif kind == "Granted" and (event.external or not row.get("granted")):
            row["granted"] = event.external
        elif kind == "LoadDue":
            row["loading"] = [event.start, event.end]
        elif kind == "Loaded":
            row.update(loaded=event.end, loading=None)
        elif kind == "Stored":
            row["stored"] = max(event.end, row.get("stored") or 0)
        elif kind in ("Preempted", "LoadFailed"):
            row.update(asked=None, promised=None, granted=None, loading=None, loaded=None)
    return found
