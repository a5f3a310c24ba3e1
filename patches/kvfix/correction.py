"""How a correction hangs on a hook: before it, after it, or around it.

A hook runs in every step of the engine. `def hook(*args, **kwargs)` that calls on with `*args` costs 60 to 120 ns, a
plain call 8: so each function that stands for a hook is made, once, with the hook's own parameters.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kvfix import notice

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import CodeType

#: Flags of a code object: it has `*args`, it has `**kwargs`.
_VARARGS, _VARKEYWORDS = 4, 8

PLAIN = """
def hook({parameters}):
    return _original({arguments})
"""
_BEFORE = """
def hook({parameters}):
    try:
        _correct({arguments})
    except Exception as _error:
        _fault(_where, _error)
    return _original({arguments})
"""
_AFTER = """
def hook({parameters}):
    _answer = _original({arguments})
    try:
        return _correct({first}, _answer{rest})
    except Exception as _error:
        _fault(_where, _error)
        return _answer
"""
_AROUND = """
def hook({parameters}):
    try:
        _steps = _correct({arguments})
    except Exception as _error:
        _fault(_where, _error)
        _steps = None
    return _original({arguments}) if _steps is None else _drive(_original, _where, _steps, {arguments})
"""


def before(prepare: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A correction that sets right what the hook is going to read, then lets it answer.

    prepare: (instance, *arguments of the hook); what it returns is not looked at. Should it fail, the hook runs all the
    same and the fault is said once.
    """
    return functools.partial(_corrected, _BEFORE, prepare)


def after(correct: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A correction that lets the hook answer, then corrects the answer: the cheapest one, for what runs often.

    correct: (instance, answer, *arguments of the hook) -> the right answer. Should it fail, the hook's own answer
    stands and the fault is said once.
    """
    return functools.partial(_corrected, _AFTER, correct)


def around(correct: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A correction that has something to do before the hook, after it, or both: a generator that yields once.

    correct: (instance, *arguments of the hook) -> None where there is nothing to correct, which costs next to nothing;
    or a generator. What stands before its `answer = yield` runs before the hook, and what it returns is the right
    answer. `yield arguments` runs the hook with those instead of the caller's, who keeps his as they are.
    Returning before the yield: the hook is not run. If the hook raises, its exception goes on to the caller, and the
    generator is closed where it stands (use `finally` for what must be put back). Should the correction fail, the
    hook runs with the caller's arguments, its own answer stands, and the fault is said once.
    """
    return functools.partial(_corrected, _AROUND, correct)


def instead(answer: Any) -> Generator[None, Any, Any]:
    """For `around`: this is the answer, and the hook is not run."""
    return answer
    yield


def like(original: Any, template: str, names: dict[str, Any]) -> Callable[..., Any]:
    """A function made from the template that has the parameters of `original` and sees `names`, by name, as they are.

    It hands all arguments on by position, defaults filled in; keyword-only ones by name. For what is no plain function
    it takes any arguments and hands them on as they came.
    """
    names["_original"] = original
    exec(_compiled(template, *_parameters(original)), names)  # the text is ours, what is put into it are identifiers
    hook = names.pop("hook")
    if isinstance(original, FunctionType):
        hook.__defaults__, hook.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    found: Callable[..., Any] = functools.wraps(original)(hook)
    return found


def _corrected(template: str, correct: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    where = f"{correct.__module__}.{correct.__name__}"
    names = {"_correct": correct, "_where": where, "_fault": notice.fault, "_drive": _drive}
    return like(original, template, names)


def _parameters(original: Any) -> tuple[str, str, str]:
    """As they are written in a `def` without defaults; the first as it is handed on; and the others."""
    if not isinstance(original, FunctionType) or not original.__code__.co_argcount:
        return "_instance, *args, **kwargs", "_instance", ", *args, **kwargs"
    code = original.__code__
    plain, keywords = code.co_argcount, code.co_kwonlyargcount
    names = code.co_varnames
    by_place, by_name = list(names[:plain]), names[plain : plain + keywords]
    stars = list(names[plain + keywords :])
    many = [f"*{stars.pop(0)}"] if code.co_flags & _VARARGS else []
    more = [f"**{stars.pop(0)}"] if code.co_flags & _VARKEYWORDS else []
    declared = list(by_place)
    if code.co_posonlyargcount:
        declared.insert(code.co_posonlyargcount, "/")
    declared += many or (["*"] if keywords else [])
    handed = [*by_place[1:], *many, *(f"{name}={name}" for name in by_name), *more]
    return ", ".join([*declared, *by_name, *more]), by_place[0], "".join(f", {each}" for each in handed)


@functools.lru_cache(maxsize=256)
def _compiled(template: str, parameters: str, first: str, rest: str) -> CodeType:
    text = template.format(parameters=parameters, arguments=first + rest, first=first, rest=rest)
    return compile(text, "<a hook corrected by kvfix>", "exec")


def _drive(original: Callable[..., Any], where: str, steps: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The hook with the steps of a generator around it."""
    try:
        given = next(steps)
    except StopIteration as done:
        return done.value
    except Exception as error:  # noqa: BLE001
        notice.fault(where, error)
        return original(*args, **kwargs)
    try:
        answer = original(*args, **kwargs) if given is None else original(args[0], *given)
    except BaseException:
        with suppress(Exception):
            steps.close()
        raise
    try:
        steps.send(answer)
    except StopIteration as done:
        return done.value
    except Exception as error:  # noqa: BLE001
        notice.fault(where, error)
    return answer
