"""Decide whether answers differ by noise or because their KV is wrong. Pure.

A GPU does not compute the same prompt twice with the same last bits: the sums depend on the batch. So the noise is
measured in the same run: a *control* is the difference between the answer to a computed prompt and the answer to this
prompt again from the GPU's own prefix cache. The connector takes no part in a control.

The only assumption: the difference of a right answer from the connector is drawn like a control. Then every order of
the differences by size is equally likely, whatever the noise looks like, and the error rates below are exact bounds.
A difference counts only above `MARGIN` times the largest control, so the assumption may be wrong by this factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Of healthy runs, at most so many are called different. Half of it belongs to each of the two tests.
FALSE_ALARMS = 1e-4
MARGIN = 2.0
#: Nats. A log probability that noise moves so far says nothing about KV.
TOO_NOISY = 2.0
#: A difference above so many times the largest control is not called noise, even if no second prompt repeats it.
FAR = 20.0
#: Fresh prompts beyond the ones that must differ, in the second test.
SPARE = 2


@dataclass(frozen=True)
class Answer:
    """`tokens`: the answered tokens. `logprobs`: of each, {token: log probability} of the likeliest ones."""

    tokens: tuple[str, ...]
    logprobs: tuple[dict[str, float], ...]


@dataclass(frozen=True)
class Difference:
    """The largest difference of a log probability, in nats.

    position: of the answered token, from 0. token, computed, cached: the log probability that differs.
    """

    size: float
    position: int
    token: str = ""
    computed: float = 0.0
    cached: float = 0.0


def difference(computed: Answer, cached: Answer) -> Difference:
    """Compare up to the first token that differs: after it, the two answers continue different texts."""
    largest = Difference(0.0, 0)
    for position, (one, other) in enumerate(zip(computed.logprobs, cached.logprobs, strict=False)):
        for token in {*one, *other}:
            # A token below the likeliest ones has at most the smallest value of the list: a lower bound.
            left = one.get(token, min(one.values(), default=0.0))
            right = other.get(token, min(other.values(), default=0.0))
            is_known = token in one and token in other
            size = abs(left - right) if is_known else max(0.0, (left - right) if token in one else (right - left))
            if size > largest.size:
                largest = Difference(size, position, token, left, right)
        if computed.tokens[position : position + 1] != cached.tokens[position : position + 1]:
            break
    return largest


@dataclass(frozen=True)
class Judge:
    """`controls`: one difference for each control prompt."""

    controls: Sequence[float]

    @property
    def noise(self) -> float:
        return max(self.controls, default=0.0)

    @property
    def is_exact(self) -> bool:
        """True if the server computes every control bit by bit the same (VLLM_BATCH_INVARIANT=1): then any difference
        counts."""
        return bool(self.controls) and self.noise == 0.0

    @property
    def limit(self) -> float:
        return MARGIN * self.noise

    def exceeds(self, size: float) -> bool:
        return size > self.limit

    def is_far(self, size: float) -> bool:
        return size > FAR * self.noise

    def first_test(self, pairs: Sequence[float]) -> bool:
        """True if so many differences are above every control that chance is excluded.

        pairs: the differences of prompts that each have a control. P(the `m` largest of n + N are all among the N).
        """
        above = sum(map(self.exceeds, pairs))
        return above > 0 and _all_on_one_side(above, len(pairs), len(self.controls)) < FALSE_ALARMS / 2

    def needed(self, compared: int) -> int:
        """How many of `needed + SPARE` fresh prompts must differ before a suspect is confirmed (second test).

        compared: the comparisons of the run, each of which may become a suspect.
        """
        needed = 1
        while compared * _second(needed, len(self.controls)) > FALSE_ALARMS / 2:
            needed += 1
        return needed

    def error_rate(self, compared: int) -> float:
        """The bound for the whole run."""
        return FALSE_ALARMS / 2 + compared * _second(self.needed(compared), len(self.controls))


def is_decided(differs: int, asked: int, needed: int) -> bool:
    """True once the second test has its answer: enough prompts differ, or too few are left to be enough."""
    return differs >= needed or differs + (needed + SPARE - asked) < needed


def _all_on_one_side(most: int, pairs: int, controls: int) -> float:
    return math.prod((pairs - number) / (pairs + controls - number) for number in range(most))


def _second(needed: int, controls: int) -> float:
    """P(a comparison is above all controls, and so are `needed` of `needed + SPARE` fresh ones)."""
    return math.comb(needed + SPARE, needed) / math.comb(controls + needed + 1, controls)
