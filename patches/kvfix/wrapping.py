"""Wrap functions of vLLM or LMCache in plain closures. `before`, `after` and `around` make the closures.

In this module, the answer of a function is its return value. The wrapped function gets its arguments as the caller
passed them. The code of a wrapper gets the arguments by position, with the defaults filled in, because callers in
different releases pass different arguments by name.

A wrapper runs its code (`prepare`, `change` or `steps`) only if `when` returns true for the arguments of the call. To
save time, a wrapper may also have an attribute `only`: (instance) -> bool. A call skips all wrappers with an `only` if
every `only` returns false. For one instance, `only` must always return the same answer.

If the code of a wrapper raises, kvfix counts the error and logs the error once. The engine continues with the answer
that `on_fault` returns. Most fixes for a crash, leak or hang have no `on_fault`. The caller then gets the function's
own answer. A fix for wrong KV has an `on_fault` that reports a failed load, skips a store or promises 0 tokens. An
`on_fault` may instead make the call safe and return GO_ON. Fixes share the `on_fault` functions in `fixes._closed`.
"""

import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from kvfix import engine_log, metrics

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: `on_fault` returns GO_ON for the function's own answer. kvfix then calls the function, unless the function has run.
GO_ON = object()


class _Code:
    """The code of a wrapper, with the handling of its errors."""

    __slots__ = ("on_fault", "tally", "where")

    def __init__(self, code: Function, on_fault: Function | None) -> None:
        self.where = f"{code.__module__}.{code.__name__}"
        self.on_fault = on_fault
        self.tally = metrics.composing

    def count(self, error: Exception) -> None:
        engine_log.fault(self.where, error)
        metrics.count_fault(self.tally)

    def failed(self, error: Exception, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Count the error. Return the answer of `on_fault`, or GO_ON if `on_fault` is None or raises too."""
        self.count(error)
        try:
            return GO_ON if self.on_fault is None else self.on_fault(*given, **named)
        except Exception as second:  # noqa: BLE001
            engine_log.fault(f"{self.where} (on_fault)", second)
            return GO_ON


def before(prepare: Function, when: Function | None = None, on_fault: Function | None = None) -> Wrapper:
    """Call `prepare` before the function.

    prepare: (instance, *arguments) -> true if the fix has acted.
    on_fault: (arguments of the caller) -> answer, or GO_ON to call the function. Runs if `prepare` or `when` raises.
    """

    def wrap(function: Function) -> Function:
        parameters, by_position, code = _count_parameters(function), positional(function), _Code(prepare, on_fault)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                given, named = (args, kwargs) if len(args) == parameters else by_position(args, kwargs)
                if (when is None or when(*given, **named)) and prepare(*given, **named):
                    metrics.acted(code.tally, function, args)
            except Exception as error:  # noqa: BLE001
                answer = code.failed(error, args, kwargs)
                if answer is not GO_ON:
                    return answer
            return function(*args, **kwargs)

        return wrapper

    return wrap


def after(change: Function, when: Function | None = None, on_fault: Function | None = None) -> Wrapper:
    """Call the function, then change its answer.

    change: (instance, answer, *arguments) -> the right answer, or None to keep `answer`.
    on_fault: (instance, answer, *arguments of the caller) -> answer, or GO_ON. Runs if `change` or `when` raises.
    """

    def wrap(function: Function) -> Function:
        parameters, by_position, code = _count_parameters(function), positional(function), _Code(change, on_fault)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            answer = function(*args, **kwargs)
            try:
                (instance, *given), named = (args, kwargs) if len(args) == parameters else by_position(args, kwargs)
                if when is None or when(instance, answer, *given, **named):
                    changed = change(instance, answer, *given, **named)
                    if changed is not None and changed is not answer:
                        metrics.changed(code.tally, function, args, answer, changed)
                        return changed
            except Exception as error:  # noqa: BLE001
                closed = code.failed(error, (*args[:1], answer, *args[1:]), kwargs)
                return answer if closed is GO_ON else closed
            return answer

        return wrapper

    return wrap


def around(steps: Function, when: Function | None = None, on_fault: Function | None = None) -> Wrapper:
    """Run code before and after the function, in a generator that yields once.

    steps: (instance, *arguments) -> a generator, or None if there is nothing to do. The code before `answer = yield`
    runs before the function. The generator returns the right answer, or None to keep `answer`. `yield arguments` calls
    the function with `arguments` instead of the caller's arguments. A return before the `yield` skips the function. If
    the function raises, the caller gets the exception, and kvfix closes the generator (clean up in `finally`).
    on_fault: (arguments of the caller) -> answer, or GO_ON. Runs if the generator, `steps` or `when` raises.
    """

    def wrap(function: Function) -> Function:
        parameters, by_position, code = _count_parameters(function), positional(function), _Code(steps, on_fault)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            running = changed = None
            try:
                given, named = (args, kwargs) if len(args) == parameters else by_position(args, kwargs)
                running = steps(*given, **named) if when is None or when(*given, **named) else None
            except Exception as error:  # noqa: BLE001
                answer = code.failed(error, args, kwargs)
                if answer is not GO_ON:
                    return answer
            if running is None:
                return function(*args, **kwargs)
            try:
                changed = next(running)
            except StopIteration as done:
                metrics.acted(code.tally, function, args, "the call was skipped")
                return done.value
            except Exception as error:  # noqa: BLE001
                answer = code.failed(error, args, kwargs)
                return function(*args, **kwargs) if answer is GO_ON else answer
            try:
                answer = function(*args, **kwargs) if changed is None else function(args[0], *changed)
            except BaseException:
                try:
                    running.close()
                except Exception as error:  # noqa: BLE001 - the caller gets the exception of the function
                    code.count(error)
                raise
            try:
                running.send(answer)
            except StopIteration as done:
                right = answer if done.value is None else done.value
                if changed is not None:
                    metrics.acted(code.tally, function, args, "its arguments were corrected")
                elif right is not answer:
                    metrics.changed(code.tally, function, args, answer, right)
                return right
            except Exception as error:  # noqa: BLE001
                closed = code.failed(error, args, kwargs)
                return answer if closed is GO_ON else closed
            return answer

        return wrapper

    return wrap


def instead(answer: Any) -> Generator[None, Any, Any]:
    """A generator for `around` that skips the function and returns `answer`."""
    return answer
    yield


class View:
    """A view that replaces some attributes of an object. Other reads, and all writes, use the object."""

    def __init__(self, own: Any, **instead: Any) -> None:
        vars(self).update(instead, _own=own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own, name, value)


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set these attributes of `owner` inside the `with` block, then restore the earlier values."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            vars(owner).pop(name, None)
        vars(owner).update(before)


class WrappedFunction:
    """A function of vLLM or LMCache with wrappers around it.

    kvfix puts the function `placed` into the class. `placed` calls the current wrappers. So another tool may wrap or
    keep `placed` while wrappers change. kvfix does not use wrapt, because wrapt is slow to import.
    """

    def __init__(self, owner: Any, name: str, original: Any) -> None:
        """Raise TypeError if kvfix cannot wrap this kind of function."""
        kind = _other_kind(original)
        if kind:
            raise TypeError(f"{owner.__name__}.{name} is {kind}, and kvfix wraps functions and methods only")
        self.owner = owner
        self.name = name
        self.original = original
        #: True if a base class defines the function. kvfix then wraps the function in `owner`, not in the base class.
        self._is_inherited = name not in vars(owner)
        #: {key: (order, wrapper)}. The wrapper with the lowest order is the innermost.
        self._wrappers: dict[str, tuple[int, Wrapper]] = {}
        is_bound = isinstance(original, staticmethod | classmethod)
        self._function: Function = original.__func__ if is_bound else original
        self._call = self._function

        @functools.wraps(self._function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        self.placed: Any = type(original)(wrapped) if is_bound else wrapped

    def __contains__(self, key: str) -> bool:
        return key in self._wrappers

    def add(self, key: str, order: int, wrapper: Wrapper) -> None:
        self._compose({**self._wrappers, key: (order, wrapper)})

    def remove(self, key: str) -> None:
        """Remove a wrapper. If this was the last wrapper, put the original function back into the class."""
        if key in self._wrappers:
            self._compose({name: each for name, each in self._wrappers.items() if name != key})

    def clear(self) -> None:
        self._compose({})

    def _compose(self, wrappers: dict[str, tuple[int, Wrapper]]) -> None:
        call = others = self._function
        guards: dict[Function, None] = {}
        try:
            for _, key, wrap in sorted((order, key, wrap) for key, (order, wrap) in wrappers.items()):
                metrics.composing = metrics.of(key)
                call = wrap(call)
                only = getattr(wrap, "only", None)
                if only is not None:
                    guards[only] = None
                else:
                    others = wrap(others) if guards else call
        finally:
            metrics.composing = metrics.NONE
        if guards:
            call = _for_some(tuple(guards), call, others)
        self._wrappers, self._call = wrappers, call
        current = vars(self.owner).get(self.name)
        if wrappers and current is (None if self._is_inherited else self.original):
            setattr(self.owner, self.name, self.placed)
        elif not wrappers and current is self.placed:
            if self._is_inherited:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)


def _for_some(guards: tuple[Function, ...], call: Function, others: Function) -> Function:
    """Return a function that calls `call` if any guard returns true for the instance, and `others` if none does."""

    @functools.wraps(others)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        chain = others
        try:
            for only in guards:
                if only(args[0]):
                    chain = call
                    break
        except Exception:  # noqa: BLE001 - the wrapper calls the guard again (fixes/api.py), and handles the error
            chain = call
        return chain(*args, **kwargs)

    return chosen


def _other_kind(original: Any) -> str:
    """Describe a value that kvfix cannot wrap, such as "a property". Return "" for a function or a method."""
    original = getattr(original, "__func__", original)
    if inspect.iscoroutinefunction(original) or inspect.isasyncgenfunction(original):
        return "an async function"
    return "" if callable(original) else f"a {type(original).__name__}"


def _count_parameters(function: Function) -> int:
    """Return the number of positional parameters, or -1 if `positional` must handle every call of the function."""
    inner = inspect.unwrap(function)
    return inner.__code__.co_argcount if isinstance(inner, FunctionType) and not inner.__kwdefaults__ else -1


@functools.lru_cache(maxsize=256)
def positional(function: Function) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments]:
    """Return a function that sorts the arguments of a call by position and fills in the defaults.

    The slower `inspect.Signature.bind` would add 5 microseconds to each call of a wrapper.
    """
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        return lambda args, kwargs: (args, kwargs)
    names = inner.__code__.co_varnames[: inner.__code__.co_argcount]
    values = inner.__defaults__ or ()
    defaults = dict(zip(names[len(names) - len(values) :], values, strict=True))
    keywords = inner.__kwdefaults__ or {}

    def by_position(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        missing = names[len(args) :]
        if not missing and not keywords:
            return args, kwargs
        named = {**keywords, **kwargs}
        found = [named.pop(name) if name in named else defaults[name] for name in missing]
        return (*args, *found), named

    return by_position
