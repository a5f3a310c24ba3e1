"""The words of a scenario's schedule: steps of the lab's engine as data, and the prompts in them.

A step is a call of the method of `LabEngine` that has its name; its docstring says what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvfix_tools.lab.memory import Prefix, next_token


class Step(NamedTuple):
    """A call of this method of `LabEngine`."""

    method: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def _step(method: str) -> Callable[..., Step]:
    return lambda *arguments, **keywords: Step(method, arguments, keywords)


admit = _step("admit")
abort = _step("abort")
preempt = _step("preempt")
step = _step("step")
run = _step("run")
run_until_finished = _step("run_until_finished")
wait = _step("wait")
budget = _step("budget")
keep_blocks = _step("keep_blocks")
take_blocks = _step("take_blocks")
free_blocks = _step("free_blocks")
reset_prefix_cache = _step("reset_prefix_cache")
stored_elsewhere = _step("stored_elsewhere")
evict = _step("evict")
has_in_other_connector = _step("has_in_other_connector")
fail_load = _step("fail_load")
lose_loads = _step("lose_loads")
lookups_fail = _step("lookups_fail")
slow_lookups = _step("slow_lookups")
lookup_times_out = _step("lookup_times_out")
hour_of_silence = _step("hour_of_silence")
settle = _step("settle")
expect_all_ended = _step("expect_all_ended")
expect_stored = _step("expect_stored")
expect_forgotten = _step("expect_forgotten")
expect_hit = _step("expect_hit")
expect_unharmed = _step("expect_unharmed")


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """A prompt of so many tokens that shares its first token with no prompt of another seed."""
    return [(seed * 101 + position * 7 + position // 97) % 509 + 1 for position in range(tokens)]


def continued(tokens: list[int], more: int) -> list[int]:
    """The prompt with so many of the tokens that the lab's model would generate after it."""
    prefix, whole = Prefix(), list(tokens)
    for _ in range(more):
        whole.append(next_token(prefix.of(whole)[-1]))
    return whole
