"""A world: the real scheduler and connector over memory that knows what belongs in it, moved by named steps.

Everything that happens to a request's tokens goes to the ledger as an event, and into `log`; what rules and memory
find wrong is in `findings`. An exception that leaves the scheduler ends the world, as it ends EngineCore.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvfix import clock
from kvfix.ledger import Finding, Ledger
from kvfix.ledger import events as ev
from kvfix_tools.lab import compat, engine
from kvfix_tools.lab.asynchronous import AsyncV1
from kvfix_tools.lab.memory import GARBAGE, Cache, Prefix, Slots
from kvfix_tools.lab.mp import MP
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.v1 import V1, forget_configuration

#: Seconds that a step takes in the world's time, and that LMCache waits for a lookup (lookup_timeout_ms).
STEP, LOOKUP_TIMEOUT = 0.1, 3.0
#: After so many steps in which nothing happened, nothing will: longer than any lookup or load of the lab takes.
IDLE = 64


class Died(Exception):
    """EngineCore would be dead: an exception left the scheduler."""


class World:
    """`steps` so far, `log` of (step, event), `findings`, and counts of what a run must have done to mean something."""

    def __init__(self, options: Options, cache: Cache | None = None) -> None:
        self.options = options
        forget_configuration()
        config = engine.vllm_config(options)
        self.slots = Slots(options.num_blocks, options.block_size)
        self.cache = cache if cache is not None else Cache()
        #: The other connector of a MultiConnector.
        self.beside: Any = None
        self.side: Any = self._make(config)
        self.side.listen(self._loaded, self._stored, self._corrupt, self._right, self._timed_out)
        #: The world's own time, in seconds: what corrections go by.
        self.seconds = 0.0
        clock.now = lambda: self.seconds
        self.ledger = Ledger()
        self.steps = 0
        #: Steps in a row in which nothing was scheduled and no transfer was under way.
        self.idle = 0
        self.log: list[tuple[int, ev.Event]] = []
        self.findings: list[Finding] = []
        self.counts = dict.fromkeys(("preemptions", "loaded_tokens", "stored_tokens", "finished", "aborted"), 0)
        self.requests: dict[str, Request] = {}
        self._prefixes: dict[str, Prefix] = {}
        self._ended: set[str] = set()
        self._seen_preemptions: dict[str, int] = {}
        self._waited: dict[str, int] = {}
        self._held: list[Any] = []
        self._hits: dict[str, int] = {}
        #: Blocks that others write to in the next step.
        self._written_by_others: list[int] = []
        #: Requests whose load may come short because the world made it; "" for all.
        self._may_fail: set[str] = set()
        self._watch(self.side.connector)

    # ------------------------------------------------------------------ named steps

    def admit(self, name: str, prompt: list[int] | None, max_tokens: int = 1, **more: Any) -> Request:
        """A request arrives."""
        request = engine.request(self.options, name, prompt, max_tokens, **more)
        self.requests[name] = request
        self._prefixes[name] = self._prefix(request)
        self._ended.discard(name)
        self._seen_preemptions[name] = 0
        self.scheduler.add_request(request)
        return request

    def is_beside(self, name: str) -> None:
        """The other connector of a MultiConnector has the KV of this request."""
        self.beside.has.add(name)

    def stored_elsewhere(self, prompt: list[int]) -> None:
        """Another instance has stored this prompt in the cache, whole chunks of it."""
        self.side.put(prompt)

    def budget(self, tokens: int) -> None:
        """From the next step on, at most so many tokens are scheduled in one."""
        self.scheduler.max_num_scheduled_tokens = tokens

    def abort(self, name: str) -> None:
        """The client is gone."""
        request = self.requests[name]
        self._guard("finish_requests", name, self.scheduler.finish_requests, name, RequestStatus.FINISHED_ABORTED)
        if request.is_finished():
            self._tell(ev.Finished(name, True))
            self.counts["aborted"] += 1
            self._ended.add(name)

    def is_free(self, name: str) -> bool:
        """Whether a request of this id may arrive: none has, or it is gone and every part was told so."""
        known = self.requests.get(name)
        if known is None:
            return True
        return known.is_finished() and name not in self.scheduler.requests and not self.scheduler.finished_req_ids

    def free(self) -> int:
        """Free blocks, those that hold a cached prefix among them."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def preempt(self, name: str) -> None:
        """vLLM takes the blocks of this running request, as it does when one before it needs a block."""
        request = self.requests[name]
        self.scheduler.running.remove(request)
        compat.preempt(self.scheduler, request, time.monotonic())
        self.scheduler.prev_step_scheduled_req_ids.discard(name)  # as vLLM does where it preempts between steps
        self._tell_preemptions()

    def keep_blocks(self, how_many: int) -> None:
        """Others take all free blocks but so many; a cached prefix loses its end first."""
        self.take_blocks(self.free() - how_many)

    def take_blocks(self, how_many: int) -> None:
        """Somebody else needs blocks and writes to them: so many of the free ones are gone until `free_blocks`."""
        pool = self.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(min(how_many, self.free()))
        self._written_by_others += [block.block_id for block in taken]
        self._held += taken

    def free_blocks(self) -> None:
        """The blocks of `take_blocks` come free."""
        self.scheduler.kv_cache_manager.block_pool.free_blocks(self._held)
        self._held, self._written_by_others = [], []

    def reset_prefix_cache(self) -> bool:
        """vLLM forgets its own prefix cache; False if blocks are in use."""
        return bool(self.scheduler.reset_prefix_cache())

    def fail_load(self, name: str, after_chunks: int = 0) -> None:
        """The next load of this request brings only so many chunks."""
        self.side.fail_load(name, after_chunks)
        self._may_fail.add(name)

    def lose_loads(self) -> None:
        """A step in which the worker of a multi-process connector hears nothing from its server: its loads fail."""
        self._may_fail.add("")
        self.side.lose_loads()
        self.step()

    def lookup_times_out(self) -> None:
        """A lookup of the multi-process scheduler was not answered in time: it takes the server for gone."""
        self.side.lookup_times_out()

    def hour_of_silence(self) -> None:
        """Nobody asks anything for an hour; the multi-process server forgets a worker that has never pinged."""
        self.side.server.forget_silent_worker()

    def lookups_fail(self, how_many: int) -> None:
        """So many of the next lookups time out, which is answered as no hit. It takes the world's time only."""
        self.side.lookups_fail(how_many)

    def never_ends(self) -> None:
        """Everything is free, many steps were made, and requests are still there."""
        for name, request in self.requests.items():
            if not request.is_finished():
                self._found("LAB003", "never-ends", name, f"is {request.status.name} for ever")

    def expect_stored(self, name: str) -> None:
        """All of this request's prompt was computed: each whole chunk of it must be in the cache."""
        request = self.requests[name]
        keys, _ = self.side.server.keys(request.prompt_token_ids, request.num_prompt_tokens, request.cache_salt or "")
        missing = [number * self.options.chunk_size for number, key in enumerate(keys) if key not in self.cache]
        if missing:
            self._found(
                "LAB004", "not-stored", name, f"was computed, the chunks from tokens {missing} on are not stored"
            )

    def expect_hit(self, name: str) -> None:
        """What this request asks for is in the cache: it must have been found."""
        if not self._hits.get(name):
            self._found("LAB006", "not-found", name, "is in the cache and was not found there")

    def expect_unharmed(self, name: str) -> None:
        """No load of this request's own failed: if it has ended, then with an answer."""
        status = self.requests[name].status
        if status == RequestStatus.FINISHED_ERROR:
            self._found("LAB005", "harmed-by-others", name, f"ended as {status.name}")

    def evict(self, chunks: int, forced: bool = False) -> None:
        """The cache drops its oldest chunks; `forced`: also those that a lookup has pinned, as when a pin times out."""
        if self.cache.evict(chunks, forced) and forced:
            self._may_fail.add("")

    def slow_lookups(self, steps: int) -> None:
        """Asynchronous lookups made from now on are answered so many steps later than they could be."""
        self.side.lookups.engine.delay = steps

    def wait(self, seconds: float) -> None:
        """So much time passes for asynchronous lookups, which give up after `lookup_timeout_ms`."""
        self.side.lookups.wait(seconds)

    def step(self) -> None:
        """One iteration of EngineCore: schedule, load, compute, store, sample, update."""
        self.steps += 1
        self.seconds += STEP
        self.side.tick()
        output = self._guard("schedule", "", self.scheduler.schedule)
        metadata = output.kv_connector_metadata
        if self.beside is not None:
            metadata = metadata.metadata[1]
        scheduled: dict[str, int] = output.num_scheduled_tokens
        self._tell_preemptions()
        self._tell_scheduled(output, metadata)
        forward = output.total_num_scheduled_tokens > 0
        self.idle = 0 if forward or self.side.busy() else self.idle + 1
        self._guard("start_load_kv", "", self.side.start_step, metadata, forward)
        self._load_beside()
        self._compute(scheduled, self.side.failed_blocks())
        finish = (forward, output.finished_req_ids)
        sending, receiving, invalid = self._guard("wait_for_save", "", self.side.finish_step, *finish)
        update = self.scheduler.update_from_output
        self._guard("update_from_output", "", update, output, self._sampled(scheduled, sending, receiving, invalid))
        self._tell_ended()
        self._look_for_stuck()

    def run(self, steps: int = 1000) -> None:
        """Step until nothing is left to do, at most so often; or until nothing has happened for IDLE steps."""
        self.idle = 0
        for _ in range(steps):
            if not self.scheduler.has_requests() or self.idle > IDLE:
                return
            self.step()

    def settle(self) -> None:
        """All requests have ended: two more steps let the connector clean up, then nothing may be left of them."""
        for _ in range(2):
            self.step()
        for _ in range(64):  # transfers that are still under way hold their blocks
            if not self.scheduler.requests and not self.side.busy():
                break
            self.step()
        for where, names in self.side.state().items():
            for name in sorted(names):
                if name in self._ended:
                    self._tell(ev.Left(name, where))

    # ------------------------------------------------------------------ what a step does

    def _make(self, config: Any) -> Any:
        options = self.options
        if options.connector == "v1":
            self.scheduler = engine.scheduler(options, config)
            connector = self.scheduler.connector
            if options.beside:
                self.beside, connector = connector._connectors
            kind = AsyncV1 if options.lmcache.get("enable_async_loading") else V1
            return kind(connector, config, self.slots, self.cache)

        def make(role: str) -> Any:
            if role == "worker":
                return engine.worker(options, config)
            self.scheduler = engine.scheduler(options, config)
            return self.scheduler.connector

        return MP(make, config, self.slots, self.cache, options.delay)

    def _load_beside(self) -> None:
        """What the other connector of a MultiConnector was granted is in its slots before the step reads them."""
        if self.beside is not None:
            for name, (start, end) in self.beside.loads.items():
                self.slots.write(self._blocks(name), start, self._right(name)[start:end])
            self.beside.loads.clear()

    def _compute(self, scheduled: dict[str, int], failed: set[int]) -> None:
        """The model: each request reads the KV of all its computed tokens and writes that of the scheduled ones."""
        for block in self._written_by_others:
            self.slots.write([block], 0, [GARBAGE] * self.options.block_size)
        self._written_by_others = []
        for name, tokens in scheduled.items():
            request = self.requests[name]
            done = request.num_computed_tokens - tokens  # the scheduler has counted them in already
            blocks = self._blocks(name)
            right = self._prefixes[name].of(request.all_token_ids)
            wrong = self.slots.first_wrong(blocks, done, right)
            if wrong is not None and not failed.intersection(blocks):
                self._corrupt(name, f"the step reads token {wrong} of {done} computed ones, its slot holds other KV")
            contents = right[done : done + tokens] if wrong is None else [GARBAGE] * tokens
            self.slots.write(blocks, done, contents)

    def _sampled(self, scheduled: dict[str, int], sending: Any, receiving: Any, invalid: set[int]) -> Any:
        """A token for each request whose step reached its last one: a function of the whole prefix, as of a model."""
        names = list(scheduled)
        tokens = []
        for name in names:
            request = self.requests[name]
            at_end = request.num_computed_tokens >= request.num_tokens
            last = self._prefixes[name].of(request.all_token_ids)[request.num_tokens - 1]
            tokens.append([last % engine.VOCABULARY] if at_end else [])
        report = KVConnectorOutput(finished_sending=sending, finished_recving=receiving, invalid_block_ids=invalid)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=compat.sampled(tokens),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=report,
        )

    @staticmethod
    def _prefix(request: Request) -> Prefix:
        """KV depends on adapter and embeddings, and is not shared between tenants: all that is in a slot's content."""
        lora = request.lora_request.lora_name if request.lora_request else 1
        embeds = request.prompt_embeds
        seed = (lora, request.cache_salt or 1)
        return Prefix(hash(seed if embeds is None else (*seed, embeds.numpy().tobytes())))

    def _right(self, name: str) -> list[int]:
        return self._prefixes[name].of(self.requests[name].all_token_ids)

    def _blocks(self, name: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])

    # ------------------------------------------------------------------ what is told

    def _watch(self, connector: Any) -> None:
        """See the hooks' answers. The wrappers stand on the instance, over whatever the class holds, fixes included."""
        ask, grant = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

        def asked(request: Any, computed: int) -> Any:
            promised, asynchronous = ask(request, computed)
            hit = self.side.hit(request.request_id)
            self._hits[request.request_id] = hit or 0
            self._tell(ev.Asked(request.request_id, request.num_tokens, computed, hit, promised, asynchronous))
            return promised, asynchronous

        def granted(request: Any, blocks: Any, external: int) -> Any:
            self._tell(ev.Granted(request.request_id, external))
            return grant(request, blocks, external)

        connector.get_num_new_matched_tokens = asked
        connector.update_state_after_alloc = granted

    def _tell(self, event: ev.Event) -> None:
        self.log.append((self.steps, event))
        self.findings += self.ledger.feed(event)

    def _corrupt(self, name: str, message: str) -> None:
        self._found("LAB001", "wrong-content", name, message)

    def _found(self, code: str, rule: str, name: str, message: str) -> None:
        self.findings.append(Finding(code, rule, "violated", name, message, self.log[-1][1]))

    def _tell_preemptions(self) -> None:
        for name, request in self.requests.items():
            if request.num_preemptions > self._seen_preemptions[name]:
                self._seen_preemptions[name] = request.num_preemptions
                self.counts["preemptions"] += 1
                self._tell(ev.Preempted(name))

    def _tell_scheduled(self, output: Any, metadata: Any) -> None:
        resumed = getattr(output.scheduled_cached_reqs, "resumed_req_ids", ())
        first = {new.req_id for new in output.scheduled_new_reqs} | set(resumed)
        for due in self.side.due(metadata):
            self._tell(ev.LoadDue(*due))
        for name, tokens in output.num_scheduled_tokens.items():
            done = self.requests[name].num_computed_tokens - tokens
            capacity = len(self._blocks(name)) * self.options.block_size
            self._tell(ev.Scheduled(name, done, tokens, capacity, name in first))

    def _tell_ended(self) -> None:
        for name, request in self.requests.items():
            if request.is_finished() and name not in self._ended:
                self._ended.add(name)
                self.counts["finished"] += 1
                self._tell(ev.Finished(name, False))

    def _look_for_stuck(self) -> None:
        """Who waits for a load that is not under way, for longer than an answer takes.

        One whose load is done and reported waits for a place in a step, as everybody does.
        """
        done = self.scheduler.finished_recving_kv_req_ids | self.scheduler.failed_recving_kv_req_ids
        for name, request in self.requests.items():
            waits = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            waits = waits and name not in self.side.loading() and name not in done
            self._waited[name] = self._waited.get(name, 0) + 1 if waits else 0
            if self._waited[name] == 8:
                self._tell(ev.Stuck(name, 8))

    def _loaded(self, name: str, start: int, end: int, tokens: int) -> None:
        self.counts["loaded_tokens"] += tokens
        self._tell(ev.Loaded(name, tokens, end))
        due = self.ledger.stories[name].due
        if due is not None and end < due.end:
            if not self._may_fail.intersection((name, "")):
                self._found("LAB002", "load-came-short", name, f"loaded up to {end} of {due.end} that were promised")
            self._tell(ev.LoadFailed(name, None))
        self._may_fail.discard(name)

    def _stored(self, name: str, tokens: list[int], start: int, end: int) -> None:
        self.counts["stored_tokens"] += end - start
        self._tell(ev.Stored(name, start, end, self._covered(name)))
        if not self._prefixes[name].is_prefix(tokens):
            self._corrupt(name, f"stores {len(tokens)} tokens that are not the first ones of the request")

    def _timed_out(self, name: str) -> None:
        self.seconds += LOOKUP_TIMEOUT
        self._tell(ev.TimedOut(name, LOOKUP_TIMEOUT, self.seconds))

    def _covered(self, name: str) -> int:
        """What was hit is there, also if the load of it failed."""
        return self._hits.get(name, 0)

    def _guard(self, where: str, name: str, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            self._tell(ev.Raised(name, where, f"{type(error).__name__}: {error}".rstrip(": ")))
            raise Died(str(error)) from error
