"""KV groups of the lab's model, and what of a chunk the multi-process server stores under which key.

The model has one group of full attention, and one of a sliding window for each number in `Options.windows`, or one of
states. A group has its own list of blocks for each request, and its own contents; all take their blocks from one pool
(vLLM's hybrid KV cache manager).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfix_tools.lab.options import Options


class KVGroup(NamedTuple):
    """`window`: a token attends to so many, with itself; 0: to all. `state`: a block has no KV of tokens, but one
    state, that of all tokens up to its end or, in a request's last block, up to the last one that is computed."""

    number: int
    block_size: int
    window: int = 0
    state: bool = False

    @property
    def kept(self) -> int:
        """Tokens at the end of a hit whose blocks it needs, 0: all. LMCache takes a state for a window of a block
        (integration/vllm/kv_cache_groups.py 0.5.6:131)."""
        return self.block_size if self.state else self.window

    def reads_from(self, computed: int) -> int:
        """The first token that a step after so many computed ones reads (SlidingWindowManager.get_num_skipped_tokens).

        Blocks that end before it are null in the request's list.
        """
        return max(0, computed - self.window + 1) if self.window else 0

    def right(self, contents: list[int]) -> list[int]:
        """What belongs in this group's slots of these tokens: no group has the KV of another."""
        if self.state:
            contents = contents[-1:] * len(contents)
        return [content ^ self.number for content in contents] if self.number else contents


class StoredObject(NamedTuple):
    """What of a chunk is under one key of the server."""

    number: int
    #: (group, how many tokens of the chunk's end it keeps): of a window shorter than a chunk, no more are ever read.
    parts: tuple[tuple[KVGroup, int], ...]
    #: So many chunks at the end of a hit must have it; 0: all of them.
    chunks: int = 0

    def key(self, chunk: tuple[object, ...]) -> tuple[object, ...]:
        return (*chunk, self.number) if self.number else chunk

    def needed(self, hit: int) -> range:
        """Chunks that a hit of so many needs this of."""
        return range(max(0, hit - self.chunks) if self.chunks else 0, hit)


def kv_groups(options: Options) -> list[KVGroup]:
    size = options.block_size
    windows = [
        KVGroup(number, size * options.window_blocks, window) for number, window in enumerate(options.windows, start=1)
    ]
    return [KVGroup(0, size), *windows, *[KVGroup(1, size, state=True)] * options.states]


def stored_objects(options: Options, windows: Sequence[int] = ()) -> list[StoredObject]:
    """All groups in one object, or one for each length of a window in chunks (`lmcache server
    --separate-object-groups`), as KVLayerGroupsManager makes them (v1/kv_layer_groups.py 0.5.6:666).

    windows: how many tokens of each window LMCache keeps; as many as it has, if they are not given.
    """
    groups = kv_groups(options)
    chunk, kept = options.chunk_size, (0, *(windows or [group.kept for group in groups[1:]]))
    by_chunks: dict[int, list[KVGroup]] = {}
    for group in groups:
        chunks = -(-kept[group.number] // chunk) if options.separate_object_groups else 0
        by_chunks.setdefault(chunks, []).append(group)
    return [
        StoredObject(number, tuple((group, min(kept[group.number] or chunk, chunk)) for group in groups), chunks)
        for number, (chunks, groups) in enumerate(by_chunks.items())
    ]
