"""In place of the model and its memory: it reads and writes slots, and says which of them hold what they must.

A token sampled is a function of all tokens before it, as a model's is.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvfix_tools.lab import rules
from kvfix_tools.lab.block_table import BlockTable
from kvfix_tools.lab.memory import GARBAGE, Prefix, Slots, next_token
from kvfix_tools.lab.run_log import RunLog
from kvfix_tools.lab.vllm_objects import sampled


class Model:
    """The slots' right contents for each request, and the step that reads and writes them (LAB001, LAB008)."""

    def __init__(self, scheduler: Scheduler, slots: Slots, log: RunLog) -> None:
        self._scheduler = scheduler
        self._log = log
        self.slots = slots
        self.block_table = BlockTable()
        self.requests: dict[str, Request] = {}
        self.prefixes: dict[str, Prefix] = {}
        #: Blocks that others write to in the next step.
        self.written_by_others: list[int] = []
        #: Requests that this step has computed on top of wrong KV.
        self.misled: set[str] = set()

    def admit(self, name: str, request: Request) -> None:
        """KV depends on adapter and embeddings, and is not shared between tenants: all that is in a slot's content."""
        lora = request.lora_request.lora_name if request.lora_request else 1
        embeds = request.prompt_embeds
        seed = (lora, request.cache_salt or 1)
        self.requests[name] = request
        self.prefixes[name] = Prefix(hash(seed if embeds is None else (*seed, embeds.numpy().tobytes())))

    def right(self, name: str) -> list[int]:
        """What belongs in the slots of the request's tokens."""
        return self.prefixes[name].of(self.requests[name].all_token_ids)

    def ahead(self, name: str, end: int) -> list[int]:
        """The same up to this token, which may be a sampled one that the scheduler does not know yet."""
        if end <= self.requests[name].num_tokens:
            return self.right(name)
        tokens = list(self.requests[name].all_token_ids)
        while len(tokens) < end:
            tokens.append(next_token(self.prefixes[name].of(tokens)[-1]))
        return self.prefixes[name].of(tokens)

    def blocks(self, name: str) -> list[int]:
        return list(self._scheduler.kv_cache_manager.get_block_ids(name)[0])

    def fill(self, name: str, start: int, end: int) -> None:
        """The other connector of a MultiConnector loads these tokens, as they are to be."""
        self.slots.write(self.blocks(name), start, self.right(name)[start:end])

    def compute(self, scheduled: dict[str, int], failed: set[int]) -> None:
        """Each request reads the KV of all its computed tokens and writes that of the scheduled ones."""
        for block in self.written_by_others:
            self.slots.write([block], 0, [GARBAGE] * self.slots.block_size)
        self.written_by_others = []
        self.misled.clear()
        for name, tokens in scheduled.items():
            done = self.requests[name].num_computed_tokens - tokens  # the scheduler has counted them in already
            blocks, right = self.block_table.rows[name], self.ahead(name, done + tokens)
            wrong = self.slots.first_wrong(blocks, done, right)
            if wrong is not None and not failed.intersection(blocks):
                what = f"the step reads token {wrong} of {done} computed ones, its slot holds other KV"
                self._log.violated(rules.WRONG_CONTENT, name, what)
            if wrong is not None:
                self.misled.add(name)
            self.slots.write(blocks, done, right[done : done + tokens] if wrong is None else [GARBAGE] * tokens)

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
        request = self.requests[name]
        if request.num_computed_tokens < request.num_tokens:
            return []
        end = request.num_computed_tokens
        return [next_token(self.ahead(name, end)[end - 1] + (name in self.misled))]

    def wrong_text(self, name: str) -> int | None:
        """The first generated token of this request that is not what the model samples after the tokens before it."""
        request, right = self.requests[name], self.right(name)
        generated = range(request.num_prompt_tokens, request.num_tokens)
        return next((at for at in generated if request.all_token_ids[at] != next_token(right[at - 1])), None)
