"""Memory that the lab can check. Instead of KV, a slot holds a content: a hash of its token and all earlier tokens."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

#: Contents of a slot. NOTHING: no step has written to the slot. GARBAGE: KV that is right for no token.
NOTHING = 0
GARBAGE = -1
VOCABULARY = 512
#: A cache holds each rank's contents XOR (rank << _MARK). The rank's slots hold the contents without this mark.
_MARK = 32


def next_token(content: int) -> int:
    """Return the token that the lab's model samples after the token with this content."""
    return content % VOCABULARY


def first_difference(one: Iterable[int], other: Iterable[int]) -> int:
    """Return the first index at which two sequences differ, or the length of the shorter sequence if none differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Prefix:
    """The right contents of one request: one content for each token."""

    def __init__(self, seed: int = hash((1, 1))) -> None:
        self._seed = seed
        self._tokens: list[int] = []
        self.contents: list[int] = []

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Return the contents of `tokens`. Contents of later tokens may follow. Callers must not change the list."""
        known = len(self._tokens)
        if known < len(tokens):
            new = list(tokens[known:])
            last = self.contents[-1] if self.contents else self._seed
            for token in new:
                last = hash((last, token))
                self.contents.append(last)
            self._tokens += new
        return self.contents

    def keep(self, tokens: Sequence[int]) -> None:
        """Forget contents of tokens that the request does not have any more."""
        end = first_difference(self._tokens, tokens)
        del self._tokens[end:], self.contents[end:]

    def is_prefix(self, tokens: Sequence[int]) -> bool:
        return self._tokens[: len(tokens)] == list(tokens)


class Slots:
    """The paged KV memory of a rank, in blocks of slots. room: number of slots of the largest block of any KV group."""

    def __init__(self, num_blocks: int, block_size: int, room: int = 0, rank: int = 0) -> None:
        self.block_size = block_size
        self._rank = rank
        self.room = max(block_size, room)
        self._blocks = [[NOTHING] * self.room for _ in range(num_blocks)]
        #: The memory as bytes (byte_memory.py), if a connector needs bytes.
        self.tensor: Any = None

    def __len__(self) -> int:
        return len(self._blocks)

    def put_in(self, blocks: Sequence[Any]) -> None:
        """Replace the blocks. Each new block is an object of a subclass of Block, and works like a list of ints."""
        self._blocks[:] = blocks

    def of_group(self, block_size: int) -> "Slots":
        """Return the same memory with the block size of a KV group."""
        slots = copy.copy(self)
        slots.block_size = block_size
        return slots

    def own(self, contents: list[int], start: int = 0) -> list[int]:
        """Return `contents`, whose first token is `start`, with NOTHING for each token that another rank has."""
        return contents

    def spoil(self, block: int) -> None:
        """Write garbage to this block, as another request would."""
        self._blocks[block][:] = [GARBAGE] * len(self._blocks[block])

    def read(self, blocks: Sequence[int], start: int, end: int) -> list[int]:
        """Return the contents of tokens [start, end) of a request. If `blocks` end earlier, return fewer contents."""
        size = self.block_size
        first = start // size
        held = [content for block in blocks[first : -(-end // size)] for content in self._blocks[block][:size]]
        return held[start - first * size : end - first * size]

    def write(self, blocks: Sequence[int], start: int, contents: Sequence[int]) -> None:
        """Write `contents` to the slots of a request from token `start` on, at most to the end of the last block."""
        size = self.block_size
        position, end = 0, min(len(contents), len(blocks) * size - start)
        while position < end:
            number, offset = divmod(start + position, size)
            part = contents[position : position + size - offset]
            self._blocks[blocks[number]][offset : offset + len(part)] = part
            position += len(part)

    def put(self, slot: int, content: int) -> None:
        block, offset = divmod(slot, self.block_size)
        self._blocks[block][offset] = content ^ self._rank << _MARK

    def get(self, slot: int) -> int:
        block, offset = divmod(slot, self.block_size)
        return self._blocks[block][offset] ^ self._rank << _MARK

    def first_wrong(self, blocks: Sequence[int], until: int, contents: Sequence[int]) -> int | None:
        """Return the first token of [0, until) whose slot has wrong content, or None."""
        size = self.block_size
        for start in range(0, until, size):
            end = min(start + size, until)
            number = start // size
            if number >= len(blocks):
                return start
            held = self._blocks[blocks[number]]
            right = contents[start:end]
            if (held if end - start == len(held) else held[: end - start]) != right:
                return start + first_difference(held, right)
        return None


class Block:
    """Base class of blocks whose slots are not a list. Each subclass adds __len__ and __setitem__, as in a list."""

    def __getitem__(self, place: Any) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return bool(self[:] == other)


class SlotsOfShard(Slots):
    """Memory of one of n ranks with context parallelism. The rank uses only every n-th slot of a block."""

    def __init__(self, ranks: int, num_blocks: int, block_size: int, room: int, rank: int) -> None:
        super().__init__(num_blocks, block_size, room, rank)
        self._ranks = ranks

    def own(self, contents: list[int], start: int = 0) -> list[int]:
        found = [NOTHING] * len(contents)
        first = (self._rank - start) % self._ranks
        found[first :: self._ranks] = contents[first :: self._ranks]
        return found

    def write(self, blocks: Sequence[int], start: int, contents: Sequence[int]) -> None:
        super().write(blocks, start, self.own(list(contents), start))

    def first_wrong(self, blocks: Sequence[int], until: int, contents: Sequence[int]) -> int | None:
        held, right = self.own(self.read(blocks, 0, until)), self.own(list(contents[:until]))
        return None if held == right else first_difference(held, right)

    def put(self, slot: int, content: int) -> None:
        if slot % self._ranks == self._rank:
            super().put(slot, content)

    def get(self, slot: int) -> int:
        return super().get(slot) if slot % self._ranks == self._rank else NOTHING


def of_rank(rank: int, contents: list[int]) -> list[int]:
    """Return the contents that this rank stores in a cache if the first rank stores `contents`."""
    return [content ^ rank << _MARK for content in contents] if rank else contents


class Cache(dict[object, list[int]]):
    """The external cache: {LMCache's key: contents of the chunk}, oldest chunk first. A lookup pins found chunks."""

    def __init__(self) -> None:
        super().__init__()
        #: {lookup id: pinned keys}
        self.pins: dict[str, list[Any]] = {}

    def pinned_prefix(self, keys: Sequence[object], lookup_id: str) -> int:
        """For this lookup, pin the first keys, up to the first key that the cache lacks. Return the number of pins."""
        found = list(takewhile(self.__contains__, keys))
        if found:
            self.pins[lookup_id] = found
        return len(found)

    def unpin(self, lookup_id: str) -> None:
        self.pins.pop(lookup_id, None)

    def evict(self, how_many: int, forced: bool = False) -> int:
        """Evict the oldest chunks that are not pinned. forced: evict pinned chunks too, as when a pin times out."""
        pinned = set() if forced else {key for keys in self.pins.values() for key in keys}
        evicted = [key for key in self if key not in pinned][:how_many]
        for key in evicted:
            del self[key]
        return len(evicted)
