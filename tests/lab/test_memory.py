"""The memory that knows what belongs in it. planted_faults.py has each way to be wrong, on real schedules."""

import pytest

from kvfix_tools.lab.engine.memory import Cache, Prefix, Slots

TOKENS = [7, 8, 9, 7, 8, 9, 7, 8, 9, 1]
BLOCKS = [4, 2, 5]


@pytest.fixture
def filled() -> tuple[Slots, list[int]]:
    slots, prefix = Slots(8, 4), Prefix()
    right = prefix.of(TOKENS)
    slots.write(BLOCKS, 0, right[:6])
    slots.write(BLOCKS, 6, right[6:])
    return slots, right


def test_right(filled: tuple[Slots, list[int]]) -> None:
    slots, right = filled
    assert slots.first_wrong(BLOCKS, 10, right) is None
    assert slots.first_wrong(BLOCKS, 3, right) is None


def test_the_same_token_in_another_place_is_other_kv(filled: tuple[Slots, list[int]]) -> None:
    _, right = filled
    assert len(set(right)) == len(TOKENS)


def test_what_comes_after_the_last_block_is_not_written(filled: tuple[Slots, list[int]]) -> None:
    slots, right = filled
    slots.write(BLOCKS[:2], 6, [1, 1, 1, 1])
    assert slots.first_wrong(BLOCKS, 10, right) == 6
    assert slots.read(BLOCKS, 6, 10) == [1, 1, *right[8:]]


def test_another_request_with_the_same_beginning_shares_it(filled: tuple[Slots, list[int]]) -> None:
    slots, _ = filled
    other = Prefix().of([*TOKENS[:8], 99])
    assert slots.first_wrong(BLOCKS, 8, other) is None
    assert slots.first_wrong(BLOCKS, 9, other) == 8


def test_cache_finds_prefixes_pins_and_evicts_the_oldest() -> None:
    cache = Cache()
    for key in "abd":
        cache[key] = [1]
    assert cache.pinned_prefix("abcd", "r") == 2
    assert cache.pins == {"r": ["a", "b"]}
    assert cache.evict(2) == 1
    assert "d" not in cache
    cache.unpin("r")
    assert cache.evict(1) == 1
    assert "a" not in cache
    assert cache.evict(9, forced=True) == 1


def test_a_kv_group_with_larger_blocks_sees_the_same_memory() -> None:
    slots = Slots(4, 2, room=4)
    larger = slots.of_group(4)
    larger.write([3, 1], 0, [1, 2, 3, 4, 5])
    assert larger.read([3, 1], 1, 5) == [2, 3, 4, 5]
    assert larger.read([3], 1, 5) == [2, 3, 4]  # the other block is not there
    assert slots.read([3], 0, 2) == [1, 2]
    assert slots.first_wrong([3, 1], 4, [1, 2, 5, 0]) is None
    slots.spoil(3)
    assert larger.read([3], 0, 4) == [-1] * 4
