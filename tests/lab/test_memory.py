"""The memory that knows what belongs in it. planted_faults.py has each way to be wrong, on real schedules."""

import pytest

from kvfix_tools.lab.engine.memory import Cache, Prefix, Slots

TOKENS = [7, 8, 9, 7, 8, 9, 7, 8, 9, 1]
BLOCKS = [4, 2, 5]


#: Another request with the same beginning.
OTHER = [*TOKENS[:8], 99]


def filled() -> tuple[Slots, list[int]]:
    slots, right = Slots(8, 4), Prefix().of(TOKENS)
    slots.write(BLOCKS, 0, right[:6])
    slots.write(BLOCKS, 6, right[6:])
    return slots, right


@pytest.mark.parametrize(
    ("tokens", "length", "wrong"), [(TOKENS, 10, None), (TOKENS, 3, None), (OTHER, 8, None), (OTHER, 9, 8)]
)
def test_the_first_wrong_slot(tokens: list[int], length: int, wrong: int | None) -> None:
    slots, right = filled()
    assert slots.first_wrong(BLOCKS, length, Prefix().of(tokens)) == wrong
    assert len(set(right)) == len(TOKENS), "the same token in another place is other KV"


def test_what_comes_after_the_last_block_is_not_written() -> None:
    slots, right = filled()
    slots.write(BLOCKS[:2], 6, [1, 1, 1, 1])
    assert slots.first_wrong(BLOCKS, 10, right) == 6
    assert slots.read(BLOCKS, 6, 10) == [1, 1, *right[8:]]


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
