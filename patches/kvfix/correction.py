"""How a correction hangs on a hook: before it, after it, or around it.

A hook runs in every step of the engine. `def hook(*args, **kwargs)` that calls on with `*args` costs 60 to 120 ns, a
plain call 8, and each function more that is called 50 to 150. So one function is made for a hook and all of its
corrections, with the hook's own parameters, and what they look at to see whether they have anything to do, their
`when`, is looked at in there: where they have not, it costs no call.
"""

from __future__ import annotations

import functools
import re
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kvfix import notice

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from types import CodeType

#: Flags of a code object: it has `*args`, it has `**kwargs`.
_VARARGS, _VARKEYWORDS = 4, 8
#: A name, and no attribute of this name.
_NAME = r"(?<![.\w\"])(?:{})\b"

#: What stands for the hook. `inner`: what all corrections but the outermost do; `name`: of that one.
_HOOK = """
def hook({parameters}):
{inner}
    return _answer
"""
_ORIGINAL = """
_answer = _original({first}{rest})
"""
_BEFORE = """
try:
    if {when}:
        {name}({first}{rest})
except Exception as _error:
    _fault({where!r}, _error)
{inner}
"""
_AFTER = """
{inner}
try:
    if {when}:
        _answer = {name}({first}, _answer{and_noted}{rest})
except Exception as _error:
    _fault({where!r}, _error)
"""
#: Before what an `after` adds, for one that notes something. `inner`: the hook and that.
_NOTED = """
try:
    {name}_noted = {noted}
except Exception as _error:
    _fault({where!r}, _error)
    {name}_noted = None
{inner}
"""
_AROUND = """
try:
    _steps = {name}({first}{rest}) if {when} else None
except Exception as _error:
    _fault({where!r}, _error)
    _steps = None
if _steps is None:
{inner_deeper}
else:
    _answer = _drive({name}_inner, {where!r}, _steps, {first}{rest})
"""


class Correction:
    """What `before`, `after` and `around` make of a function of a fix. Calling it puts it around a hook."""

    def __init__(
        self, template: str, correct: Callable[..., Any], when: str, known: dict[str, Any], noted: str = ""
    ) -> None:
        self.template = template
        self.correct = correct
        self.when = when
        self.noted = noted
        #: What `when` and `noted` see beside the parameters.
        self.known = known
        self.where = f"{correct.__module__}.{correct.__name__}"
        #: In the text of a hook, one for each correction: while texts are exchanged a call may see names of both.
        self.name = "_" + re.sub(r"\W", "_", self.where)

    def __call__(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return corrected(original, [self])

    def in_hook(self, expression: str, hook: list[str], named: str) -> str:
        """The expression with the names of a hook's parameters in place of its own; "" if they do not have names.

        What is known to it is called `{named}_{name}`.
        """
        own, given = self._parameters(), list(hook)
        given[1:1] = self._own_first(named)
        names = dict(zip(own, given, strict=False))
        if any(re.search(_NAME.format(name), expression) for name in own[len(names) :]):
            return ""
        names |= {name: f"{named}_{name}" for name in self.known}
        return re.sub(_NAME.format("|".join(names)), lambda found: names[found[0]], expression)

    def guarded(self) -> Callable[..., Any]:
        """The correction with its `when` in front, for such a hook."""
        has_to = self._asked(self.when, self._parameters())

        def correct(*args: Any, **kwargs: Any) -> Any:
            if has_to(*args, **kwargs):
                return self.correct(*args, **kwargs)
            return args[1] if self.template is _AFTER else None

        return correct

    def note(self) -> Callable[..., Any]:
        """`noted` as a function of what such a hook is called with."""
        own = self._parameters()
        return self._asked(self.noted, (*own[:1], *own[1 + len(self._own_first("")) :]))

    def _asked(self, expression: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
        found: Callable[..., Any] = eval(f"lambda {', '.join(parameters)}, *_, **__: {expression}", dict(self.known))
        found.__defaults__ = self.correct.__defaults__
        return found

    def _own_first(self, named: str) -> list[str]:
        """What the correction gets between the instance and the arguments of the hook."""
        if self.template is not _AFTER:
            return []
        return ["_answer", f"{named}_noted"] if self.noted else ["_answer"]

    def _parameters(self) -> tuple[str, ...]:
        code = self.correct.__code__
        return code.co_varnames[: code.co_argcount]


def before(prepare: Callable[..., Any], when: str = "", **known: Any) -> Correction:
    """A correction that sets right what the hook is going to read, then lets it answer.

    prepare: (instance, *arguments of the hook); what it returns is not looked at. Should it fail, the hook runs all the
    same and the fault is said once.
    when: an expression of its parameters and of what is `known`, most often false, and then it is not called.
    """
    return Correction(_BEFORE, prepare, when, known)


def after(correct: Callable[..., Any], when: str = "", noted: str = "", **known: Any) -> Correction:
    """A correction that lets the hook answer, then corrects the answer: the cheapest one, for what runs often.

    correct: (instance, answer, *arguments of the hook) -> the right answer. Should it fail, the hook's own answer
    stands and the fault is said once.
    when: an expression of its parameters and of what is `known`, most often false, and then it is not called.
    noted: such an expression that is looked at before the hook; what it gave is the parameter after the answer.
    """
    return Correction(_AFTER, correct, when, known, noted)


def around(correct: Callable[..., Any], when: str = "", **known: Any) -> Correction:
    """A correction that has something to do before the hook, after it, or both: a generator that yields once.

    correct: (instance, *arguments of the hook) -> None where there is nothing to correct, which costs next to nothing;
    or a generator. What stands before its `answer = yield` runs before the hook, and what it returns is the right
    answer. `yield arguments` runs the hook with those instead of the caller's, who keeps his as they are.
    Returning before the yield: the hook is not run. If the hook raises, its exception goes on to the caller, and the
    generator is closed where it stands (use `finally` for what must be put back). Should the correction fail, the
    hook runs with the caller's arguments, its own answer stands, and the fault is said once.
    when: an expression of its parameters and of what is `known`, most often false, and then it is not called.
    """
    return Correction(_AROUND, correct, when, known)


def instead(answer: Any) -> Generator[None, Any, Any]:
    """For `around`: this is the answer, and the hook is not run."""
    return answer
    yield


class View:
    """An object of the engine as a hook is to see it: what is not `instead` is the object's own, also what is set."""

    def __init__(self, own: Any, **instead: Any) -> None:
        vars(self).update(instead, _own=own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own, name, value)


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """For `around`: while the hook runs, the object has these; then what it had itself is there again."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            vars(owner).pop(name, None)
        vars(owner).update(before)


def corrected(original: Any, corrections: Sequence[Callable[[Any], Any]]) -> Callable[..., Any]:
    """One function that stands for the original with all of these around it, the first one nearest to it.

    It has the parameters of the original and hands all of them on by position, defaults filled in; keyword-only ones by
    name. For what is no plain function it takes any arguments and hands them on as they came. A decorator of another
    kind gets what is inside of it as a function.
    """
    inside: list[Correction] = []
    called = original
    for each in corrections:
        if isinstance(each, Correction):
            inside.append(each)
        else:
            called, inside = each(_joined(original, called, inside)), []
    return _joined(original, called, inside)


def _joined(original: Any, called: Any, corrections: list[Correction]) -> Callable[..., Any]:
    """With the parameters of the original; what is called in its place is a decorator's."""
    names: dict[str, Any] = {"_original": called, "_fault": notice.fault, "_drive": _drive}
    by_place, parameters, rest = _parameters(original)
    first = by_place[0]
    text = "_answer = None" if _does_nothing(called) else _ORIGINAL.format(first=first, rest=rest)
    for place, each in enumerate(corrections):
        name = f"{each.name}_{place}"
        when = each.when and each.in_hook(each.when, by_place, name)
        names[name] = each.guarded() if each.when and not when else each.correct
        names |= {f"{name}_{known}": value for known, value in each.known.items()}
        if each.template is _AROUND:
            names[f"{name}_inner"] = _joined(original, called, corrections[:place]) if place else called
        filled = {"name": name, "when": when or "True", "where": each.where, "first": first, "rest": rest}
        and_noted = f", {name}_noted" if each.noted else ""
        text = each.template.format(inner=text, inner_deeper=_deeper(text), and_noted=and_noted, **filled)
        if each.noted:
            noted = each.in_hook(each.noted, by_place, name)
            if not noted:
                names[f"{name}_note"], noted = each.note(), f"{name}_note({first}{rest})"
            text = _NOTED.format(inner=text, noted=noted, **filled)
    return _made(original, _HOOK.format(parameters=parameters, inner=_deeper(text)), names)


def _does_nothing(function: Any) -> bool:
    """Whether it is a docstring and no more, as hooks are in the base class of vLLM's connectors: calling it costs."""
    if not isinstance(function, FunctionType):
        return False
    code, nothing = function.__code__, _does_nothing_itself.__code__
    return code.co_code == nothing.co_code and code.co_consts[1:] == nothing.co_consts[1:]


def _does_nothing_itself() -> None:
    """What such a one is compiled to."""


def like(original: Any, template: str, names: dict[str, Any]) -> Callable[..., Any]:
    """A function made from the template that has the parameters of `original` and sees `names`, by name, as they are.

    In the template `{parameters}` stands for them, `{first}` for the first, `{arguments}` for all as `_original` takes
    them: by position, defaults filled in, keyword-only ones by name. For what is no plain function: any, as they came.
    """
    by_place, parameters, rest = _parameters(original)
    text = template.format(parameters=parameters, first=by_place[0], arguments=f"{by_place[0]}{rest}")
    return _made(original, text, {**names, "_original": original})


def _made(original: Any, text: str, names: dict[str, Any]) -> Callable[..., Any]:
    exec(_compiled(text), names)  # the text is ours, what is put into it are identifiers and expressions of ours
    hook = names.pop("hook")
    hook.__code__ = hook.__code__.replace()  # its own, since the interpreter keeps in it what it has seen of `names`
    if isinstance(original, FunctionType):
        hook.__defaults__, hook.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    found: Callable[..., Any] = functools.wraps(original)(hook)
    return found


def _deeper(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines() if line)


def _parameters(original: Any) -> tuple[list[str], str, str]:
    """Those by place; all, as they are written in a `def` without defaults; and all but the first as handed on."""
    if not isinstance(original, FunctionType) or not original.__code__.co_argcount:
        return ["_instance"], "_instance, *args, **kwargs", ", *args, **kwargs"
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
    return by_place, ", ".join([*declared, *by_name, *more]), "".join(f", {each}" for each in handed)


@functools.lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
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
