"""The processor time that kvfix itself takes in the functions that it wraps.

Each call times the wrapper and the original: the times of whole runs would differ by more than kvfix takes.
"""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any


class OwnTime:
    """`seconds` of kvfix, and `calls` of wrapped functions, since this object was made."""

    def __init__(self, functions: Iterable[Any]) -> None:
        """functions: objects of WrappedFunction that have wrappers."""
        self._outside: list[float] = []
        self._inside: list[float] = []
        #: Times of the innermost of two nested timers. The difference to `_inside` is the time of one timer.
        self._within: list[float] = []
        for function in functions:
            function._function = timed(timed(function._function, self._within), self._inside)
            function._compose(function._wrappers)
            function._call = timed(function._call, self._outside)

    @property
    def calls(self) -> int:
        return len(self._outside)

    @property
    def seconds(self) -> float:
        outside, inside, within = map(sum, (self._outside, self._inside, self._within))
        return outside - inside - (inside - within)


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Return the function. Each call adds its processor time, in seconds, to `spent`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent.append(time.thread_time() - start)

    return call
