"""The block tables of the lab's model runner, and the reads and writes of a step in each KV group."""

from collections.abc import Sequence
from typing import Any

from kvfix import scheduling
from kvfix_tools.lab.engine.kv_layout import KVGroup
from kvfix_tools.lab.engine.memory import GARBAGE, Slots, first_difference


class Group:
    """A KV group of full attention or with a sliding window: its block table, and the reads and writes of a step.

    vLLM's model runner keeps a block list for each request, and appends to it (v1/worker/gpu_model_runner.py
    0.32.0:1284 for a new request, 1419-1428 for a running or resumed one; 0.11.2.post2:745 and 830-839). With one
    worker the connector has the same list objects. With several workers it has copies.

    A request in the batch also has a row in the block table, to which each step appends (1450). When a request joins
    the batch, its row is filled from the list (gpu_input_batch.py 0.32.0:393).
    """

    def __init__(self, group: KVGroup, memories: Sequence[Slots]) -> None:
        self.group = group
        self._memories = [slots.of_group(group.block_size) for slots in memories]
        self._copies = len(memories) > 1
        #: {request in the batch: its row of the block table}
        self.rows: dict[str, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}

    def begin(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self._blocks.pop(name, None)
            self.rows.pop(name, None)
        resumed = scheduling.resumed(output)
        for name in [name for name in self.rows if name not in output.num_scheduled_tokens or name in resumed]:
            del self.rows[name]
        for new in output.scheduled_new_reqs:
            self._blocks[new.req_id] = self._own(new.block_ids[self.group.number])
            self.rows[new.req_id] = list(new.block_ids[self.group.number])
        cached = output.scheduled_cached_reqs
        for name, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            blocks = groups[self.group.number] if groups is not None else []
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

    def first_wrong(self, name: str, done: int, contents: list[int], rank: int) -> int | None:
        """Return the first token that the step reads and whose slot has wrong content, or None."""
        slots, start, blocks = self._memories[rank], self.group.reads_from(done), self.rows[name]
        if not self.group.number:
            return slots.first_wrong(blocks, done, contents)
        held, right = slots.read(blocks, start, done), self.group.right(contents[start:done])
        return None if held == right else start + first_difference(held, right)

    def write(self, name: str, done: int, contents: list[int], drafts: int, accepted: int) -> None:
        """Write the tokens that the step computes after `done`. drafts: how many of them, at the end, are drafts."""
        right = self.group.right(contents)
        for slots in self._memories:
            slots.write(self.rows[name], done, right)


class StateGroup(Group):
    """A KV group of states (Mamba, in mode "align").

    A step reads the state from the block of the last step and writes it to the block of its own last token
    (`preprocess_mamba`, v1/worker/mamba_utils.py 0.32.0:1446). With drafts, this block has the state without drafts,
    and each following block has the state after one more draft. The next step reads the block that fits the number of
    accepted drafts. If a block ends within the accepted drafts, the state at its end is copied to this block
    (`postprocess_mamba_fused_kernel`, :362).
    """

    def __init__(self, group: KVGroup, memories: Sequence[Slots]) -> None:
        super().__init__(group, memories)
        #: {request: index in its block list of the block with its state}
        self._last: dict[str, int] = {}

    def begin(self, output: Any) -> None:
        super().begin(output)
        new = [request.req_id for request in output.scheduled_new_reqs]
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ()), *scheduling.resumed(output), *new):
            self._last.pop(name, None)

    def first_wrong(self, name: str, done: int, contents: list[int], rank: int) -> int | None:
        size = self.group.block_size
        start = self._last.get(name, (done - 1) // size) * size
        held = self._memories[rank].read(self.rows[name], start, start + size) if done else []
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
        """Write this state to a block of the list. Null block 0 gets garbage, because it belongs to no request."""
        size, row = self.group.block_size, self.rows[name]
        is_null = number < len(row) and not row[number]
        right = [GARBAGE] * size if is_null else self.group.right([content] * size)
        for slots in self._memories:
            slots.write(row, number * size, right)
