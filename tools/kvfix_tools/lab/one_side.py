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

#: The name of the engine that runs; "": none.
_RUNNING = ContextVar("_RUNNING", default="")


@contextmanager
def running(name: str) -> Iterator[None]:
    """The engine of this name runs. A copy of the context, as asyncio makes for its tasks, keeps that."""
    before = _RUNNING.set(name)
    try:
        yield
    finally:
        _RUNNING.reset(before)


@contextmanager
def fixes_in(name: str) -> Iterator[None]:
    """A fix that is applied meanwhile acts in the engine of this name alone."""
    add = WrappedFunction.add

    def add_in_one(function: WrappedFunction, key: str, place: int, wrapper: Callable[..., Any]) -> None:
        def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
            fixed = wrapper(inner)

            @functools.wraps(inner)
            def chosen(*args: Any, **kwargs: Any) -> Any:
                return (fixed if _RUNNING.get() == name else inner)(*args, **kwargs)

            return chosen

        add(function, key, place, wrap)

    with mock.patch.object(WrappedFunction, "add", add_in_one):
        yield
