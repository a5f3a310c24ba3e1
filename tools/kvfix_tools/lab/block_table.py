"""What vLLM's model runner keeps of each request's blocks, in one process with the scheduler.

With one worker vLLM's executor is `uni`: nothing that the scheduler hands out is serialised. So the runner keeps, and
adds to, the very lists that the connector was handed before (v1/worker/gpu_model_runner.py 0.32.0:1284 for a new
request, 1419-1428 for one that goes on or is resumed; 0.11.2.post2:745 and 830-839). A request that is in the batch
also has a row of the block table, to which the step's blocks are added (1450); one that comes into the batch has its
row filled from the list (gpu_input_batch.py 0.32.0:393).
"""

from __future__ import annotations

from typing import Any

from kvfix import scheduling


class BlockTable:
    """`rows`: blocks in which a step reads and writes the KV of each request that is scheduled in it."""

    def __init__(self) -> None:
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
            self._blocks[new.req_id] = new.block_ids[0]
            self.rows[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for name, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            blocks = groups[0] if groups is not None else []
            if name in resumed:
                self._blocks[name] = blocks
            else:
                self._blocks[name].extend(blocks)
            if name in self.rows:
                self.rows[name] += blocks
            else:
                self.rows[name] = list(self._blocks[name])
