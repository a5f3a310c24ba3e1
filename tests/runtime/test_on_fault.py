"""What a wrapper answers if its own code raises: the function's own answer, or the closed one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from kvfix.wrapping import GO_ON, after, around, before

Wrap = Callable[[Any], Any]


def raises(*_: Any) -> Any:
    raise LookupError("of kvfix")


def raises_late(*_: Any) -> Generator[None, Any, Any]:
    yield
    raise LookupError("of kvfix")


def refuse(*_: Any) -> str:
    return "closed"


def hook(calls: list[int], value: int) -> str:
    calls.append(value)
    return "own"


WRAPPERS = {
    "before": lambda on_fault: before(raises, on_fault=on_fault),
    "after": lambda on_fault: after(raises, on_fault=on_fault),
    "around": lambda on_fault: around(raises, on_fault=on_fault),
    "around, after the call": lambda on_fault: around(raises_late, on_fault=on_fault),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_answers(kind: str) -> None:
    for on_fault, answer in ((None, "own"), (refuse, "closed"), (lambda *_: GO_ON, "own"), (raises, "own")):
        calls: list[int] = []
        assert WRAPPERS[kind](on_fault)(hook)(calls, 1) == answer
        is_left_out = answer == "closed" and kind in ("before", "around")
        assert calls == ([] if is_left_out else [1])
