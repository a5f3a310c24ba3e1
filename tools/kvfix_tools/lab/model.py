"""In place of the model: it reads and writes slots in the blocks that a model runner would, and compares contents.

A token sampled is a function of all tokens before it, as a model's is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvfix import scheduling
from kvfix_tools.lab.kv_groups import KVGroup
from kvfix_tools.lab.memory import GARBAGE, Prefix, Slots, next_token
from kvfix_tools.lab.vllm_objects import sampled


class BlockTable:
    """What vLLM's model runner keeps of each request's blocks, in one process with the scheduler.

    With one worker vLLM's executor is `uni`: nothing that the scheduler hands out is serialised. So the runner keeps,
    and adds to, the very lists that the connector was handed before (v1/worker/gpu_model_runner.py 0.32.0:1284 for a
    new request, 1419-1428 for one that goes on or is resumed; 0.11.2.post2:745 and 830-839). A request that is in the
    batch also has a row of the block table, to which the step's blocks are added (1450); one that comes into the batch
    has its row filled from the list (gpu_input_batch.py 0.32.0:393).
    """

    def __init__(self, group: int = 0) -> None:
        self._group = group
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
            self._blocks[new.req_id] = new.block_ids[self._group]
            self.rows[new.req_id] = list(new.block_ids[self._group])
        cached = output.scheduled_cached_reqs
        for name, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            blocks = groups[self._group] if groups is not None else []
            if name in resumed:
                self._blocks[name] = blocks
            else:
                self._blocks[name].extend(blocks)
            if name in self.rows:
                self.rows[name] += blocks
            else:
                self.rows[name] = list(self._blocks[name])


class WindowGroup:
    """A KV group of a sliding window: its blocks for each request, and what the step reads and writes in them."""

    def __init__(self, group: KVGroup, slots: Slots) -> None:
        self.group = group
        self._slots = slots.of_group(group.block_size)
        self.block_table = BlockTable(group.number)

    def first_wrong(self, name: str, done: int, contents: list[int]) -> int | None:
        """The first token that the step reads whose slot does not hold what belongs there; None if all do."""
        start = self.group.reads_from(done)
        held, right = self._slots.read(self.block_table.rows[name], start, done), self.group.right(contents[start:done])
        if held == right:
            return None
        same = (has == needs for has, needs in zip(held, right, strict=False))
        return start + next((number for number, each in enumerate(same) if not each), len(held))

    def write(self, name: str, done: int, contents: list[int]) -> None:
        self._slots.write(self.block_table.rows[name], done, self.group.right(contents))


class Model:
    """The slots' right contents for each request, and the step that reads and writes them (LAB001, LAB008)."""

    def __init__(self, scheduler: Scheduler, slots: Slots, groups: Sequence[KVGroup] = ()) -> None:
        self._scheduler = scheduler
        #: The KV groups beside that of full attention.
        self.windows = [WindowGroup(group, slots) for group in groups if group.window]
        self.slots = slots
        self.block_table = BlockTable()
        self.requests: dict[str, Request] = {}
        self.prefixes: dict[str, Prefix] = {}
        #: How often the weights have changed, and the tokens that each request had then.
        self._weights = 0
        self._given: dict[str, int] = {}
        #: Blocks that others write to in the next step.
        self.written_by_others: list[int] = []
        #: Requests that this step has computed on top of wrong KV.
        self._misled: set[str] = set()

    def admit(self, name: str, request: Request) -> None:
        """KV depends on adapter and embeddings, and is not shared between tenants: all that is in a slot's content."""
        self.requests[name] = request
        self.prefixes[name] = Prefix(self._seed(request))
        self._given[name] = request.num_prompt_tokens

    def _seed(self, request: Request) -> int:
        lora = request.lora_request.lora_name if request.lora_request else 1
        embeds = request.prompt_embeds
        seed = (lora, request.cache_salt or 1) if not self._weights else (lora, request.cache_salt or 1, self._weights)
        return hash(seed if embeds is None else (*seed, embeds.numpy().tobytes()))

    def change_weights(self) -> None:
        """From now on other contents are right, for all requests. What they have generated before stays."""
        self._weights += 1
        for name, request in self.requests.items():
            if not request.is_finished():
                self.prefixes[name] = Prefix(self._seed(request))
                self._given[name] = request.num_tokens

    def right(self, name: str, end: int = 0) -> list[int]:
        """What belongs in the slots of the request's tokens.

        end: at least up to there. The last may be a sampled token that the scheduler does not know yet.
        """
        tokens, prefix = self.requests[name].all_token_ids, self.prefixes[name]
        if end > len(tokens):
            tokens = list(tokens)
            while len(tokens) < end:
                tokens.append(next_token(prefix.of(tokens)[-1]))
        return prefix.of(tokens)

    def blocks(self, name: str) -> list[int]:
        return list(self._scheduler.kv_cache_manager.get_block_ids(name)[0])

    def fill(self, name: str, start: int, end: int) -> None:
        """The other connector of a MultiConnector loads these tokens, as they are to be."""
        self.slots.write(self.blocks(name), start, self.right(name)[start:end])

    def compute(self, scheduled: dict[str, int], failed: set[int]) -> list[tuple[str, str]]:
        """Each request reads the KV of all its computed tokens and writes that of the scheduled ones.

        Returns (request, what it has read), where that is wrong. failed: blocks in which no load has arrived.
        """
        for block in self.written_by_others:
            self.slots.spoil(block)
        self.written_by_others = []
        self._misled.clear()
        found = []
        for name, tokens in scheduled.items():
            done = self.requests[name].num_computed_tokens - tokens  # the scheduler has counted them in already
            blocks, right = self.block_table.rows[name], self.right(name, done + tokens)
            wrong, where = self.slots.first_wrong(blocks, done, right), ""
            for window in self.windows:
                if wrong is None:
                    wrong, where = window.first_wrong(name, done, right), f" in KV group {window.group.number}"
            written = right[done : done + tokens] if wrong is None else [GARBAGE] * tokens
            self.slots.write(blocks, done, written)
            for window in self.windows:
                window.write(name, done, written)
            if wrong is None:
                continue
            if not failed.intersection(blocks):
                message = f"the step reads token {wrong} of {done} computed ones, its slot holds other KV{where}"
                found.append((name, message))
            self._misled.add(name)
        return found

    def step_begins(self, output: Any) -> None:
        """The scheduler hands out this."""
        for table in (self.block_table, *(window.block_table for window in self.windows)):
            table.update(output)

    def output(self, scheduled: dict[str, int], report: KVConnectorOutput) -> ModelRunnerOutput:
        """A token for each request whose step reached its last one."""
        names = list(scheduled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled([self._sampled(name) for name in names]),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=report,
        )

    def _sampled(self, name: str) -> list[Any]:
        end = self.requests[name].num_computed_tokens
        if end < self.requests[name].num_tokens:
            return []
        return [next_token(self.right(name, end)[end - 1] + (name in self._misled))]

    def wrong_text(self, name: str) -> int | None:
        """The first generated token of this request that is not what the model samples after the tokens before it."""
        request, right = self.requests[name], self.right(name)
        generated = range(self._given[name], request.num_tokens)
        return next((at for at in generated if request.all_token_ids[at] != next_token(right[at - 1])), None)
