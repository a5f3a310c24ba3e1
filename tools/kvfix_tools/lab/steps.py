"""Make the steps of a scenario's schedule, and the prompts of its requests.

Scenarios import this module as `do`. `do.admit("r", ...)` returns a `Step`. Playing the step calls the method `admit`
of `LabEngine` or of its connector. The method's docstring describes the step.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from kvfix_tools.lab.engine.memory import Prefix, next_token


class Step(NamedTuple):
    method: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def play(self, engine: Any) -> None:
        """Call the method with copies of the arguments, because vLLM and LMCache may change the arguments."""
        arguments, keywords = copy.deepcopy((self.arguments, self.keywords))
        engine.do(self.method, *arguments, **keywords)


def __getattr__(method: str) -> Callable[..., Step]:
    """Return a function that returns a `Step` for `method`. The name is checked only when the step is played."""
    if method.startswith("_"):
        raise AttributeError(method)
    return lambda *arguments, **keywords: Step(method, arguments, keywords)


def flat(parts: Iterable[Any]) -> Iterator[Any]:
    """Yield the steps in order. A part is a step, a function that gets the engine, or a sequence of parts."""
    for part in parts:
        if isinstance(part, Step) or callable(part):
            yield part
        else:
            yield from flat(part)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Return a prompt of `tokens` tokens. Prompts with different seeds differ in the first token."""
    return [(seed * 101 + position * 7 + position // 97) % 509 + 1 for position in range(tokens)]


def continued(tokens: list[int], more: int) -> list[int]:
    """Return this prompt, followed by the next `more` tokens that the lab's model generates."""
    prefix, whole = Prefix(), list(tokens)
    for _ in range(more):
        whole.append(next_token(prefix.of(whole)[-1]))
    return whole


def malformed(fault: str) -> list[Step]:
    """Return steps that send decode a request with malformed parameters. fault: a key of parameters.MALFORMED."""
    return [Step("malform", (fault,), {}), Step("ask", ("r", prompt(64)), {})]
