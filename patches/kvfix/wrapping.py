"""Wrap functions of vLLM or LMCache with plain closures, which `before`, `after` and `around` make.

The function gets its arguments as the caller passed them. A wrapper's code gets the arguments by position, with the
defaults filled in, because releases and callers differ in what they pass by name.

A wrapper runs its code (`prepare`, `change` or `steps`) only if `when` returns true for the same arguments. A wrapper
may have an attribute `only`, a function of the instance. If every `only` around a function returns false, the call
skips these wrappers, to save time. `only` must always return the same answer for one instance, such as its role.

If the code of a wrapper raises, kvfix counts the error and logs it once. The engine continues with the answer that
`on_fault` returns. Fixes of crashes, leaks and hangs have no `on_fault`: the caller gets the function's own answer. A
fix of wrong KV has one that fails closed: it reports a failed load, skips a store or promises 0 tokens. An `on_fault`
that makes the call safe returns GO_ON. `kvfix.fixes._closed` has the `on_fault` functions that several fixes share.
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
#: `on_fault` returns GO_ON if the function may run. If the function has already run, the caller gets its answer.
GO_ON = object()


class _Code:
    """The error handling of a wrapper's code, which `before`, `after` and `around` share."""

    __slots__ = ("on_fault", "tally", "where")

    def __init__(self, code: Function, on_fault: Function | None) -> None:
        self.where = f"{code.__module__}.{code.__name__}"
        self.on_fault = on_fault
        self.tally = metrics.composing

    def count(self, error: Exception) -> None:
        engine_log.fault(self.where, error)
        metrics.count_fault(self.tally)

    def failed(self, error: Exception, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Count the error. Return the answer of `on_fault`; GO_ON if there is none, or if `on_fault` raises too."""
        self.count(error)
        try:
            return GO_ON if self.on_fault is None else self.on_fault(*given, **named)
        except Exception as second:  # noqa: BLE001
            engine_log.fault(f"{self.where} (on_fault)", second)
            return GO_ON


def before(prepare: Function, when: Function | None = None, on_fault: Function | None = None) -> Wrapper:
    """Call `prepare` before the function.

    prepare: (instance, *arguments) -> true if the fix has acted.
    on_fault: (arguments of the caller) -> the answer if `prepare` or `when` raises, or GO_ON to call the function.
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

    change: (instance, answer, *arguments) -> the right answer, or None to keep `answer`. The fix acts if they differ.
    on_fault: (instance, answer, *arguments of the caller) -> the answer if `change` or `when` raises.
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
    the function with `arguments` instead of the caller's. A return before the yield skips the function. If the function
    raises, the caller gets the exception, and kvfix closes the generator (clean up in `finally`). The fix has acted if
    it changes the arguments or the answer, or skips the call.
    on_fault: (arguments of the caller) -> the answer if the generator raises. GO_ON: use the function's own answer.
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
    """For `around`: return this answer without calling the function."""
    return answer
    yield


class View:
    """An object of the engine with some attributes replaced. Other reads, and all writes, go to the object itself."""

    def __init__(self, own: Any, **instead: Any) -> None:
        vars(self).update(instead, _own=own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own, name, value)


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """For `around`: set these attributes of the object while the function runs, then restore the earlier values."""
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

    kvfix puts one function (`placed`) into the class. It calls the current wrappers, so another tool can wrap it and
    keep a reference to it while wrappers change. wrapt.FunctionWrapper could do this, but takes too long to import.
    """

    def __init__(self, owner: Any, name: str, original: Any) -> None:
        """Raise TypeError if kvfix cannot wrap this kind of function."""
        kind = _other_kind(original)
        if kind:
            raise TypeError(f"{owner.__name__}.{name} is {kind}, and kvfix wraps functions and methods only")
        self.owner = owner
        self.name = name
        self.original = original
        #: True if a base class defines the function. kvfix then wraps the function only in `owner`, not in the base.
        self._is_inherited = name not in vars(owner)
        #: {key: (order, wrapper)}. The wrapper with the lowest order is innermost.
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
        """Remove a wrapper. After the last wrapper, the class has its original function again."""
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
    """Return a function that runs `call` if a guard returns true for the instance. Otherwise it runs `others`."""

    @functools.wraps(others)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        chain = others
        try:
            for only in guards:
                if only(args[0]):
                    chain = call
                    break
        except Exception:  # noqa: BLE001 - the wrapper that has this guard handles the error
            chain = call
        return chain(*args, **kwargs)

    return chosen


def _other_kind(original: Any) -> str:
    """Return the kind of a value that kvfix cannot wrap, such as "a property"; "" for a function or a method."""
    original = getattr(original, "__func__", original)
    if inspect.iscoroutinefunction(original) or inspect.isasyncgenfunction(original):
        return "an async function"
    return "" if callable(original) else f"a {type(original).__name__}"


def _count_parameters(function: Function) -> int:
    """Return with how many positional arguments a call does not need `positional`; -1 if every call needs it."""
    inner = inspect.unwrap(function)
    return inner.__code__.co_argcount if isinstance(inner, FunctionType) and not inner.__kwdefaults__ else -1


@functools.lru_cache(maxsize=256)
def positional(function: Function) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments]:
    """Return a function that sorts the arguments of a call by position and fills in the defaults.

    `inspect.Signature.bind` does the same, but takes 5 microseconds for every call of every wrapper.
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
