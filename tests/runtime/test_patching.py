"""What kvfix may wrap, and that it does so in any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from kvfix import patching
from kvfix.correction import after


class Target:
    """Of every kind of attribute that a class can have under the name of a hook."""

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
        ("of_class", "a classmethod"),
        ("later", "an async function"),
        ("static_later", "an async function"),
        ("attribute", "a property"),
        ("constant", "a int"),
    ],
)
def test_what_a_wrapper_would_break_is_refused(name: str, kind: str) -> None:
    before = vars(Target)[name]
    with pytest.raises(TypeError, match=f"Target.{name} is {kind}, and kvfix wraps plain and static functions only"):
        patching.attach(Target, name, "test", after(lambda target, answer: answer))
    assert vars(Target)[name] is before


def test_a_static_one_stays_static() -> None:
    """It may be called on an instance, too, which it is not handed."""
    before = vars(Target)["static"]
    patching.attach(Target, "static", "test", after(lambda one, answer: f"fixed {answer}"))
    answers = [Target.static(1), Target().static(one=2)]
    patching.detach("test")
    assert answers == ["fixed static 1", "fixed static 2"]
    assert vars(Target)["static"] is before


def test_two_threads_wrap_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would make a table entry of its own, if both were to look for one first: then one wrapper is lost."""
    both = threading.Barrier(2, timeout=0.5)  # broken where only one at a time comes so far

    class Hook(patching._Hook):
        def __init__(self, *arguments: Any) -> None:
            with suppress(threading.BrokenBarrierError):
                both.wait()
            super().__init__(*arguments)

    def adds(text: str) -> Callable[[], None]:
        return lambda: patching.attach(Target, "hook", text, after(lambda target, answer: answer + text))

    monkeypatch.setattr(patching, "_Hook", Hook)
    threads = [threading.Thread(target=adds(text)) for text in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answer = Target().hook()
    for text in ("a", "b"):
        patching.detach(text)
    assert sorted(answer.removeprefix("plain")) == ["a", "b"]
    assert Target().hook() == "plain"
