"""What `around`, `before` and `after` do with a hook: its arguments, its answer, its exception, their own failure."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from kvfix.fix import after, around, before, instead


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
