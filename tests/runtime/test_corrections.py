"""What `around`, `before` and `after` do with a hook: its arguments, its answer, its exception, their own failure."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any

import pytest

from kvfix import notice
from kvfix.correction import after, around, before, corrected, instead


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is reported once in a process; each test is to see its own."""
    monkeypatch.setattr(notice, "faults", {})
    monkeypatch.setattr(notice, "_said", set())


class Hooked:
    """`seen`: what the hook was called with. `told`: what the correction did."""

    def __init__(self, correct: Callable[..., Any], error: Exception | None = None) -> None:
        self.seen: list[Any] = []
        self.told: list[Any] = []
        self.error = error
        self.call = correct(self.hook)

    def hook(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args, kwargs))
        if self.error is not None:
            raise self.error
        return "own"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


class TestAround:
    def test_both_sides(self) -> None:
        @around
        def correct(hooked: Hooked, one: int) -> Generator[None, Any, Any]:
            hooked.told.append("before")
            answer = yield
            hooked.told.append(answer)
            return "corrected"

        hooked = Hooked(correct)
        assert hooked(one=1) == "corrected"
        assert hooked.seen == [((), {"one": 1})]
        assert hooked.told == ["before", "own"]

    def test_other_arguments(self) -> None:
        @around
        def correct(hooked: Hooked, one: int) -> Generator[Any, Any, Any]:
            return (yield (one + 1,))

        hooked = Hooked(correct)
        assert hooked(1) == "own"
        assert hooked.seen == [((2,), {})]

    def test_nothing_to_correct_and_no_hook_at_all(self) -> None:
        hooked = Hooked(around(lambda hooked, one: None if one else instead("without")))
        assert (hooked(1), hooked(0)) == ("own", "without")
        assert hooked.seen == [((1,), {})]

    def test_the_hooks_exception_goes_on_and_all_is_put_back(self) -> None:
        @around
        def correct(hooked: Hooked) -> Generator[None, Any, Any]:
            try:
                return (yield)
            finally:
                hooked.told.append("put back")

        hooked = Hooked(correct, LookupError("its own"))
        with pytest.raises(LookupError, match="its own"):
            hooked()
        assert hooked.told == ["put back"]

    def test_the_hooks_exception_where_there_is_nothing_to_correct(self) -> None:
        hooked = Hooked(around(lambda hooked: None), LookupError("its own"))
        with pytest.raises(LookupError, match="its own"):
            hooked()
        assert len(hooked.seen) == 1  # not tried again, and no fault of kvfix

    @pytest.mark.parametrize("where", ["at once", "before", "after"])
    def test_a_correction_that_fails(self, where: str) -> None:
        @around
        def correct(hooked: Hooked, one: int) -> Any:
            if where == "at once":
                raise ValueError
            return steps()

        def steps() -> Generator[None, Any, Any]:
            if where == "before":
                raise ValueError
            yield
            raise ValueError

        hooked = Hooked(correct)
        assert hooked(1) == "own"
        assert hooked.seen == [((1,), {})]  # once


def test_before_and_after() -> None:
    def prepare(hooked: Hooked, one: int) -> None:
        hooked.told.append(one)

    def correct(hooked: Hooked, answer: str, one: int) -> str:
        return answer + str(one)

    hooked = Hooked(lambda original: after(correct)(before(prepare)(original)))
    assert hooked(1) == "own1"
    assert (hooked.told, hooked.seen) == ([1], [((1,), {})])


def as_named(answer: Hooked, hooked: int) -> str:
    answer.seen.append(((hooked,), {}))
    return "own"


def as_any(*args: Any, **kwargs: Any) -> str:
    return as_named(*args, **kwargs)


@pytest.mark.parametrize("hook", [as_named, as_any])
class TestWhen:
    """An expression of the correction's own names, whatever the hook calls them: whether it is called."""

    def test_true_and_false(self, hook: Callable[..., Any]) -> None:
        def changes(hooked: Hooked, answer: str, one: int) -> str:
            return answer + str(one)

        def prepares(hooked: Hooked, one: int) -> None:
            hooked.told.append(one)

        def answers(hooked: Hooked, one: int) -> Any:
            return instead("without")

        hooked = Hooked(lambda _: None)
        around_all = [
            before(prepares, when="one > 1"),
            after(changes, when='answer == "own" and one > 2'),
            around(answers, when='getattr(hooked, "one", one) == 4'),
        ]
        corrected_hook = corrected(hook, around_all)
        assert [corrected_hook(hooked, one) for one in (1, 2, 3, 4)] == ["own", "own", "own3", "without"]
        assert hooked.told == [2, 3]
        assert hooked.seen == [((1,), {}), ((2,), {}), ((3,), {})]

    def test_sees_what_is_known(self, hook: Callable[..., Any]) -> None:
        """Each its own, also of the same name."""

        def adds(wanted: int) -> Any:
            def changes(hooked: Hooked, answer: str, one: int) -> str:
                return f"{answer}{wanted}"

            return after(changes, when="one >= wanted", wanted=wanted)

        corrected_hook = corrected(hook, [adds(2), adds(3)])
        assert [corrected_hook(Hooked(lambda _: None), one) for one in (1, 2, 3)] == ["own", "own2", "own23"]

    def test_noted_before_the_hook(self, hook: Callable[..., Any]) -> None:
        """By each for itself; `when` sees it too."""

        def changes(hooked: Hooked, answer: str, before: int, one: int) -> str:
            return f"{answer}{before}{len(hooked.seen)}"

        calls = {"noted": "len(hooked.seen) * times", "when": "before >= 2"}
        around_all = [after(changes, **calls, times=1), after(changes, **calls, times=2)]
        corrected_hook, hooked = corrected(hook, around_all), Hooked(lambda _: None)
        assert [corrected_hook(hooked, one) for one in (1, 2, 3)] == ["own", "own22", "own2343"]

    def test_noted_that_fails(self, hook: Callable[..., Any], caplog: Any) -> None:
        def correct(hooked: Hooked, answer: str, noted: None, one: int) -> str:
            return answer + str(noted)

        assert after(correct, noted="hooked.nobody_has_this")(hook)(Hooked(lambda _: None), 1) == "ownNone"
        (line,) = caplog.messages
        assert line.startswith("a fault of kvfix itself in tests.runtime.test_corrections.correct: AttributeError")

    @pytest.mark.parametrize("kind", [before, around, after])
    def test_that_fails(self, kind: Any, hook: Callable[..., Any], caplog: Any) -> None:
        def correct(hooked: Hooked, *more: Any) -> Any:
            raise AssertionError("is not called")

        assert kind(correct, when="hooked.nobody_has_this")(hook)(Hooked(lambda _: None), 1) == "own"
        (line,) = caplog.messages
        assert line.startswith("a fault of kvfix itself in tests.runtime.test_corrections.correct: AttributeError")


def test_one_function_for_all_of_them() -> None:
    """What stands for a hook calls it itself, however many corrections there are; another decorator is between."""
    seen: list[str] = []

    def hook(hooked: Any) -> None:
        seen.append(inspect.stack()[1].function)
        seen.append(inspect.stack()[2].function)

    def theirs(original: Callable[..., Any]) -> Callable[..., Any]:
        def between(*args: Any) -> Any:
            return original(*args)

        return between

    ours = [before(lambda hooked: None), around(lambda hooked: None), after(lambda hooked, answer: answer)]
    corrected(hook, ours)(0)
    corrected(hook, [*ours, theirs, *ours])(0)
    assert seen == ["hook", "test_one_function_for_all_of_them", "hook", "between"]


def test_a_hook_that_does_nothing_is_not_called() -> None:
    """It is told by what it is compiled to: one that answers anything is."""

    def nothing(told: list[str], one: int) -> None:
        """For connectors that have something to do."""
        return

    def seven(told: list[str], one: int) -> int:
        """Its words."""
        return 7

    def adds(told: list[str], one: int) -> None:
        """Its words."""
        told.append("hook")

    told: list[str] = []
    also = before(lambda told, one: told.append("kvfix"))
    answers = [corrected(hook, [also])(told, 1) for hook in (nothing, seven, adds)]
    assert answers == [None, 7, None]
    assert told == ["kvfix", "kvfix", "kvfix", "hook"]


def odd(it: Any, one: int, /, two: int = 2, *many: Any, three: int, four: int = 4, **more: Any) -> Any:
    """Its words."""
    return (one, two, many, three, four, more)


def plain(it: Any, one: int, two: int = 2) -> Any:
    """Its words."""
    return (one, two)


@pytest.mark.parametrize(
    "kind", [after(lambda it, answer, *_, **__: answer), before(lambda *_, **__: None), around(lambda *_, **__: None)]
)
class TestParameters:
    """What stands for a hook takes what the hook takes: keywords, defaults, stars, and says so to who asks."""

    def test_plain(self, kind: Any) -> None:
        hook = kind(plain)
        assert hook(0, 1) == hook(0, one=1) == hook(two=2, one=1, it=0) == (1, 2)
        assert inspect.signature(hook) == inspect.signature(plain)
        assert inspect.signature(hook, follow_wrapped=False).parameters.keys() == {"it": 0, "one": 0, "two": 0}.keys()
        assert (hook.__name__, hook.__doc__, hook.__wrapped__) == ("plain", "Its words.", plain)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'one'"):
            hook(0)

    def test_odd(self, kind: Any) -> None:
        hook = kind(odd)
        assert hook(0, 1, three=3) == (1, 2, (), 3, 4, {})
        assert hook(0, 1, 5, 6, 7, three=3, four=8, five=9) == (1, 5, (6, 7), 3, 8, {"five": 9})
        with pytest.raises(TypeError, match="three"):
            hook(0, 1)

    def test_what_is_no_plain_function(self, kind: Any) -> None:
        hook = kind(functools.partial(plain, two=3))
        assert hook(0, 1) == hook(0, one=1) == (1, 3)
