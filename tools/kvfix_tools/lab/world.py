"""A world: the real scheduler and connector over memory that knows what belongs in it, moved by named steps.

Everything that happens to a request's tokens goes to the ledger as an event, and into `log`; what rules and memory
find wrong is in `findings`. An exception that leaves the scheduler ends the world, as it ends EngineCore.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvfix import clock, notice
from kvfix.ledger import Finding
from kvfix.ledger import events as ev
from kvfix_tools.lab import compat, engine
from kvfix_tools.lab.asynchronous import AsyncV1
from kvfix_tools.lab.memory import Cache, Slots
from kvfix_tools.lab.model import Model
from kvfix_tools.lab.mp import MP
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.record import Record
from kvfix_tools.lab.scenario import FAULT
from kvfix_tools.lab.v1 import V1, forget_configuration
from kvfix_tools.lab.watcher import Watcher

#: Seconds that a step takes in the world's time, and that LMCache waits for a lookup (lookup_timeout_ms).
STEP, LOOKUP_TIMEOUT = 0.1, 3.0
#: After so many steps in which nothing happened, nothing will: longer than any lookup or load of the lab takes.
IDLE = 64


#: What an aborted request was about, beside its transfers.
_STATE = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
    RequestStatus.WAITING_FOR_REMOTE_KVS: "loading",
}


class Died(Exception):
    """EngineCore would be dead: an exception left the scheduler."""


class World:
    """What it has come to is in `log`, `findings` and `counts`; see record.py."""

    def __init__(self, options: Options, cache: Cache | None = None) -> None:
        self.options = options
        self._faults_before = dict(notice.faults)
        forget_configuration()
        config = engine.vllm_config(options)
        self.slots = Slots(options.num_blocks, options.block_size)
        self.cache = cache if cache is not None else Cache()
        #: The other connector of a MultiConnector.
        self.beside: Any = None
        self.side: Any = self._make(config)
        self.record = Record()
        self.model = Model(self.scheduler, self.slots, self.record)
        self.watcher = Watcher(self.scheduler, self.side, self.model, self.record)
        self.side.listen(
            self.watcher.loaded,
            self.watcher.stored,
            self.record.corrupt,
            self.model.right,
            lambda name: self.watcher.timed_out(name, LOOKUP_TIMEOUT),
            self._unanswered,
        )
        clock.now = lambda: self.record.seconds  # what corrections go by
        #: Steps in a row in which nothing was scheduled and no transfer was under way.
        self.idle = 0
        self._held: list[Any] = []
        #: Steps whose answer the scheduler has not been given, and the blocks whose load has failed in them.
        self._answers: deque[tuple[Any, Any]] = deque()
        self._failed: deque[set[int]] = deque()
        self.watcher.listen(self.side.connector)

    @property
    def requests(self) -> dict[str, Request]:
        """All that were admitted, by name."""
        return self.model.requests

    @property
    def log(self) -> list[tuple[int, ev.Event]]:
        return self.record.log

    @property
    def findings(self) -> list[Finding]:
        """With what has gone wrong in kvfix itself meanwhile (LAB007): an engine goes on without the fix."""
        went_wrong = [kind for kind, times in notice.faults.items() if times > self._faults_before.get(kind, 0)]
        return self.record.findings + [
            Finding(FAULT, "fault-of-kvfix", "violated", "", kind, self.log[-1][1]) for kind in went_wrong
        ]

    @property
    def counts(self) -> Counter[str]:
        return self.record.counts

    @property
    def steps(self) -> int:
        return self.record.steps

    # ------------------------------------------------------------------ named steps

    def admit(self, name: str, prompt: list[int] | None, max_tokens: int = 1, **more: Any) -> Request:
        """A request arrives."""
        request = engine.request(self.options, name, prompt, max_tokens, **more)
        self.counts["ids_used_again"] += name in self.requests
        self.model.admit(name, request)
        self.watcher.admitted(name)
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
        doing = {_STATE[request.status], *self.side.under_way(name)} if request.status in _STATE else set()
        self._guard("finish_requests", name, self.scheduler.finish_requests, name, RequestStatus.FINISHED_ABORTED)
        if request.is_finished():
            self.watcher.aborted(name, doing)

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
        self.watcher.preempted()

    def keep_blocks(self, how_many: int) -> None:
        """Others take all free blocks but so many; a cached prefix loses its end first."""
        self.take_blocks(self.free() - how_many)

    def take_blocks(self, how_many: int) -> None:
        """Somebody else needs blocks and writes to them: so many of the free ones are gone until `free_blocks`."""
        pool = self.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(min(how_many, self.free()))
        self.model.written_by_others += [block.block_id for block in taken]
        self._held += taken

    def free_blocks(self) -> None:
        """The blocks of `take_blocks` come free."""
        self.scheduler.kv_cache_manager.block_pool.free_blocks(self._held)
        self._held, self.model.written_by_others = [], []

    def reset_prefix_cache(self) -> bool:
        """vLLM forgets its own prefix cache; False if blocks are in use."""
        self.counts["resets"] += 1
        return bool(self.scheduler.reset_prefix_cache())

    def fail_load(self, name: str, after_chunks: int = 0) -> None:
        """The next load of this request brings only so many chunks."""
        self.side.fail_load(name, after_chunks)
        self.watcher.may_fail.add(name)

    def lose_loads(self) -> None:
        """A step in which the worker of a multi-process connector hears nothing from its server: its loads fail."""
        self.watcher.may_fail.add("")
        self.side.lose_loads()
        self.step()

    def lookup_times_out(self) -> None:
        """A lookup of the multi-process scheduler was not answered in time: it takes the server for gone."""
        self.side.lookup_times_out()

    def hour_of_silence(self) -> None:
        """Nobody asks anything for an hour; the multi-process server forgets a worker that has never pinged."""
        self.side.transfer.forget_silent_worker()

    def lookups_fail(self, how_many: int) -> None:
        """So many of the next lookups time out, which is answered as no hit. It takes the world's time only."""
        self.side.lookups_fail(how_many)

    def never_ends(self) -> None:
        """Everything is free, many steps were made, and requests are still there."""
        self.watcher.never_ends()

    def expect_stored(self, name: str) -> None:
        """All of this request's prompt was computed: each whole chunk of it must be in the cache."""
        request = self.requests[name]
        keys, _ = self.side.server.keys(request.prompt_token_ids, request.num_prompt_tokens, request.cache_salt or "")
        missing = [number * self.options.chunk_size for number, key in enumerate(keys) if key not in self.cache]
        if missing:
            self.record.found(
                "LAB004", "not-stored", name, f"was computed, the chunks from tokens {missing} on are not stored"
            )

    def expect_forgotten(self, name: str) -> None:
        """This request ended long ago, and many have since: nobody knows its id any more."""
        for where, names in {**self.side.state(), **self.side.remembered()}.items():
            if name in names:
                self.record.tell(ev.Left(name, where))

    def expect_hit(self, name: str) -> None:
        """What this request asks for is in the cache: it must have been found."""
        if not self.watcher.hits.get(name):
            self.record.found("LAB006", "not-found", name, "is in the cache and was not found there")

    def expect_unharmed(self, name: str) -> None:
        """No load of this request's own failed: if it has ended, then with an answer."""
        status = self.requests[name].status
        if status == RequestStatus.FINISHED_ERROR:
            self.record.found("LAB005", "harmed-by-others", name, f"ended as {status.name}")

    def evict(self, chunks: int, forced: bool = False) -> None:
        """The cache drops its oldest chunks; `forced`: also those that a lookup has pinned, as when a pin times out."""
        gone = self.cache.evict(chunks, forced)
        self.counts["evicted_pinned" if forced else "evicted"] += gone
        if gone and forced:
            self.watcher.may_fail.add("")

    def slow_lookups(self, steps: int) -> None:
        """Asynchronous lookups made from now on are answered so many steps later than they could be."""
        self.side.lookups.engine.delay = steps

    def wait(self, seconds: float) -> None:
        """So much time passes for asynchronous lookups, which give up after `lookup_timeout_ms`."""
        self.side.lookups.wait(seconds)

    def step(self) -> None:
        """One iteration of EngineCore: schedule, load, compute, store, sample, update."""
        self.record.steps += 1
        self.record.seconds += STEP
        self.side.tick()
        output = self._guard("schedule", "", self.scheduler.schedule)
        metadata = output.kv_connector_metadata
        if self.beside is not None:
            metadata = metadata.metadata[1]
        scheduled: dict[str, int] = output.num_scheduled_tokens
        self.watcher.preempted()
        self.watcher.scheduled(output, metadata)
        forward = output.total_num_scheduled_tokens > 0
        self.counts["full_steps"] += not self.free()
        self.counts["busy_steps"] += bool(self.side.busy())
        self.idle = 0 if forward or self.side.busy() else self.idle + 1
        self.model.batch.update(output)
        self._guard("start_load_kv", "", self.side.start_step, metadata, forward)
        self._load_beside()
        self._failed.append(self.side.failed_blocks())
        self.model.compute(scheduled, set().union(*self._failed))
        finish = (forward, output.finished_req_ids, self.options.save_last)
        sending, receiving, invalid = self._guard("wait_for_save", "", self.side.finish_step, *finish)
        report = KVConnectorOutput(finished_sending=sending, finished_recving=receiving, invalid_block_ids=invalid)
        self._answers.append((output, self.model.output(scheduled, report)))
        if self.options.async_scheduling and forward and len(self._answers) < 2:
            return
        self._guard("update_from_output", "", self.scheduler.update_from_output, *self._answers.popleft())
        self._failed.popleft()
        self.watcher.ended()
        self.watcher.stuck()

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
        self.watcher.left()

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
                self.model.fill(name, start, end)
                self.counts["loaded_beside"] += 1
            self.beside.loads.clear()

    def _unanswered(self) -> None:
        self.counts["lookups_unanswered"] += 1

    def _guard(self, where: str, name: str, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            self.record.tell(ev.Raised(name, where, f"{type(error).__name__}: {error}".rstrip(": ")))
            raise Died(str(error)) from error
