"""Fixes in one of two engines of this process, and not in the other: a mixed roll-out.

The engines share vLLM's and LMCache's classes, and so kvfix's wrappers. A wrapper asks which engine runs: the lab says
so with `running`, for what it calls of an engine and for what an engine leaves to be called later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

from kvfix.wrapping import WrappedFunction

#: The name of the engine that runs, and of the one that has the fixes; "": none. A copy of the context, as asyncio
#: makes for its tasks, keeps them.
_RUNNING = ContextVar("_RUNNING", default="")
_FIXED = ContextVar("_FIXED", default="")


@contextmanager
def running(name: str) -> Iterator[None]:
    """The engine of this name runs."""
    before = _RUNNING.set(name)
    try:
        yield
    finally:
        _RUNNING.reset(before)


@contextmanager
def fixes_in(name: str) -> Iterator[None]:
    """A fix that is applied meanwhile acts in the engine of this name alone."""
    add, before = WrappedFunction.add, _FIXED.set(name)

    def add_in_one(function: WrappedFunction, key: str, place: int, wrapper: Callable[..., Any]) -> None:
        add(function, key, place, lambda inner: _in_one(inner, wrapper(inner)))

    try:
        with mock.patch.object(WrappedFunction, "add", add_in_one):
            yield
    finally:
        _FIXED.reset(before)


def _in_one(inner: Callable[..., Any], fixed: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        fixes = _RUNNING.get() and _RUNNING.get() == _FIXED.get()
        return (fixed if fixes else inner)(*args, **kwargs)

    return chosen


@contextmanager
def as_released() -> Iterator[None]:
    """Within `fixes_in`: no engine that is made meanwhile has the fixes."""
    before = _FIXED.set("")
    try:
        yield
    finally:
        _FIXED.reset(before)
