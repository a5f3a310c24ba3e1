"""Where the probes are: around the hooks of every class that vLLM's factory gives out, and around the scheduler.

MultiConnector's children pass `get_connector_class` and never `create_connector` (multi_connector.py 0.32.0:232), so
the class is wrapped, and once. Hooks that a class inherits from `KVConnectorBase_V1` do nothing and are left.
"""

from __future__ import annotations

import functools
import threading
import weakref
from _thread import get_ident
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import clock, correction, notice, patching
from kvfix.probes import alarm, recorder
from kvfix.probes.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "probe"
#: Where a connector holds its watch.
_HELD = "_kvfix_watch"
_BASE = "KVConnectorBase_V1"

#: hook -> (what is told before it, what is told of its answer). "" is nothing: only exceptions, and where it hangs.
HOOKS: dict[str, tuple[str, str]] = {
    "get_num_new_matched_tokens": ("", "get_num_new_matched_tokens"),
    "update_state_after_alloc": ("update_state_after_alloc", ""),
    "build_connector_meta": ("", "build_connector_meta"),
    "update_connector_output": ("", "update_connector_output"),
    "request_finished": ("request_finished", "request_finished_answer"),
    "request_finished_all_groups": ("request_finished", "request_finished_answer"),
    "on_new_request": ("", ""),
    "reset_cache": ("", ""),
    "register_kv_caches": ("", ""),
    "handle_preemptions": ("", ""),
    "start_load_kv": ("start_load_kv", ""),
    "wait_for_save": ("wait_for_save", "wait_for_save_answer"),
    "get_finished": ("", "get_finished"),
    "get_block_ids_with_load_errors": ("", ""),
    "shutdown": ("", ""),
}
#: Hooks that run once per layer and step. They are watched if `layers` says so: counted, nothing is told.
LAYER_HOOKS = ("wait_for_layer_load", "save_kv_layer")
layers = False
#: An exception that leaves one of these ends EngineCore.
_SCHEDULER = ("add_request", "schedule", "update_from_output", "finish_requests")

_factory: list[tuple[Any, Any]] = []


class _Passing(threading.local):
    """In this thread: probes that are entered, and the exception that one of them has told on its way out of them."""

    depth = 0
    error: BaseException | None = None


_passing = _Passing()
#: The life of the recorder in which a probe has failed.
_faulty = -1


def watch_factory(factory: Any) -> None:
    """Every class that it gives out from now on."""
    original = vars(factory).get("get_connector_class")
    if _factory or not isinstance(original, classmethod):
        return
    function = original.__func__

    @functools.wraps(function)
    def get_connector_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
        found = function(cls, *args, **kwargs)
        try:
            watch_class(found)
        except Exception as error:  # noqa: BLE001
            notice.fault("kvfix.probes.hooks.watch_class", error)
        return found

    _factory.append((factory, original))
    factory.get_connector_class = classmethod(get_connector_class)


def leave_factory() -> None:
    """It gives out classes as they are; they have lost their probes already."""
    for factory, original in _factory:
        factory.get_connector_class = original
    _factory.clear()


def watch_class(connector_class: type) -> None:
    """Probes around the hooks that this class or one that it is made of has of its own. Idempotent."""
    for name, (before, after) in HOOKS.items():
        _attach(connector_class, name, functools.partial(_around, name, before, after))
    for name in LAYER_HOOKS if layers else ():
        _attach(connector_class, name, functools.partial(_around_layer, name))
    from kvfix.probes import signals

    signals.install()


def _attach(connector_class: type, name: str, decorate: Callable[[Any], Any]) -> None:
    for owner in connector_class.__mro__:
        if owner.__name__ == _BASE:
            return
        if callable(vars(owner).get(name)):
            patching.attach(owner, name, KEY, decorate)
            return


def watch_scheduler(scheduler_class: type) -> None:
    """Exceptions that leave the scheduler itself, and what it has running and waiting."""
    for name in _SCHEDULER:
        if callable(vars(scheduler_class).get(name)):
            patching.attach(scheduler_class, name, KEY, functools.partial(_around, name, "", ""))


def _around(name: str, before: str, after: str, original: Callable[..., Any]) -> Callable[..., Any]:
    is_scheduler = name in _SCHEDULER

    @functools.wraps(original)
    def hook(connector: Any, *args: Any, **kwargs: Any) -> Any:
        watch = connector.__dict__.get(_HELD)
        if watch is None or watch.life != recorder.life:
            watch = _begin(connector, is_scheduler)
        thread = get_ident()
        if watch is None or watch.running is None or thread in watch.running:  # of the class that it extends
            return original(connector, *args, **kwargs)
        watch.running[thread] = name, clock.now()
        watch.calls[name] = watch.calls.get(name, 0) + 1
        _passing.depth += 1
        try:
            if before:
                _told_by(watch, before, args, kwargs)
            answer = original(connector, *args, **kwargs)
            if after:
                _told_by(watch, after, (answer, *args), kwargs)
            return answer
        except alarm.Violation:
            raise
        except Exception as error:
            _raised(watch, name, error, args)
            raise
        finally:
            _passing.depth -= 1
            if not _passing.depth:
                _passing.error = None  # it would keep the frames that it has passed alive
            del watch.running[thread]

    return hook


#: A hook of a layer, with its own parameters: `*args` and `**kwargs` alone would cost more than it may.
_LAYER = """
def hook({parameters}):
    _watch, _thread = {first}.__dict__.get(_held), _get_ident()
    if _watch is None or _watch.running is None or _thread in _watch.running:
        return _original({arguments})
    _watch.running[_thread] = _name, _clock.now()
    _calls = _watch.calls
    _calls[_name] = _calls.get(_name, 0) + 1
    try:
        return _original({arguments})
    except Exception as _error:
        _raised(_watch, _name, _error, ())
        raise
    finally:
        del _watch.running[_thread]
"""


def _around_layer(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Until another hook has run, its connector is not known and nothing is counted."""
    names = {"_held": _HELD, "_name": name, "_clock": clock, "_raised": _raised, "_get_ident": get_ident}
    return correction.like(original, _LAYER, names)


def _told_by(watch: Watch, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        getattr(watch, what)(*args, **kwargs)
    except alarm.Violation:
        raise
    except Exception as error:  # noqa: BLE001
        _fault(watch, what, error)


def _raised(watch: Watch, name: str, error: Exception, args: tuple[Any, ...]) -> None:
    if error is _passing.error:  # the scheduler's probe, after the hook's
        return
    if _passing.depth:
        _passing.error = error
    try:
        watch.raised(name, error, args)
    except alarm.Violation:
        raise  # the exception goes with it, as its context
    except Exception as fault:  # noqa: BLE001
        _fault(watch, "raised", fault)


def _fault(watch: Watch, what: str, error: Exception) -> None:
    """Its record has holes from now on: it is not judged any more. Said once in this process, for all of its probes."""
    global _faulty
    watch.trusted = False
    if _faulty != recorder.life:
        _faulty = recorder.life
        notice.fault(f"kvfix.probes.watch.{what}", error)


def _begin(connector: Any, is_scheduler: bool) -> Watch | None:
    """A watch for this connector, or one that takes the place of an earlier life's; None where that fails, for good."""
    held = vars(connector)
    try:
        held[_HELD] = SimpleNamespace(life=recorder.life, running=None)  # should the next line fail: it is passed by
        held[_HELD] = watch = Watch(connector, next(recorder.numbers))
        recorder.watches[watch.number] = watch
        if is_scheduler:
            alarm.schedulers[:] = [weakref.ref(connector), *(each for each in alarm.schedulers if each() is not None)]
        if not is_scheduler:
            from kvfix.probes import metrics, signals

            signals.belongs()
            metrics.settled()  # now that what it is made of has been imported
        return watch
    except Exception as error:  # noqa: BLE001
        notice.fault("kvfix.probes.watch", error)
        return None
