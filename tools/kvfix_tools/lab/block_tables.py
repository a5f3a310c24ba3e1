"""What the lab's model runner keeps of each request's blocks, and what a step reads and writes in each KV group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvfix import scheduling
from kvfix_tools.lab.kv_groups import KVGroup
from kvfix_tools.lab.memory import GARBAGE, Slots


class BlockTable:
    """What vLLM's model runner keeps of each request's blocks.

    With one worker vLLM's executor is `uni`, in one process with the scheduler: nothing that the scheduler hands out is
    serialised. So the runner keeps, and adds to, the very lists that the connector was handed before
    (v1/worker/gpu_model_runner.py 0.32.0:1284 for a new request, 1419-1428 for one that goes on or is resumed;
    0.11.2.post2:745 and 830-839). A request that is in the batch also has a row of the block table, to which the step's
    blocks are added (1450); one that comes into the batch has its row filled from the list (gpu_input_batch.py
    0.32.0:393). With several workers it has copies.
    """

    def __init__(self, group: int = 0, copies: bool = False) -> None:
        self._group = group
        self._copies = copies
        #: Blocks in which a step reads and writes the KV of each request that is scheduled in it.
        self.rows: dict[str, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}

    def update(self, output: Any) -> None:
        """A step begins for which the scheduler hands out this, as `_update_states` takes it."""
        for name in output.finished_req_ids:
            self._blocks.pop(name, None)
            self.rows.pop(name, None)
        resumed = scheduling.resumed(output)
        for name in [name for name in self.rows if name not in output.num_scheduled_tokens or name in resumed]:
            del self.rows[name]
        for new in output.scheduled_new_reqs:
            self._blocks[new.req_id] = self._own(new.block_ids[self._group])
            self.rows[new.req_id] = list(new.block_ids[self._group])
        cached = output.scheduled_cached_reqs
        for name, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            blocks = groups[self._group] if groups is not None else []
            if name in resumed:
                self._blocks[name] = self._own(blocks)
            else:
                self._blocks[name].extend(blocks)
            if name in self.rows:
                self.rows[name] += blocks
            else:
                self.rows[name] = list(self._blocks[name])

    def _own(self, blocks: list[int]) -> list[int]:
        return list(blocks) if self._copies else blocks


class Group:
    """A KV group beside that of full attention, a sliding window's: its blocks for each request, and what the step
    reads and writes in them."""

    def __init__(self, group: KVGroup, memories: Sequence[Slots]) -> None:
        self.group = group
        self._memories = [slots.of_group(group.block_size) for slots in memories]
        self.block_table = BlockTable(group.number, len(memories) > 1)

    def begin(self, output: Any) -> None:
        """The workers get this of the scheduler."""
        self.block_table.update(output)

    def first_wrong(self, name: str, done: int, contents: list[int], rank: int) -> int | None:
        """The first token that the step reads whose slot does not hold what belongs there; None if all do."""
        start, blocks = self.group.reads_from(done), self.block_table.rows[name]
        held, right = self._memories[rank].read(blocks, start, done), self.group.right(contents[start:done])
        if held == right:
            return None
        same = (has == needs for has, needs in zip(held, right, strict=False))
        return start + next((number for number, each in enumerate(same) if not each), len(held))

    def write(self, name: str, done: int, contents: list[int], drafts: int, accepted: int) -> None:
        """The step computes these tokens after `done`; so many of them, the last ones, are drafts."""
        right = self.group.right(contents)
        for slots in self._memories:
            slots.write(self.block_table.rows[name], done, right)


class StateGroup(Group):
    """A KV group of states (Mamba, in mode "align").

    A step reads the state from the block in which the last step of the request has left it, and leaves it in the block
    of its own last token (`preprocess_mamba`, v1/worker/mamba_utils.py 0.32.0:1446). With drafts that block has the
    state without them, and each of the next ones that with one draft more; what is accepted decides which of them the
    next step reads. If the last whole block ends among the accepted ones, its state is copied there
    (`postprocess_mamba_fused_kernel`, :362).
    """

    def __init__(self, group: KVGroup, memories: Sequence[Slots]) -> None:
        super().__init__(group, memories)
        #: request -> number of the block, in its list, in which its last step has left the state
        self._last: dict[str, int] = {}

    def begin(self, output: Any) -> None:
        super().begin(output)
        new = [request.req_id for request in output.scheduled_new_reqs]
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ()), *scheduling.resumed(output), *new):
            self._last.pop(name, None)

    def first_wrong(self, name: str, done: int, contents: list[int], rank: int) -> int | None:
        size = self.group.block_size
        start = self._last.get(name, (done - 1) // size) * size
        held = self._memories[rank].read(self.block_table.rows[name], start, start + size) if done else []
        right = self.group.right(contents[done - 1 : done] * size) if done else []
        return None if held == right else done - 1

    def write(self, name: str, done: int, contents: list[int], drafts: int, accepted: int) -> None:
        size, end = self.group.block_size, done + len(contents) - drafts
        last = (end + drafts - 1) // size
        for number, content in enumerate(contents[len(contents) - drafts - 1 :]):
            self._leave(name, last + number, content)
        whole = (end + accepted) // size
        if whole * size >= end:
            self._leave(name, whole - 1, contents[whole * size - done - 1])
            accepted = 0 if whole - 1 == last else accepted
        self._last[name] = last + accepted

    def _leave(self, name: str, number: int, content: int) -> None:
        """In this block of the request's list is the state after the token with this content. Null block 0 is nobody's:
        what is in it others may have left there."""
        size, row = self.group.block_size, self.block_table.rows[name]
        is_null = number < len(row) and not row[number]
        right = [GARBAGE] * size if is_null else self.group.right([content] * size)
        for slots in self._memories:
            slots.write(row, number * size, right)
