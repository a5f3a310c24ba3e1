"""Find stores of LMCache's multi-process connector that read blocks which vLLM has freed.

While a request runs, vLLM frees blocks that have left a sliding window or hold an old recurrent (Mamba) state. In the
step of a store and in the next step, kvfix compares the store's blocks with vLLM's block list of the request. In later
steps kvfix does not compare, because the store may have ended.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvfix.ledger import events as ev


class Read(NamedTuple):
    """A chunk with tokens [start, end) that a store reads. blocks: {index in the request's block list: block id}."""

    request: str
    group: int
    start: int
    end: int
    blocks: dict[int, int]


def stores(connector: Any) -> "Stores | None":
    """Return the `Stores` of a connector, or None if kvfix can check nothing for this connector."""
    manager = getattr(connector, "_kv_cache_manager", None)
    sizes: list[int] = getattr(connector, "_group_tokens_per_block", [])
    if manager is None or len(sizes) < 2 or getattr(connector, "lazy_offload", False):
        return None
    from kvfix.fixes import _mp, _windows  # only for models with several KV groups

    states = _windows.states(connector)
    windows = {**_windows.of(connector), **{group: (size, size) for group, size in states.items()}}
    return Stores(manager, sizes, windows, states, _mp.chunk_size(connector)) if windows else None


class Stores:
    """The blocks of sliding windows and recurrent states that the stores of the last step read."""

    def __init__(
        self, manager: Any, sizes: list[int], windows: dict[int, tuple[int, int]], states: dict[int, int], chunk: int
    ) -> None:
        self._managers = manager.coordinator.single_type_managers
        self._sizes = sizes
        self._windows = windows
        self._states = states
        self._chunk = chunk
        self._last: list[Read] = []

    def step(self, metadata: Any, output: Any) -> Iterator[ev.BlocksLost]:
        """Yield an event for each chunk with lost blocks (`_lost`).

        For a chunk stored in the previous step, yield an event only if this step writes to one of the lost blocks.
        """
        stores = [meta for meta in metadata.requests if meta.direction == "STORE"]
        if not (stores or self._last):
            return
        last, self._last = self._last, [read for meta in stores for read in self._read(meta.request_id, meta.op)]
        waits = getattr(metadata, "need_flush_before_forward", False) or getattr(metadata, "_kvfix_preempted", False)
        gone = [] if waits else [(read, lost) for read in last if (lost := self._lost(read))]
        written = self._written(metadata, output) if gone else set()
        for read, lost in gone:
            if not written.isdisjoint(lost):
                yield _event(read, "blocks freed after the step and used again")
        for read in self._last:
            if lost := self._lost(read):
                yield _event(read, "null blocks" if 0 in lost else "blocks freed before the step")

    def _read(self, name: str, op: Any) -> Iterator[Read]:
        for group, (window, size) in self._windows.items():
            for start in range(op.start, op.end, self._chunk):
                end = start + self._chunk
                # the server keeps at most the last `window` tokens of a chunk (v1/kv_layer_groups.py 0.5.6:580)
                places = range((end - min(window, self._chunk)) // size, end // size)
                first = op.start // size
                if group in self._states and not any(op.block_ids[group][start // size - first : end // size - first]):
                    continue  # a server with --separate-object-groups does not store a chunk without blocks
                blocks = op.block_ids[group][places.start - first : places.stop - first]
                yield Read(name, group, start, end, dict(zip(places, blocks, strict=False)))

    def _lost(self, read: Read) -> list[int]:
        """Return blocks of `read` that are null or not in vLLM's list. Return [] for a preempted or ended request."""
        held = self._managers[read.group].req_to_blocks.get(read.request)
        if not held:
            return []
        return [
            block
            for place, block in read.blocks.items()
            if not block or place >= len(held) or held[place].block_id != block
        ]

    def _written(self, metadata: Any, output: Any) -> set[int]:
        """Return the blocks to which this step, or a load that begins in this step, writes."""
        cached = output.scheduled_cached_reqs
        blocks = [(new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        for name, groups, done in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            blocks.append((groups or (), done if name in cached.resumed_req_ids else 0))
        loads = (meta.op for meta in metadata.requests if meta.direction == "RETRIEVE")
        blocks += [(op.block_ids, getattr(op, "skip_first_n_tokens", 0)) for op in loads]
        return {
            block
            for groups, start in blocks
            for ids, size in zip(groups, self._sizes, strict=False)
            for block in ids[start // size if size else 0 :]
        }


def _event(read: Read, blocks: str) -> ev.BlocksLost:
    return ev.BlocksLost(read.request, read.group, read.start, read.end, blocks)
