"""The steps of a scenario's schedule, as data, and the prompts in them.

`admit("r", ...)` stands for the method `admit` of `LabEngine` or of its connector, whose docstring says what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvfix_tools.lab.memory import Prefix, next_token


class Step(NamedTuple):
    """What `LabEngine.do` does."""

    method: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def __getattr__(method: str) -> Callable[..., Step]:
    """What makes a step of this method. `LabEngine` is not imported, for it imports vLLM: playing finds a wrong one."""
    if method.startswith("_"):
        raise AttributeError(method)
    return lambda *arguments, **keywords: Step(method, arguments, keywords)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """A prompt of so many tokens that shares its first token with no prompt of another seed."""
    return [(seed * 101 + position * 7 + position // 97) % 509 + 1 for position in range(tokens)]


def continued(tokens: list[int], more: int) -> list[int]:
    """The prompt with so many of the tokens that the lab's model would generate after it."""
    prefix, whole = Prefix(), list(tokens)
    for _ in range(more):
        whole.append(next_token(prefix.of(whole)[-1]))
    return whole
