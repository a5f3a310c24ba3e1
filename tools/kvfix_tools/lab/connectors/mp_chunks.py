"""Store, lock and load the chunks of the lab's multi-process server."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from kvfix_tools.lab.engine.kv_layout import KVGroup, StoredObject, kv_groups, stored_objects
from kvfix_tools.lab.engine.memory import Cache, Prefix, Slots, of_rank
from kvfix_tools.lab.options import Options


class Chunks:
    """The chunks in `cache`. In all methods, `groups` has one list of block ids for each KV group."""

    def __init__(self, memories: Sequence[Slots], cache: Cache, options: Options) -> None:
        self.cache = cache
        self.size = options.chunk_size
        self._options = options
        #: For each rank and KV group: a view of the rank's memory with the group's block size.
        self._slots = [
            [slots, *(slots.of_group(group.block_size) for group in kv_groups(options)[1:])] for slots in memories
        ]
        self.keep()

    def keep(self, windows: Sequence[int] = ()) -> None:
        """Set the window sizes (in tokens) that a worker registers. The sizes determine the objects of a chunk."""
        self.objects = stored_objects(self._options, windows)
        #: `not_stored(groups, number of chunks)[object][chunk]` is True if the server skips the chunk's object.
        self.not_stored = _all_null(self._options, self.objects)

    def keys(self, tokens: Any, end: int, salt: str) -> tuple[list[Any], list[int]]:
        """Return the keys of whole chunks before `end`, and each token's content. A key depends on earlier tokens."""
        contents = Prefix(hash((1, salt or 1))).of(list(tokens[:end]))
        ends = range(self.size, end + 1, self.size)
        return [(salt, contents[last - 1]) for last in ends], contents

    def key(self, stored: StoredObject, chunk: Any, rank: int) -> object:
        """Return the key of a chunk's object in this rank. Each rank has its own KV (ObjectKey.kv_rank)."""
        return (rank, *stored.key(chunk)) if rank else stored.key(chunk)

    def right(self, stored: StoredObject, contents: list[int], number: int, rank: int) -> list[int]:
        """Return the correct content of an object. contents: the correct content of each token of the request."""
        end = (number + 1) * self.size
        own = self._slots[rank][0].own  # its default start=0 is correct: rank 0 has each chunk's first token
        parts = [own(of_rank(rank, group.right(contents[end - kept : end]))) for group, kept in stored.parts]
        return parts[0] if len(parts) == 1 else [content for part in parts for content in part]

    def _keys(self, chunk: Any) -> Iterator[tuple[StoredObject, int, object]]:
        for stored in self.objects:
            for rank in range(len(self._slots)):
                yield stored, rank, self.key(stored, chunk, rank)

    def put(self, tokens: list[int]) -> None:
        """Store all objects of the whole chunks of this prompt, with the correct contents."""
        keys, contents = self.keys(tokens, len(tokens), "")
        for number, chunk in enumerate(keys):
            for stored, rank, key in self._keys(chunk):
                self.cache[key] = self.right(stored, contents, number, rank)

    def lock(self, keys: list[Any], request_id: str) -> int:
        """Find the longest hit for these keys, and lock the hit's objects. Return the number of chunks in the hit."""
        found = most = self.cache.pinned_prefix(keys, request_id)
        while found and any(key not in self.cache for key in self._needed(keys, found)):
            found -= 1
        if most:
            self._keep_locked(request_id, self._needed(keys, found))
        return found

    def _needed(self, keys: list[Any], hit: int) -> list[object]:
        numbered = enumerate(keys[:hit])
        return [key for at, chunk in numbered for stored, _, key in self._keys(chunk) if at in stored.needed(hit)]

    def in_one_rank_only(self, chunk: Any) -> bool:
        there = [key in self.cache for _, _, key in self._keys(chunk)] if len(self._slots) > 1 else []
        return any(there) and not all(there)

    def unlock(self, request_id: str, keys: list[Any], rank: int | None = None) -> None:
        """Release the request's locks on these chunks, in this rank or in all ranks."""
        unlocked = [key for chunk in keys for _, of, key in self._keys(chunk) if rank in (None, of)]
        self._keep_locked(request_id, [key for key in self.cache.pins.get(request_id, ()) if key not in unlocked])

    def unlock_all(self, request_id: str, rank: int) -> None:
        of_ranks = [(key, key[0] if isinstance(key[0], int) else 0) for key in self.cache.pins.get(request_id, ())]
        self._keep_locked(request_id, [key for key, of in of_ranks if of != rank])

    def _keep_locked(self, request_id: str, keys: list[Any]) -> None:
        if keys:
            self.cache.pins[request_id] = keys
        else:
            self.cache.unpin(request_id)

    def covered(self, groups: list[list[int]], chunks: int) -> bool:
        """Return True if each KV group has blocks for `chunks` chunks. If not, the server skips the transfer."""
        lists = zip(groups, self._slots[0], strict=True)
        return all(len(blocks) * slots.block_size >= chunks * self.size for blocks, slots in lists)

    def read(self, stored: StoredObject, groups: list[list[int]], number: int, rank: int) -> tuple[list[int], bool]:
        """Return the contents of the rank's slots for this object, and True if some slots are in null blocks."""
        found: list[int] = []
        null = False
        for group, kept in stored.parts:
            slots, places = self._slots[rank][group.number], self._slots_of(groups, group, kept, number)
            found += [slots.get(place) for place in places]
            null |= places[0] < slots.block_size
        return found, null

    def load(self, groups: list[list[int]], keys: list[Any], skip_tokens: int, rank: int) -> bool:
        """Load these chunks' tokens after the first `skip_tokens`. Return False if an object or block is missing."""
        needed = [(stored, number) for stored in self.objects for number in stored.needed(len(keys))]
        found = [self.cache.get(self.key(stored, keys[number], rank)) for stored, number in needed]
        if None in found or not self.covered(groups, len(keys)):
            return False
        for (stored, number), contents in zip(needed, found, strict=True):
            position = 0
            for group, kept in stored.parts:
                slots, begin = self._slots[rank][group.number], (number + 1) * self.size - kept
                for index, place in enumerate(self._slots_of(groups, group, kept, number)):
                    if begin + index >= skip_tokens and contents is not None:
                        slots.put(place, contents[position + index])
                position += kept
        return True

    def _slots_of(self, groups: list[list[int]], group: KVGroup, kept: int, number: int) -> list[int]:
        """Return the slots of the last `kept` tokens of a chunk."""
        blocks, size = groups[group.number], group.block_size
        end = (number + 1) * self.size
        return [blocks[position // size] * size + position % size for position in range(end - kept, end)]


def _all_null(options: Options, objects: list[StoredObject]) -> Callable[[list[list[int]], int], list[list[bool]]]:
    """Return the function `Chunks.not_stored`. Since LMCache 0.5.4, the server skips objects with only null blocks."""
    try:
        module: Any = import_module("lmcache.v1.multiprocess.modules.lmcache_driven_transfer")
        masks = module.all_null_chunk_masks
    except (ImportError, AttributeError):
        return lambda groups, chunks: [[False] * chunks for _ in objects]
    numbers = [[group.number for group, _ in each.parts] for each in objects]
    members = [SimpleNamespace(kernel_group_indices=each, aux=False) for each in numbers]
    blocks = [options.chunk_size // group.block_size for group in kv_groups(options)]
    return lambda groups, chunks: masks(groups, members, blocks, chunks)
