"""The code that kvfix sends into an engine to apply, remove or list the fixes between two steps of the engine.

The engine may not have kvfix_tools, so this module imports only kvfix. The functions run in the main thread, between
two bytecodes (inject.py). Only `prepare` runs earlier, in a thread of its own, because `prepare` takes a second.
"""

import os
import sys
from typing import Any

from kvfix import activation, applicability, catalogue, engine_log, metrics
from kvfix.applicability import Applicability
from kvfix.config import Config
from kvfix.engine_state import places
from kvfix.fixes.record import AT_START, NEW_REQUESTS, Fix
from kvfix.session import session

#: Parts of file paths. `attach` and `detach` refuse while a thread runs certain functions of these files (`_unsafe`).
_PLACES = ("/vllm/", "/lmcache/", "/kvfix/wrapping.py", "/kvfix/connector_events/__init__.py")
_BUSY = ("schedule", "update_from_output", "add_request", "finish_requests", "execute_model", "sample_tokens")
_SHOWN = ("refused", "unknown", "applicable", "applied")
#: Attribute paths from a local variable on the stack to the engine's scheduler. The variable may be in a method of the
#: scheduler, in EngineCore's loop, or in a user's program that has an LLM.
_PATHS = ("", "scheduler", "engine.scheduler", "llm_engine.engine_core.engine_core.scheduler")


class _Everything:
    def __contains__(self, request: object) -> bool:
        return True


def prepare() -> None:
    from kvfix import applying, connector_events  # noqa: F401

    for fix in catalogue.fixes():
        for target in fix.targets:
            if target.module in sys.modules:
                engine_log.guarded("kvfix attach", applicability.judge, target)


def ready() -> dict[str, Any]:
    return {"state": "ready", "scheduler": _scheduler() is not None}


def attach(text: str, idle: bool = False) -> dict[str, Any]:
    """Activate this configuration if the process is at a safe point. Return `state`: "attached", "unsafe" or "busy".

    idle: attach only if the scheduler has no requests. The answer has the ids of the scheduler's requests, which
    `attached` needs in the workers' processes. Raise ValueError if the engine's environment switches kvfix off.
    """
    config = Config.parse(text)
    if Config.is_off(os.environ.get(activation.ENV)):
        raise ValueError(f"{activation.ENV}=off is set in the environment of the engine")
    where, scheduler, requests = _unsafe(), _scheduler(), list[str]()
    if scheduler is not None:
        if "requests" in vars(scheduler):
            requests = list(scheduler.requests)
        else:
            where = where or "while the scheduler is created"
    if where or (idle and requests):
        return {"state": "unsafe" if where else "busy", "where": where, "requests": len(requests)}
    why = "cannot be attached to a running engine: start the engine with kvfix"
    wanted = (fix for fix in catalogue.fixes() if fix.attaches == AT_START and config.takes(fix.code, fix.opt_in))
    session.held_back = {fix.code: why for fix in wanted if not _is_applied(fix)}
    watched, applied = session.mode != "fix", _for_new_requests()
    activation.activate(config)
    if _for_new_requests() - applied or (config.mode != "fix" and not watched):
        # A worker does not know the requests. Until `attached` passes their ids, the worker assumes that every request
        # began before the attach.
        session.before = frozenset(requests) if scheduler is not None else _Everything()
    if config.mode != "fix":
        watch_connectors()
    return {**state(), "state": "attached", "requests": len(requests), "before": requests}


def attached(before: list[str]) -> dict[str, Any]:
    """Tell a worker the ids of the requests that the scheduler had at the time of `attach`."""
    if isinstance(session.before, _Everything):
        session.before = frozenset(before)
    return {"state": "attached"}


def detach() -> dict[str, Any]:
    """Restore all original functions if the process is at a safe point."""
    if where := _unsafe():
        return {"state": "unsafe", "where": where}
    activation.revert()
    session.held_back, session.before = {}, ()
    return {"state": "detached"}


def state() -> dict[str, Any]:
    """Return what `kvfix status PID` shows: mode, and rows with a verdict in _SHOWN. A call within a step is safe."""
    here, rows = getattr(_scheduler(), "requests", ()), []
    left = [name for name in here if name in session.before]
    nothing = Applicability("not-affected", "this process has not imported the function, or the fix is switched off")
    for fix in catalogue.fixes():
        why = session.held_back.get(fix.code)
        loaded = any(target.module in sys.modules for target in fix.targets)
        for row in catalogue.rows_of(fix, applicability.judge if why and loaded else lambda _: nothing):
            reason = row.reason
            if why and row.verdict == "applicable":
                reason = why
            elif fix.attaches == NEW_REQUESTS and row.verdict == "applied" and left:
                reason += f"; does not change requests that began before the attach ({len(left)})"
            rows.append(row._replace(reason=reason))
    return {
        "state": "there",
        "mode": session.mode if session.config is not None else "off",
        "rows": [{**row._asdict(), **metrics.counts(row.code)} for row in rows if row.verdict in _SHOWN],
    }


def _for_new_requests() -> set[str]:
    """Return the codes of the applied fixes that change only requests that begin after `attach`."""
    return {fix.code for fix in catalogue.fixes() if fix.attaches == NEW_REQUESTS and _is_applied(fix)}


def _is_applied(fix: Fix) -> bool:
    outcomes = [session.outcomes[target] for target in fix.targets if target in session.outcomes]
    return any(outcome.state == "applied" for outcome in outcomes)


def _unsafe() -> str:
    """Return the place in an engine step at which the process is now, or "" if the process is between two steps."""
    targets = {target.function.rpartition(".")[2] for fix in catalogue.fixes() for target in fix.targets}
    names = targets.difference(("__init__", "__del__")).union(_BUSY, places.HOOKS, places.LAYER_HOOKS)
    stacks = places.stacks()
    if len(stacks) >= places.MOST or any(len(calls) >= places.MOST for calls in stacks.values()):
        return f"may be in a step: kvfix cannot check all stacks ({places.MOST} or more threads, or calls on one stack)"
    for calls in stacks.values():
        for name, file, line in calls:
            if name in names and any(place in file for place in _PLACES):
                return f"in {places.stack([(name, file, line)])[0]}"
            if file.endswith(_PLACES[2:]):
                return "in a wrapper"
    if getattr(places.worker_connector(), "_connector_metadata", None) is not None:
        return "within a step of the worker"
    return ""


def _scheduler() -> Any:
    """Return the process's scheduler, or None. Search the stack, because `gc` does not see vLLM's frozen heap."""
    scheduler_class = getattr(sys.modules.get("vllm.v1.core.sched.scheduler"), "Scheduler", None)
    if scheduler_class is None:
        return None
    for frame in places.outwards(sys._getframe()):
        for value in list(frame.f_locals.values()):
            for path in _PATHS:
                found = value
                for name in path.split(".") if path else ():
                    found = getattr(found, "__dict__", {}).get(name)
                if isinstance(found, scheduler_class):
                    return found
    return None


def watch_connectors() -> None:
    """Watch the classes of existing connectors, which vLLM created before kvfix wrapped the connector factory."""
    from kvfix import connector_events

    base = getattr(sys.modules.get("vllm.distributed.kv_transfer.kv_connector.v1.base"), "KVConnectorBase_V1", None)
    classes = list(base.__subclasses__()) if base is not None else []
    while classes:
        each = classes.pop()
        engine_log.guarded("kvfix attach", connector_events.watch_class, each)
        classes += each.__subclasses__()
