"""The lab's model reads and writes the slots that vLLM's model runner would use, and checks each content it reads."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from kvfix_tools.lab.engine.kv_layout import KVGroup
from kvfix_tools.lab.engine.memory import GARBAGE, VOCABULARY, Prefix, Slots, first_difference, next_token
from kvfix_tools.lab.engine.vllm_objects import sampled
from kvfix_tools.lab.options import Options


class Group:
    """Keeps the block table of a KV group (full attention or sliding window), and reads and writes the group's slots.

    vLLM's model runner keeps a block list for each request and appends new blocks (v1/worker/gpu_model_runner.py
    0.32.0:1284 for a new request, 1419-1428 for a running or resumed one; 0.11.2.post2:745 and 830-839). A single
    worker shares the list objects with the scheduler and the connector. Several workers each have a copy.

    Each request in the batch also has a row in the block table. The runner fills a new row from the request's block
    list (gpu_input_batch.py 0.32.0:393). Each step appends new blocks to the row (gpu_model_runner.py 0.32.0:1450).
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
        cached = output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        for name in [name for name in self.rows if name not in output.num_scheduled_tokens or name in resumed]:
            del self.rows[name]
        for new in output.scheduled_new_reqs:
            self._blocks[new.req_id] = self._own(new.block_ids[self.group.number])
            self.rows[new.req_id] = list(new.block_ids[self.group.number])
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
        """Return the first token that the step reads from a slot with wrong content, or None."""
        slots, start, blocks = self._memories[rank], self.group.reads_from(done), self.rows[name]
        if not self.group.number:
            return slots.first_wrong(blocks, done, contents)
        held, right = slots.read(blocks, start, done), self.group.right(contents[start:done])
        return None if held == right else start + first_difference(held, right)

    def write(self, name: str, done: int, contents: list[int], drafts: int, accepted: int) -> None:
        """Write the contents of the tokens from `done` on. drafts: how many of the last tokens are drafts."""
        right = self.group.right(contents)
        for slots in self._memories:
            slots.write(self.rows[name], done, right)


class StateGroup(Group):
    """A KV group of recurrent states (Mamba, in mode "align").

    A step reads the state that the previous step has written, and writes the new state to the block of the last token
    (`preprocess_mamba`, v1/worker/mamba_utils.py 0.32.0:1446). A step with drafts writes several states to several
    blocks. The first block gets the state before all drafts. Each following block gets the state after one more draft.
    The next step reads the state after the last accepted draft. If the token before the drafts, or an accepted draft,
    ends a block, the runner copies the state after that token to that block (`postprocess_mamba_fused_kernel`, :369).
    """

    def __init__(self, group: KVGroup, memories: Sequence[Slots]) -> None:
        super().__init__(group, memories)
        #: {request: index in `rows` of the block that holds the request's state}
        self._last: dict[str, int] = {}

    def begin(self, output: Any) -> None:
        super().begin(output)
        new = [request.req_id for request in output.scheduled_new_reqs]
        resumed, preempted = output.scheduled_cached_reqs.resumed_req_ids, output.preempted_req_ids or ()
        for name in (*output.finished_req_ids, *preempted, *resumed, *new):
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
        """Write a state to block `number` of the row. To null block 0, which no request owns, write garbage."""
        size, row = self.group.block_size, self.rows[name]
        is_null = number < len(row) and not row[number]
        right = [GARBAGE] * size if is_null else self.group.right([content] * size)
        for slots in self._memories:
            slots.write(row, number * size, right)


class Drafter:
    """Proposes and verifies drafts as vLLM's model runner does, but without a draft model.

    A step computes the last sampled token and the drafts after this token. The step accepts each draft until one draft
    differs from the token that the model samples. Then the step samples one more token. Slots keep the KV of rejected
    drafts until a later step overwrites this KV.

    With asynchronous scheduling, the scheduler assumes that all drafts of the last step were accepted. Only the runner
    knows how many drafts were accepted, and the token of each draft (v1/spec_decode/utils.py 0.32.0:816).
    """

    #: The counters of the run (counts.py).
    counts: Counter[str]

    def __init__(self, options: Options) -> None:
        self._options = options
        #: {request that had drafts in the last step: first token that this step computes}
        self.starts: dict[str, int] = {}
        self._next_starts: dict[str, int] = {}
        #: {request: drafts that the last step has proposed}
        self._last: dict[str, list[int]] = {}
        self._proposed: dict[str, list[int]] = {}

    def begin(self, output: Any) -> None:
        self.starts, self._next_starts = self._next_starts, {}
        self._last, self._proposed = self._proposed, {}
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for name in (*resumed, *(new.req_id for new in output.scheduled_new_reqs)):
            self.starts.pop(name, None)
            self._last.pop(name, None)

    def verify(
        self, name: str, scheduled: list[int], right: Sequence[int], end: int, misled: bool
    ) -> tuple[int, list[int]]:
        """Return (number of accepted drafts, contents that the step writes for the drafts). Drafts begin at `end`.

        - scheduled: the drafts of the scheduler, with -1 for each unknown token
        - right: the right contents, at least up to the last draft
        - misled: True if the step has read wrong KV. The step then accepts no draft.
        """
        options = self._options
        drafts = self._last.get(name, scheduled)[: len(scheduled)] if options.async_scheduling else scheduled
        accepted, proposed = 0, len(drafts)
        while not misled and accepted < proposed and drafts[accepted] == next_token(right[end + accepted - 1]):
            accepted += 1
        self.counts.update(drafts_proposed=proposed, drafts_accepted=accepted, drafts_rejected=proposed - accepted)
        self.counts[f"steps_with_{proposed}_drafts"] += 1
        self.counts["no_draft_accepted" if not accepted else "all_drafts_accepted"] += accepted in (0, proposed)
        if options.async_scheduling:
            self._next_starts[name] = end + accepted
        contents = list(right[end : end + accepted])
        for draft in drafts[accepted:]:
            contents.append(hash((contents[-1] if contents else right[end - 1], draft)))
        return accepted, contents

    def propose(self, name: str, at: int, right: Callable[[str, int], list[int]]) -> None:
        """Propose drafts that follow token `at` of this request. The step has just sampled this token."""
        options = self._options
        if not options.drafter:
            return
        drafts, contents = options.drafts, right(name, at + options.drafts)
        if options.drafter == "ngram" and not options.async_scheduling:
            drafts = contents[at] % (options.drafts + 1)  # an n-gram drafter does not always find all drafts
        self._proposed[name], wrong = [], 0
        for content in contents[at : at + drafts]:
            wrong = wrong or hash((content, 1)) % 100 >= options.acceptance
            self._proposed[name].append((next_token(content) + wrong) % VOCABULARY)

    def take(self) -> DraftTokenIds:
        """Return the drafts for the scheduler. The lab does not call this method with asynchronous scheduling."""
        return DraftTokenIds(list(self._proposed), [list(drafts) for drafts in self._proposed.values()])


class Model:
    """Keeps the right contents of each request. In each step, checks the slots that the step reads, and writes KV."""

    def __init__(self, scheduler: Scheduler, memories: list[Slots], options: Options, groups: list[KVGroup]) -> None:
        self._scheduler = scheduler
        #: The first KV group has full attention.
        self.groups = [(StateGroup if group.state else Group)(group, memories) for group in groups]
        #: The memory of each rank. All ranks have the same block tables.
        self.memories = memories
        self.drafter = Drafter(options)
        self.requests: dict[str, Request] = {}
        self.prefixes: dict[str, Prefix] = {}
        #: _weights: number of weight changes. _given: {request: number of tokens at admission or last weight change}
        self._weights = 0
        self._given: dict[str, int] = {}
        #: {session: number of its prompt tokens}. vLLM appends each input of a session to the prompt.
        self._sessions: dict[str, int] = {}
        #: Blocks that other requests write to in the next step.
        self.written_by_others: list[int] = []
        #: Requests for which this step has read wrong KV.
        self._misled: set[str] = set()
        #: {request: (end of this step's tokens without drafts, end with the accepted drafts)}
        self._ends: dict[str, tuple[int, int]] = {}

    def admit(self, name: str, request: Request) -> None:
        """Add a request. The right contents depend on the request's LoRA adapter, embeddings and cache_salt."""
        self.requests[name], self.prefixes[name] = request, Prefix(self._seed(request))
        self._given[name] = request.num_prompt_tokens
        self._sessions.pop(name, None)
        if getattr(request, "resumable", False):
            self._sessions[name] = request.num_prompt_tokens

    def _seed(self, request: Request) -> int:
        lora = request.lora_request.lora_name if request.lora_request else 1
        embeds = request.prompt_embeds
        seed = (lora, request.cache_salt or 1) if not self._weights else (lora, request.cache_salt or 1, self._weights)
        return hash(seed if embeds is None else (*seed, embeds.numpy().tobytes()))

    def change_weights(self) -> None:
        """Change the right contents of all open requests. `wrong_text` then skips output from before the change."""
        self._weights += 1
        for name, request in self.requests.items():
            if not request.is_finished():
                self.prefixes[name] = Prefix(self._seed(request))
                self._given[name] = request.num_tokens

    def take_input(self) -> None:
        """Forget the last sampled token of each session with new input, because vLLM drops this token."""
        for name, tokens in self._sessions.items():
            request = self.requests[name]
            if request.num_prompt_tokens != tokens:
                self._sessions[name] = request.num_prompt_tokens
                self.prefixes[name].keep(request.all_token_ids)

    def right(self, name: str, end: int = 0) -> list[int]:
        """Return the right contents of the request's tokens, at least up to `end`, even if vLLM has fewer tokens."""
        tokens, prefix = self.requests[name].all_token_ids, self.prefixes[name]
        if end > len(tokens):
            tokens = list(tokens)
            while len(tokens) < end:
                tokens.append(next_token(prefix.of(tokens)[-1]))
        return prefix.of(tokens)

    def blocks(self, name: str) -> list[int]:
        return list(self._scheduler.kv_cache_manager.get_block_ids(name)[0])

    def fill(self, name: str, start: int, end: int) -> None:
        """Write the right contents of these tokens, as the load of another connector (MultiConnector) would."""
        for slots in self.memories:
            slots.write(self.blocks(name), start, self.right(name)[start:end])

    def start(self, name: str, tokens: int) -> int:
        """Return the first token that this step computes. `num_computed_tokens` already includes `tokens`."""
        return int(self.drafter.starts.get(name, self.requests[name].num_computed_tokens - tokens))

    def compute(self, output: Any, failed: set[int]) -> list[tuple[str, str]]:
        """For each request, read the KV of its computed tokens and write the KV of the scheduled tokens and drafts.

        Return (request, message) for each request that reads wrong KV or has too few blocks. failed: blocks whose load
        failed. Wrong KV of a request with a failed block is no finding.
        """
        for slots in self.memories:
            for block in self.written_by_others:
                slots.spoil(block)
        self.written_by_others, self._misled, self._ends, found = [], set(), {}, []
        for name, tokens in output.num_scheduled_tokens.items():
            done = self.start(name, tokens)
            blocks, right = self.groups[0].rows[name], self.right(name, done + tokens)
            scheduled = output.scheduled_spec_decode_tokens.get(name)
            end = done + tokens - len(scheduled or ())
            wrong, where = self._first_wrong(name, done, right)
            contents, accepted = right[done:end], 0
            if scheduled:
                accepted, drafts = self.drafter.verify(name, scheduled, right, end, misled=wrong is not None)
                contents += drafts
            self._ends[name] = end, end + accepted
            written = contents if wrong is None else [GARBAGE] * tokens
            for group in self.groups:
                group.write(name, done, written, len(scheduled or ()), accepted)
            room = len(blocks) * self.memories[0].block_size
            if done + tokens > room:
                found.append((name, f"the step ends at token {done + tokens}, but the request has blocks for {room}"))
            if wrong is None:
                continue
            if not failed.intersection(blocks):
                message = f"the step reads token {wrong} of {done} computed ones, its slot holds other KV{where}"
                found.append((name, message))
            self._misled.add(name)
        return found

    def _first_wrong(self, name: str, done: int, right: list[int]) -> tuple[int | None, str]:
        """Return (first wrong token that the step reads or None, text that names the KV group and the rank)."""
        for rank, _ in enumerate(self.memories):
            for group in self.groups:
                wrong = group.first_wrong(name, done, right, rank)
                if wrong is not None:
                    of_group = f" in KV group {group.group.number}" if group.group.number else ""
                    return wrong, of_group + (f" of rank {rank}" if rank else "")
        return None, ""

    def output(self, scheduled: dict[str, int]) -> ModelRunnerOutput:
        """Return the step's output. Sample tokens for each request whose last token the step has computed."""
        places, tokens = {name: place for place, name in enumerate(scheduled)}, list(map(self._sampled, scheduled))
        nothing: dict[str, Any] = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": None}
        return ModelRunnerOutput(list(places), places, sampled_token_ids=sampled(tokens), **nothing)

    def _sampled(self, name: str) -> list[Any]:
        end, accepted_end = self._ends[name]
        if end < self.requests[name].num_tokens:
            return []
        self.drafter.propose(name, accepted_end, self.right)
        contents = self.right(name, accepted_end)[end - 1 : accepted_end]
        return [next_token(content + (name in self._misled)) for content in contents]

    def wrong_text(self, name: str) -> int | None:
        """Return the first wrong token of this request's prompt or output, or None."""
        request, right = self.requests[name], self.right(name)
        has = request.all_token_ids
        prompt = enumerate(request.prompt_token_ids or ())
        lost = next((at for at, token in prompt if at >= len(has) or has[at] != token), None)
        if lost is not None:
            return lost
        generated = range(max(self._given[name], request.num_prompt_tokens), request.num_tokens)
        return next((at for at in generated if has[at] != next_token(right[at - 1])), None)
