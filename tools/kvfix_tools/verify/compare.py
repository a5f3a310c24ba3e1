"""Decide whether answers differ by noise or because their KV is wrong. This module does no input or output.

If a GPU computes a prompt twice, the last bits differ, because the order of sums depends on the batch. The run measures
this noise with controls. A *control* is the difference between two answers to the same prompt. The GPU computes the
first answer without cached KV, and the second answer with its own prefix cache. A control uses no KV of the connector.

The run assumes that right KV from the connector causes differences with the same distribution as the controls. Under
this assumption, every ranking of the differences and controls by size is equally likely. So the error rates of `Judge`
are exact bounds. A difference counts only above `MARGIN` times the largest control. So the bounds also hold if right KV
causes differences up to `MARGIN` times as large as the controls.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

#: Maximum share of runs with right KV that get the verdict "different". `Judge.first_test` may cause one half of this
#: share, and the second test, with new prompts of the same kind (`Judge.needed`), the other half.
FALSE_ALARMS = 1e-4
MARGIN = 2.0
TOO_NOISY = 2.0  # in nats. If the limit (MARGIN times the noise) is above this value, the run proves nothing
FAR = 20.0  # a difference above this multiple of the largest control is no noise, whatever the second test shows
SPARE = 2  # number of prompts of the second test (`Judge.needed`) that need not differ
SMALLEST = -9999.0  # vLLM's smallest log probability. kvfix also uses this value for NaN


class Answer(NamedTuple):
    tokens: tuple[str, ...]
    logprobs: tuple[dict[str, float], ...]  # for each generated token, the log probabilities of the likeliest tokens


def has_numbers(answer: Answer) -> bool:
    """Return False if a token has no log probability above SMALLEST, because the model then computed NaN."""
    return all(max(each.values(), default=SMALLEST) > SMALLEST for each in answer.logprobs)


class Difference(NamedTuple):
    """The largest difference between one token's log probabilities in two answers, in nats."""

    size: float
    position: int  # index of the generated token
    token: str = ""
    computed: float = 0.0  # log probability of the token in the computed answer
    cached: float = 0.0


def difference(computed: Answer, cached: Answer) -> Difference:
    """Compare two answers up to the first differing token. Later tokens follow different texts, so ignore them."""
    largest = Difference(0.0, 0)
    for position, (one, other) in enumerate(zip(computed.logprobs, cached.logprobs, strict=False)):
        for token in {*one, *other}:
            # A token that an answer does not list has at most the smallest listed value. So `size` is a lower bound.
            left = one.get(token, min(one.values(), default=0.0))
            right = other.get(token, min(other.values(), default=0.0))
            is_known = token in one and token in other
            size = abs(left - right) if is_known else max(0.0, (left - right) if token in one else (right - left))
            if size > largest.size:
                largest = Difference(size, position, token, left, right)
        if computed.tokens[position : position + 1] != cached.tokens[position : position + 1]:
            break
    return largest


class Judge(NamedTuple):
    """Decide if differences are noise. `controls` has one difference for each prompt with a control."""

    controls: Sequence[float]

    @property
    def noise(self) -> float:
        return max(self.controls, default=0.0)

    @property
    def is_exact(self) -> bool:
        """True if all controls are 0, for example with VLLM_BATCH_INVARIANT=1. Then every difference counts."""
        return bool(self.controls) and self.noise == 0.0

    @property
    def limit(self) -> float:
        return MARGIN * self.noise

    def exceeds(self, size: float) -> bool:
        return size > self.limit

    def first_test(self, pairs: Sequence[float]) -> bool:
        """Return True if too many `pairs` exceed the limit. pairs: differences of the prompts that have a control."""
        above, every = sum(map(self.exceeds, pairs)), len(pairs) + len(self.controls)
        chance = math.prod((len(pairs) - number) / (every - number) for number in range(above))
        return above > 0 and chance < FALSE_ALARMS / 2

    def needed(self, compared: int) -> int:
        """Return N. A difference counts if N of N + SPARE new prompts show it too. compared: number of comparisons."""
        needed = 1
        while compared * _second(needed, len(self.controls)) > FALSE_ALARMS / 2:
            needed += 1
        return needed

    def error_rate(self, compared: int) -> float:
        """Return the upper bound of the error rate of the whole run."""
        return FALSE_ALARMS / 2 + compared * _second(self.needed(compared), len(self.controls))


def is_decided(differs: int, asked: int, needed: int) -> bool:
    """Return True if `needed` prompts differ, or if the prompts that are left cannot reach this number."""
    return differs >= needed or differs + (needed + SPARE - asked) < needed


def _second(needed: int, controls: int) -> float:
    """Return the chance that noise lifts one answer and `needed` prompts of the second test above all controls."""
    return math.comb(needed + SPARE, needed) / math.comb(controls + needed + 1, controls)
