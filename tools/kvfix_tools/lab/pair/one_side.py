"""Apply the fixes in only one of two engines of this process: a mixed roll-out.

The engines share the classes, and therefore the wrappers of kvfix. A wrapper checks which engine runs. The lab sets the
running engine with `running`, also for callbacks.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

from kvfix.wrapping import WrappedFunction

#: The name of the running engine, and of the engine with the fixes; "": none. asyncio copies them to its tasks.
_RUNNING = ContextVar("_RUNNING", default="")
_FIXED = ContextVar("_FIXED", default="")


@contextmanager
def _set(variable: ContextVar[str], name: str) -> Iterator[None]:
    before = variable.set(name)
    try:
        yield
    finally:
        variable.reset(before)


def running(name: str) -> Any:
    """Return a context in which the engine of this name runs."""
    return _set(_RUNNING, name)


@contextmanager
def fixes_in(name: str) -> Iterator[None]:
    """Fixes that are applied in this context act only in the engine of this name."""
    add = WrappedFunction.add

    def add_in_one(function: WrappedFunction, key: str, place: int, wrapper: Callable[..., Any]) -> None:
        add(function, key, place, lambda inner: _in_one(inner, wrapper(inner)))

    with _set(_FIXED, name), mock.patch.object(WrappedFunction, "add", add_in_one):
        yield


def _in_one(inner: Callable[..., Any], fixed: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        fixes = _RUNNING.get() and _RUNNING.get() == _FIXED.get()
        return (fixed if fixes else inner)(*args, **kwargs)

    return chosen


def as_released() -> Any:
    """Return a context to use inside `fixes_in`. Engines that are made in this context do not have the fixes."""
    return _set(_FIXED, "")
