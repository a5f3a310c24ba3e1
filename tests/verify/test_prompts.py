"""The prompts have the right lengths, fresh starts and the right ends."""

import random
from collections import Counter

import pytest

from kvfix_tools.verify.prompts import CUE, TOKENS, Maker, Prompt, Sizes

SIZES = Sizes(chunk=256, block=16, longest=1200)


@pytest.fixture
def prompts() -> list[Prompt]:
    maker = Maker(list(range(100, 600)), 1.0, random.Random(0))
    return list(maker.prompts(maker.kinds(48), SIZES))


def test_lengths_at_the_borders(prompts: list[Prompt]) -> None:
    """Most prompts are controls: all but their last token are whole blocks."""
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


def test_the_end_repeats_earlier_tokens(prompts: list[Prompt]) -> None:
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
