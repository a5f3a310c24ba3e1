"""Turn the hook calls of a connector into events of `kvfix.ledger`, which checks token counts.

The flight recorder keeps the events. In modes `check` and `strict`, kvfix also checks each event by the ledger's rules.
In mode `fix`, kvfix does not import this package. If the package raises, kvfix logs one error and the engine continues.

kvfix wraps functions of the scheduler, and the hooks of every connector class that `get_connector_class` of vLLM's
factory returns. A wrapper of `create_connector` would miss the connectors inside a MultiConnector
(multi_connector.py 0.32.0:243). The hooks of the base class `KVConnectorBase_V1` do nothing. kvfix wraps only one hook
of the base class, `update_connector_output`, because this hook's arguments have the results of loads.
"""

import functools
from _thread import get_ident
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix import applying, clock, engine_log, metrics
from kvfix.connector_events import peers, recorder, signals, watchdog
from kvfix.connector_events.violations import Violation as Violation
from kvfix.connector_events.watched import WatchedConnector
from kvfix.engine_state import places
from kvfix.session import session
from kvfix.wrapping import after

KEY = "connector events"
#: Key of the audit's wrapper. AUDIT sorts before KEY, so `_around` wraps the audit and records the audit's answer.
AUDIT = "audit"
#: This attribute of a connector holds the connector's WatchedConnector.
_HELD = "_kvfix_watched"
_BASE, _OF_BASE = "KVConnectorBase_V1", "update_connector_output"
#: Functions of the scheduler that kvfix wraps. EngineCore dies if one of these functions raises.
_SCHEDULER = ("add_request", "schedule", "update_from_output", "finish_requests")

#: For each thread in a wrapped function: the exception that kvfix has recorded in this thread, or None.
_errors: dict[int, BaseException | None] = {}


def settle(module: ModuleType) -> None:
    """Add this package's wrappers to a module of vLLM. In mode `fix`, remove this package's wrappers. Idempotent."""
    if session.mode == "fix":
        remove_all()
    elif hasattr(module, "Scheduler"):
        for name in _SCHEDULER:
            if callable(vars(module.Scheduler).get(name)):
                applying.attach(module.Scheduler, name, KEY, functools.partial(_around, name))
    else:
        applying.attach(module.KVConnectorFactory, "get_connector_class", KEY, after(_watch_answer))


def remove_all() -> None:
    """Remove every wrapper of this package, and delete all recorded events."""
    applying.detach(KEY)
    applying.detach(AUDIT)
    signals.remove()
    watchdog.stop()
    session.restart_recording()


def _watch_answer(factory: Any, connector_class: type, *_: Any, **__: Any) -> None:
    watch_class(connector_class)


def watch_class(connector_class: type) -> None:
    """Wrap the hooks that this class or one of its bases defines. Idempotent."""
    layers = places.LAYER_HOOKS if session.config is not None and session.config.layers else ()
    for name in (*places.HOOKS, *layers):
        for owner in connector_class.__mro__:
            if owner.__name__ == _BASE and name != _OF_BASE:
                break
            if callable(vars(owner).get(name)):
                applying.attach(owner, name, KEY, functools.partial(_around, name))
                break
    signals.install()
    watchdog.start()


def _around(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook or a function of the scheduler. Record the thread, the events and the exception of each call."""
    is_scheduler = name in _SCHEDULER
    # Names of the WatchedConnector methods that run before and after the hook. "" means no method.
    before, then = (each if hasattr(WatchedConnector, each) else "" for each in (f"before_{name}", f"after_{name}"))

    @functools.wraps(original)
    def hook(connector: Any, *args: Any, **kwargs: Any) -> Any:
        watched = connector.__dict__.get(_HELD)
        if watched is None or watched.generation != session.generation:
            watched = _begin(connector, is_scheduler)
        running, thread = watched.running if watched is not None else None, get_ident()
        # Record no nested call, for example from the hook of a connector to the same hook of its base class.
        if watched is None or running is None or thread in running:
            return original(connector, *args, **kwargs)
        running[thread] = name, clock.now()
        watched.calls[name] = watched.calls.get(name, 0) + 1
        is_outermost = thread not in _errors
        if is_outermost:
            _errors[thread] = None
        try:
            if before:
                _record(watched, before, args, kwargs)
            answer = original(connector, *args, **kwargs)
            if then:
                _record(watched, then, (answer, *args), kwargs)
            return answer
        except Violation:
            raise
        except Exception as error:
            if error is not _errors.get(thread):  # no inner wrapped function has recorded the error yet
                _errors[thread] = error
                _record(watched, "raised", (name, error, args), {})
            raise
        finally:
            if is_outermost:
                del _errors[thread]  # a stored exception keeps its frames alive
            del running[thread]

    return hook


def _record(watched: WatchedConnector, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the method `what` of `watched`. After an error the record has gaps, so kvfix checks no more rules."""
    try:
        getattr(watched, what)(*args, **kwargs)
    except Violation:
        raise  # `__context__` of the violation is the exception of the hook, if the hook has raised
    except Exception as error:  # noqa: BLE001
        watched.trusted = False
        if session.failed_generation != session.generation:
            session.failed_generation = session.generation
            engine_log.fault(f"kvfix.connector_events.watched.{what}", error)


def _begin(connector: Any, is_scheduler: bool) -> WatchedConnector | None:
    """Start to record this connector. Return None after an error. If WatchedConnector raises, record no later calls."""
    held = vars(connector)
    try:
        held[_HELD] = SimpleNamespace(generation=session.generation, running=None)  # remains if the next line raises
        held[_HELD] = watched = WatchedConnector(connector, next(session.numbers))
        watched.leases = peers.watch(connector, KEY)
        if not is_scheduler and session.config is not None and session.config.audit:
            from kvfix.connector_events import audit

            watched.audit = engine_log.guarded(audit.__name__, audit.begin, connector, session.config.audit, AUDIT)
        recorder.register(watched)
        if not is_scheduler:
            signals.announce()
            metrics.settled()  # the modules of the connector are imported now
        return watched
    except Exception as error:  # noqa: BLE001
        engine_log.fault("kvfix.connector_events.watched", error)
        return None
