import functools
import inspect
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from kvfix import metrics
from kvfix.fixes.api import fix_after
from kvfix.session import session
from kvfix.wrapping import GO_ON, WrappedFunction, after, around, before, instead

pytestmark = pytest.mark.usefixtures("faults")


class Hooked:  # calls: the arguments of each call of the hook. steps: what the wrapper did
    def __init__(self, wrap: Callable[..., Any], error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.steps: list[Any] = []
        self.error = error
        self.call = wrap(self.hook)

    def hook(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        if self.error is not None:
            raise self.error
        return "own"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


def skips_zero(hooked: Hooked, one: int) -> Any:
    return None if one else instead("without")


def puts_back(hooked: Hooked, one: int) -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:
        hooked.steps.append("put back")


def fails_at_the_end(hooked: Hooked, one: int) -> Generator[None, Any, Any]:
    try:
        yield
    finally:
        raise ValueError("planted")


@pytest.mark.parametrize(
    ("wrapper", "steps", "errors"), [(puts_back, ["put back"], 0), (skips_zero, [], 0), (fails_at_the_end, [], 1)]
)
def test_the_hooks_exception_is_raised(wrapper: Any, steps: list[str], errors: int) -> None:
    """kvfix raises the hook's exception and calls the hook only once. Only the wrapper's exceptions count as errors."""
    hooked = Hooked(around(wrapper), LookupError("its own"))
    with pytest.raises(LookupError, match="its own"):
        hooked(1)
    assert (hooked.steps, len(hooked.calls), sum(session.faults.values())) == (steps, 1, errors)


def raises(hooked: Hooked, *more: Any) -> Any:
    raise ValueError("planted")


def stops(hooked: Hooked, *more: Any) -> Any:
    raise StopIteration("of another iterator")


def raises_before_the_yield(hooked: Hooked, one: int) -> Generator[None, Any, Any]:
    raise ValueError("planted")
    yield


def raises_after_the_yield(hooked: Hooked, one: int) -> Generator[None, Any, Any]:
    yield
    raise ValueError("planted")


#: {case: (decorator, code of the wrapper, number of calls of the hook if `on_fault` gives the answer)}
FAULTS = {
    "before": (before, raises, 0),
    "after": (after, raises, 1),
    "around, at once": (around, raises, 0),
    "around, before the yield": (around, raises_before_the_yield, 0),
    "around, after the yield": (around, raises_after_the_yield, 1),
    "around, StopIteration": (around, stops, 0),
}


@pytest.mark.parametrize(("kind", "code", "calls"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("when", [None, raises])
@pytest.mark.parametrize(
    ("on_fault", "answer"),
    [(None, "own"), (lambda *_, **__: "closed", "closed"), (lambda *_, **__: GO_ON, "own"), (raises, "own")],
)
def test_the_answer_of_code_that_raises(
    kind: Any, code: Any, calls: int, when: Any, on_fault: Any, answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The wrapper's code or `when` raises. If `on_fault` raises too, the hook works as without the fix."""
    hooked = Hooked(kind(code, when=when, on_fault=on_fault))
    calls = calls if when is None else kind is after
    assert hooked(1) == answer
    assert hooked.calls == [((1,), {})] * (calls if answer == "closed" else 1)
    line, *more = caplog.messages
    assert line.startswith(f"a fault of kvfix itself in {__name__}.{code.__name__}: ")
    assert len(more) == (on_fault is raises)


class Counted:  # passed: the numbers that the hook gets
    passed: list[int] = []

    def hook(self, request: Any, tokens: int) -> Any:
        self.passed.append(tokens)
        return tokens


class Request:
    request_id = "r7"


class Odd:
    @property
    def request_id(self) -> str:
        raise LookupError("planted")


def acted(wrap: Any, *calls: int, request: Any = Request) -> tuple[list[Any], Any]:
    """Return the answers to these calls, and kvfix's counts for KVF001."""
    function = WrappedFunction(Counted, "hook", vars(Counted)["hook"])
    function.add("KVF001", 1, wrap)
    function.add("KVF002", 2, after(lambda counted, answer, *_: answer))
    Counted.passed.clear()
    try:
        answers = [Counted().hook(request, tokens) for tokens in calls]
    finally:
        function.clear()
    assert metrics.counts("KVF002") == {"acted": 0, "faults": 0, "first": ""}
    return answers, metrics.counts("KVF001")


def one_less(counted: Counted, request: Request, tokens: int) -> Generator[Any, Any, Any]:
    return (yield (request, tokens - 1))


def one_more_answer(counted: Counted, request: Request, tokens: int) -> Generator[Any, Any, Any]:
    return (yield) + 1


CALLS, LESS = [0, 256, 512], [-1, 255, 511]


@pytest.mark.parametrize(
    ("wrap", "answers", "passed", "expected", "first"),
    [
        (after(lambda counted, answer, *_: 0), [0, 0, 0], CALLS, 2,
         "Counted.hook: answered 256, corrected to 0 (request 'r7')"),
        (after(lambda counted, answer, *_: answer), CALLS, CALLS, 0, ""),
        (after(lambda counted, answer, *_: [1]), [[1]] * 3, CALLS, 3,
         "Counted.hook: answered 0, corrected to a list (request 'r7')"),
        (before(lambda counted, request, tokens: tokens > 0), CALLS, CALLS, 2, "Counted.hook (request 'r7')"),
        (before(lambda counted, request, tokens: None), CALLS, CALLS, 0, ""),
        (around(lambda counted, request, tokens: instead(1)), [1, 1, 1], [], 3,
         "Counted.hook: the call was skipped (request 'r7')"),
        (around(lambda counted, request, tokens: None), CALLS, CALLS, 0, ""),
        (around(one_less), LESS, LESS, 3, "Counted.hook: its arguments were corrected (request 'r7')"),
        (around(one_more_answer), [1, 257, 513], CALLS, 3, "Counted.hook: answered 0, corrected to 1 (request 'r7')"),
    ],
    ids=["answer", "same answer", "object", "before", "no before", "skipped", "no around", "arguments", "both sides"],
)  # fmt: skip
def test_a_fix_that_acts_is_counted(wrap, answers, passed, expected, first, caplog) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level("INFO", "kvfix")
    assert acted(wrap, *CALLS) == (answers, {"acted": expected, "faults": 0, "first": first})
    assert Counted.passed == passed
    assert caplog.messages == ([f"KVF001 acted: {first}"] if first else [])


def test_the_faults_of_a_fix_are_counted() -> None:
    assert acted(after(raises), 3, 4) == ([3, 4], {"acted": 0, "faults": 2, "first": ""})


def test_a_request_that_cannot_be_named_stops_nothing() -> None:
    _, found = acted(after(lambda counted, answer, *_: 0), 5, request=Odd())
    assert (found["acted"], found["faults"]) == (1, 0)


def as_named(answer: Hooked, hooked: int) -> str:
    answer.calls.append(((hooked,), {}))
    return "own"


def as_any(*args: Any, **kwargs: Any) -> str:
    return as_named(*args, **kwargs)


@pytest.mark.parametrize("hook", [as_named, as_any])
def test_when_decides(hook: Callable[..., Any]) -> None:
    """kvfix passes arguments to `when` by position, so `when` may have other parameter names than the hook."""
    hooked = Hooked(lambda _: None)
    wrapped = before(lambda hooked, one: hooked.steps.append(one), when=lambda hooked, one: one > 1)(hook)
    wrapped = after(
        lambda hooked, answer, one: answer + str(one), when=lambda hooked, answer, one: answer == "own" and one > 2
    )(wrapped)
    wrapped = around(lambda hooked, one: instead("without"), when=lambda hooked, one: one == 4)(wrapped)
    assert [wrapped(hooked, one) for one in (1, 2, 3, 4)] == ["own", "own", "own3", "without"]
    assert hooked.steps == [2, 3]
    assert hooked.calls == [((1,), {}), ((2,), {}), ((3,), {})]


def test_a_wrapper_gets_arguments_by_position_with_defaults() -> None:
    """One release passes an argument by position, another release passes the same argument by name."""
    given: list[Any] = []
    for kind in (before, around):
        hook = kind(lambda *args, **more: given.append((args, more)))(odd)
        hook(0, 1, three=3)
        hook(0, 1, two=5, three=6, four=7, five=8)
    after(lambda it, answer, *args, **more: given.append((args, more)))(odd)(0, 1, three=3)
    first, second = ((0, 1, 2), {"three": 3, "four": 4}), ((0, 1, 5), {"three": 6, "four": 7, "five": 8})
    assert given == [first, second, first, second, ((1, 2), {"three": 3, "four": 4})]


def odd(it: Any, one: int, /, two: int = 2, *many: Any, three: int, four: int = 4, **more: Any) -> Any:
    return (one, two, many, three, four, more)


def plain(it: Any, one: int, two: int = 2) -> Any:
    """Its docstring."""
    return (one, two)


@pytest.mark.parametrize(
    "kind", [after(lambda it, answer, *_, **__: answer), before(lambda *_, **__: None), around(lambda *_, **__: None)]
)
class TestParameters:
    def test_plain(self, kind: Any) -> None:
        hook = kind(plain)
        assert hook(0, 1) == hook(0, one=1) == hook(two=2, one=1, it=0) == (1, 2)
        assert inspect.signature(hook) == inspect.signature(plain)
        assert (hook.__name__, hook.__doc__, hook.__wrapped__) == ("plain", "Its docstring.", plain)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'one'"):
            hook(0)

    def test_odd(self, kind: Any) -> None:
        hook = kind(odd)
        assert hook(0, 1, three=3) == (1, 2, (), 3, 4, {})
        assert hook(0, 1, 5, 6, 7, three=3, four=8, five=9) == (1, 5, (6, 7), 3, 8, {"five": 9})
        with pytest.raises(TypeError, match="three"):
            hook(0, 1)

    def test_a_callable_that_is_no_function(self, kind: Any) -> None:
        hook = kind(functools.partial(plain, two=3))
        assert hook(0, 1) == hook(0, one=1) == (1, 3)


class Role(NamedTuple):  # `only` decides by `is_worker` whether a wrapper acts on an instance
    is_worker: Any

    def hook(self) -> str:
        return "own"


def is_worker(role: Role) -> bool:
    if role.is_worker is None:
        raise ValueError("planted")
    return bool(role.is_worker)


@pytest.mark.parametrize(
    ("role", "answer", "faults"), [(True, "own 1 2 3", 0), (False, "own 1 3", 0), (None, "own 1 closed 3", 1)]
)
def test_only_chooses_the_wrappers_of_an_instance(role: bool | None, answer: str, faults: int) -> None:
    """kvfix calls the wrapper on instances that `only` accepts. If `only` raises, the wrapper's `on_fault` answers."""

    def adds(text: str, **options: Any) -> Any:
        return fix_after(on_fault=lambda role, answer: f"{answer} closed", **options)(
            lambda role, answer: f"{answer} {text}"
        )(ModuleType("vllm"))

    function, before = WrappedFunction(Role, "hook", vars(Role)["hook"]), sum(session.faults.values())
    for order in (1, 2, 3):
        function.add(f"KVF00{order}", order, adds(str(order), **({"only": is_worker} if order == 2 else {})))
    try:
        assert Role(role).hook() == answer
    finally:
        function.clear()
    assert sum(session.faults.values()) - before == faults
