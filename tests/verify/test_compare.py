import os
import random
from collections import Counter
from collections.abc import Callable

import pytest

from kvfix_tools.verify.compare import FALSE_ALARMS, SPARE, Answer, Judge, difference, is_decided
from kvfix_tools.verify.prompts import CUE, TOKENS, Maker, Prompt, Sizes

CONTROLS, PROMPTS = 36, 48


def answer(*positions: dict[str, float]) -> Answer:
    return Answer(tuple(max(each, key=lambda token: each[token]) for each in positions), positions)


@pytest.mark.parametrize(
    ("one", "other", "largest"),
    [
        ([{"a": -0.1, "b": -3.0}, {"c": -0.5}], [{"a": -0.2, "b": -3.5}, {"c": -2.0}], (1.5, 1, "c")),
        # Tokens after the first differing token do not count.
        ([{"a": -0.1, "b": -0.2}, {"c": -0.5}], [{"a": -0.2, "b": -0.15}, {"c": -9.0}], (0.1, 0, "a")),
        # If a list lacks a token, the token has at most the list's smallest value.
        ([{"a": -0.1, "b": -1.0}], [{"a": -0.1, "c": -4.0}], (3.0, 0, "b")),
        ([{"a": -0.1, "c": -4.0}], [{"a": -0.1, "b": -1.0}], (3.0, 0, "b")),
        ([{"a": -0.1}, {"b": -0.2}], [{"a": -0.1}, {"b": -0.2}], (0.0, 0, "")),
    ],
)
def test_largest_difference(one: list[dict[str, float]], other: list[dict[str, float]], largest: object) -> None:
    found = difference(answer(*one), answer(*other))
    assert (pytest.approx(found.size), found.position, found.token) == largest


NOISE: dict[str, Callable[[random.Random], float]] = {
    "none": lambda drawn: 0.0,
    "normal": lambda drawn: abs(drawn.gauss(0, 0.02)),
    "lognormal": lambda drawn: drawn.lognormvariate(-4, 2),
    "student with two degrees of freedom": lambda drawn: abs(drawn.gauss(0, 1)) / drawn.expovariate(1) ** 0.5,
    # A change of the last bit sometimes makes a mixture of experts choose another expert.
    "jumps": lambda drawn: drawn.random() * (100 if drawn.random() < 0.01 else 1),
    "rarely not exact": lambda drawn: float(drawn.random() < 0.01),
}


def is_called_different(
    drawn: random.Random, noise: Callable[[random.Random], float], wrong: Callable[[random.Random], float] | None = None
) -> bool:
    """Return True if kvfix verify (rounds.py) would judge this simulated run as different.

    wrong: a function that draws the differences of every twelfth prompt, and of the new prompts that confirm a
        difference.
    """
    judge = Judge([max(noise(drawn), noise(drawn)) for _ in range(CONTROLS)])  # one draw alone, one under load
    cached = [[(wrong if wrong and at % 12 == 0 else noise)(drawn) for _ in range(2)] for at in range(PROMPTS)]
    if judge.first_test([max(each) for each in cached[:CONTROLS]]):
        return True
    needed = judge.needed(2 * PROMPTS)
    suspects = sum(any(map(judge.exceeds, each)) for each in cached)
    for _ in range(min(suspects, 3)):
        differs = asked = 0
        while not is_decided(differs, asked, needed):
            asked += 1
            differs += judge.exceeds((wrong or noise)(drawn))
        if differs >= needed:
            return True
    return False


@pytest.mark.parametrize("name", NOISE)
def test_noise_is_not_called_different(name: str) -> None:
    """At most one run in 10,000 gives a false alarm. KVFIX_TEST_EXAMPLES=100000 simulates more runs."""
    runs, drawn = int(os.environ.get("KVFIX_TEST_EXAMPLES", "2000")), random.Random(1)
    assert sum(is_called_different(drawn, NOISE[name]) for _ in range(runs)) <= runs * FALSE_ALARMS


@pytest.mark.parametrize("name", ["none", "normal"])
def test_one_wrong_prompt_in_twelve_is_found(name: str) -> None:
    drawn = random.Random(2)
    assert all(is_called_different(drawn, NOISE[name], lambda _: 0.5) for _ in range(200))


def test_the_stated_rate() -> None:
    for controls in (12, 36, 100):
        assert Judge([1.0] * controls).error_rate(96) <= FALSE_ALARMS
    assert Judge([1.0] * 100).needed(96) < Judge([1.0] * 36).needed(96) < Judge([1.0] * 12).needed(96)
    assert Judge([1.0] * 36).needed(96) == 7


def test_first_test_counts_orders() -> None:
    judge = Judge([1.0] * 36)
    above = next(count for count in range(37) if judge.first_test([3.0] * count + [0.0] * (36 - count)))
    assert above == 13  # 36! / 23! * 59! / 72! < 5e-5
    assert not judge.first_test([1.9] * 36)  # a difference of 1.9 is within MARGIN


def test_a_confirmation_ends_when_it_is_decided() -> None:
    assert is_decided(6, 6, 6)
    assert not is_decided(5, 7, 6)
    assert is_decided(0, SPARE + 1, 6)


SIZES = Sizes(chunk=256, block=16, longest=1200)


@pytest.fixture
def prompts() -> list[Prompt]:
    maker = Maker(list(range(100, 600)), 1.0, random.Random(0))
    return list(maker.prompts(maker.kinds(48), SIZES))


def test_lengths_at_the_borders(prompts: list[Prompt]) -> None:
    """36 prompts fill whole blocks and add one token. When repeated, these prompts hit all tokens but the last."""
    assert len(prompts) == 48
    lengths = {"one chunk less one token": 255, "one chunk": 256, "one chunk and one token": 257, "whole chunks": 1024}
    for kind, length in lengths.items():
        assert {each.length for each in prompts if each.kind == kind} == {length}
    assert max(each.length for each in prompts) <= SIZES.longest
    assert sum(each.length % 16 == 1 for each in prompts) == 36


def test_no_two_start_alike_unless_they_share_their_prefix(prompts: list[Prompt]) -> None:
    starts = Counter((each.kind, each.body[:16]) for each in prompts)
    assert {kind for (kind, _), count in starts.items() if count > 1} == {"shared prefix"}
    shared = [each.body for each in prompts if each.kind == "shared prefix"]
    assert len({body[:1024] for body in shared}) == 3
    assert len(set(shared)) == 9


def test_the_end_of_a_prompt_repeats_earlier_tokens(prompts: list[Prompt]) -> None:
    for each in prompts:
        if not isinstance(each.body, str):
            cue = each.body[-CUE:]
            assert any(each.body[at : at + CUE] == cue for at in range(each.length - CUE))


@pytest.mark.parametrize("block", [16, 32, 128])
def test_prompts_as_long_as_the_context_allows_fit(block: int) -> None:
    context = 1024
    for chunk in range(block, context // 2 - 2 * block, block):
        sizes = Sizes(chunk, block, context - block - TOKENS, context)
        assert sizes.fits
        prompts = Maker([1], 1.0, random.Random(0)).prompts(["shared prefix"], sizes)
        assert max(each.length for each in prompts) + block + TOKENS <= context
