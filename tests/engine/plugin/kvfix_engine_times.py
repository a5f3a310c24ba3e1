"""Measure the processor time that kvfix's wrappers take. A comparison of whole runs is not exact enough."""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any


class OwnTime:
    """Counts kvfix's processor time (`seconds`) and the `calls` of wrapped functions, from the object's creation on."""

    def __init__(self, functions: Iterable[Any]) -> None:
        self._outside, self._inside = Spent(), Spent()
        #: This timer runs inside the timer `_inside`. The difference of the two times is the cost of one timer.
        self._within = Spent()
        for function in functions:
            function._function = timed(timed(function._function, self._within), self._inside)
            function._compose(function._wrappers)
            function._call = timed(function._call, self._outside)

    @property
    def calls(self) -> int:
        return self._outside.calls

    @property
    def seconds(self) -> float:
        inside = self._inside.seconds
        return self._outside.seconds - inside - (inside - self._within.seconds)


class Spent:
    seconds = 0.0
    calls = 0


def timed(function: Callable[..., Any], spent: Spent) -> Callable[..., Any]:
    """Return a function that calls `function`, and adds the processor time in seconds to `spent`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent.seconds += time.thread_time() - start
            spent.calls += 1

    return call
