import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from kvfix import applying
from kvfix.wrapping import WrappedFunction, after


class Target:
    def hook(self) -> str:
        return "plain"

    @staticmethod
    def static(one: int) -> str:
        return f"static {one}"

    @classmethod
    def of_class(cls) -> str:
        return "class"

    async def later(self) -> str:
        return "async"

    @staticmethod
    async def static_later() -> str:
        return "async"

    @property
    def attribute(self) -> str:
        return "property"

    constant = 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("later", "an async function"),
        ("static_later", "an async function"),
        ("attribute", "a property"),
        ("constant", "a int"),
    ],
)
def test_other_kinds_of_attributes_are_rejected(name: str, kind: str) -> None:
    before = vars(Target)[name]
    with pytest.raises(TypeError, match=f"Target.{name} is {kind}, and kvfix wraps functions and methods only"):
        applying.attach(Target, name, "test", after(lambda target, answer: answer))
    assert vars(Target)[name] is before


def test_static_methods_and_class_methods() -> None:
    """A call on an instance does not pass the instance to a static method or to a class method."""
    before = vars(Target)["static"], vars(Target)["of_class"]
    applying.attach(Target, "static", "test", after(lambda one, answer: f"fixed {answer}"))
    applying.attach(Target, "of_class", "test", after(lambda cls, answer: f"fixed {answer} of {cls.__name__}"))
    answers = [Target.static(1), Target().static(one=2), Target.of_class(), Target().of_class()]
    applying.detach("test")
    assert answers == ["fixed static 1", "fixed static 2", *["fixed class of Target"] * 2]
    assert (vars(Target)["static"], vars(Target)["of_class"]) == before


def test_a_class_that_inherits_the_function_is_wrapped_alone() -> None:
    class Sub(Target):
        pass

    function = WrappedFunction(Sub, "hook", vars(Target)["hook"])
    function.add("test", 0, after(lambda target, answer: f"fixed {answer}"))
    assert (Sub().hook(), Target().hook()) == ("fixed plain", "plain")
    function.remove("test")
    assert "hook" not in vars(Sub)
    assert Sub().hook() == "plain"


def test_two_threads_wrap_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads must share one WrappedFunction. Otherwise, one of the two wrappers is lost."""
    both = threading.Barrier(2, timeout=0.5)  # the barrier breaks if only one thread at a time gets here

    class Hook(applying.WrappedFunction):
        def __init__(self, *arguments: Any) -> None:
            with suppress(threading.BrokenBarrierError):
                both.wait()
            super().__init__(*arguments)

    def add(text: str) -> None:
        applying.attach(Target, "hook", text, after(lambda target, answer: answer + text))

    monkeypatch.setattr(applying, "WrappedFunction", Hook)
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(add, "ab")) == [None, None]
    answer = Target().hook()
    for text in "ab":
        applying.detach(text)
    assert sorted(answer.removeprefix("plain")) == ["a", "b"]
    assert Target().hook() == "plain"
