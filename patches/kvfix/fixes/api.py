"""The imports of a file with a fix: the record (record.py), and decorators that make the `fix` of a target.

@fix_after(when=lambda connector, answer, request, *_: answer[0])
def fix(connector, answer, request, *_): ...
"""

import functools
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kvfix import wrapping
from kvfix.acting import note as note
from kvfix.fixes.record import AT_START as AT_START
from kvfix.fixes.record import NEW_REQUESTS as NEW_REQUESTS
from kvfix.fixes.record import PRIVATE as PRIVATE
from kvfix.fixes.record import Fix as Fix
from kvfix.fixes.record import Fixing as Fixing
from kvfix.fixes.record import Function as Function
from kvfix.fixes.record import Owner as Owner
from kvfix.fixes.record import Probe as Probe
from kvfix.fixes.record import Target as Target
from kvfix.fixes.record import Wrapper as Wrapper

#: The answer of a function under `fix_around`.
Steps = Generator[Any, Any, Any]


@dataclass(frozen=True, eq=False)
class _Fixing:
    """The code of a fix that needs nothing of the function's module: the `fix` of a target.

    kind: before, after or around. options: its `when` and `on_fault` (kvfix.wrapping).
    """

    kind: str
    code: Function
    options: Mapping[str, Any]

    @property
    def fails_closed(self) -> bool:
        return self.options.get("on_fault") is not None

    def __call__(self, module: ModuleType) -> Wrapper:
        wrapper: Wrapper = getattr(wrapping, self.kind)(self.code, **self.options)
        return wrapper


def fix_before(**options: Any) -> Callable[[Function], Fixing]:
    """Decorate the code of a fix that runs before the function. options: `when` and `on_fault`."""
    return lambda code: _Fixing("before", code, options)


def fix_after(**options: Any) -> Callable[[Function], Fixing]:
    """Decorate the code of a fix that runs after the function. options: `when` and `on_fault`."""
    return lambda code: _Fixing("after", code, options)


def fix_around(**options: Any) -> Callable[[Function], Fixing]:
    """Decorate the code of a fix that runs before and after the function. options: `when` and `on_fault`.

    `answer = yield` calls the function. `yield (arguments,)` calls it with other arguments. Without a `yield` the code
    answers in place of the function.
    """
    return lambda code: _Fixing("around", code, options)


def fix_calls(code: Function) -> Fixing:
    """Decorate the code of a fix that calls the function itself, such as to handle its exception.

    code: (function, *arguments of the caller) -> the answer.
    """

    def wrap(function: Function) -> Function:
        return functools.wraps(function)(lambda *args, **kwargs: code(function, *args, **kwargs))

    return lambda module: wrap
