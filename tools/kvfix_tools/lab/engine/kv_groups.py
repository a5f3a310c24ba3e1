"""The KV groups of the lab's model, and the objects in which the multi-process server stores a chunk.

The model has one KV group of full attention. It also has one with a sliding window for each number in
`Options.windows`, or one with states. Each KV group has its own block list for each request, and its own contents. All
KV groups take blocks from one pool (vLLM's hybrid KV cache manager).
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvfix_tools.lab.options import Options


class KVGroup(NamedTuple):
    """A KV group.

    - window: number of tokens that a token attends to, including itself; 0: all tokens
    - state: a block has one state instead of KV. It is the state after the last token of the block or, in the last
      block of a request, after the last computed token.
    """

    number: int
    block_size: int
    window: int = 0
    state: bool = False

    @property
    def kept(self) -> int:
        """Return how many tokens at the end of a hit this KV group needs; 0: all.

        LMCache treats a state as a window of one block (integration/vllm/kv_cache_groups.py 0.5.6:131).
        """
        return self.block_size if self.state else self.window

    def reads_from(self, computed: int) -> int:
        """Return the first token that a step reads (SlidingWindowManager.get_num_skipped_tokens).

        Earlier blocks are null in the request's list.
        """
        return max(0, computed - self.window + 1) if self.window else 0

    def right(self, contents: list[int]) -> list[int]:
        """Return the right contents of these tokens' slots. They differ between the KV groups."""
        if self.state:
            contents = contents[-1:] * len(contents)
        return [content ^ self.number for content in contents] if self.number else contents


class StoredObject(NamedTuple):
    """The part of a chunk that the server stores under one key."""

    number: int
    #: (KV group, number of tokens at the end of the chunk that it keeps). Earlier tokens are never read.
    parts: tuple[tuple[KVGroup, int], ...]
    #: Number of chunks at the end of a hit that must have the object; 0: all chunks.
    chunks: int = 0

    def key(self, chunk: tuple[object, ...]) -> tuple[object, ...]:
        return (*chunk, self.number) if self.number else chunk

    def needed(self, hit: int) -> range:
        """Return the chunks that must have this object, so that `hit` chunks are a hit."""
        return range(max(0, hit - self.chunks) if self.chunks else 0, hit)


def kv_groups(options: Options) -> list[KVGroup]:
    size = options.block_size
    windows = [
        KVGroup(number, size * options.window_blocks, window) for number, window in enumerate(options.windows, start=1)
    ]
    return [KVGroup(0, size), *windows, *[KVGroup(1, size, state=True)] * options.states]


def stored_objects(options: Options, windows: Sequence[int] = ()) -> list[StoredObject]:
    """Return the objects of a chunk, as KVLayerGroupsManager makes them (v1/kv_layer_groups.py 0.5.6:666).

    By default all KV groups are in one object. With `lmcache server --separate-object-groups`, KV groups with the same
    window length in chunks share one object.
    windows: number of tokens of each window that LMCache keeps. Default: the whole window.
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
