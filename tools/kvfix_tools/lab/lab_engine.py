"""The lab's engine: the real scheduler and connector over memory that knows what belongs in it.

`iterate` is one iteration of EngineCore; `do` makes a step that a schedule names (steps.py). All that happens to a
request's tokens goes to the ledger as an event; what rules and memory find wrong is in `findings`. An exception that
leaves the scheduler ends the engine, as it ends EngineCore.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import suppress
from importlib import import_module
from typing import Any

from vllm.v1.core.sched import interface
from vllm.v1.request import RequestStatus

from kvfix import clock
from kvfix.ledger import Finding, liveness
from kvfix.ledger import events as ev
from kvfix.session import session
from kvfix_tools.lab import rules, vllm_objects
from kvfix_tools.lab.kv_groups import kv_groups
from kvfix_tools.lab.liveness import Liveness
from kvfix_tools.lab.memory import Cache, Slots, SlotsOfRank, SlotsOfShard
from kvfix_tools.lab.model import Model
from kvfix_tools.lab.mp import MP
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.request_events import RequestEvents
from kvfix_tools.lab.v1 import ADAPTER, V1
from kvfix_tools.lab.v1_async import AsyncV1
from kvfix_tools.lab.v1_layers import LayerwiseV1
from kvfix_tools.lab.workers import Executor

#: Seconds of the lab's time that a step takes.
STEP = 0.1
#: After so many steps in which nothing happened, nothing will: longer than any lookup or load of the lab takes.
IDLE = 64
#: What an aborted request was in, apart from its transfers.
_STATE = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
    RequestStatus.WAITING_FOR_REMOTE_KVS: "loading",
}


class EngineDied(Exception):
    """EngineCore would be dead: an exception left the scheduler."""


def _connector_class(options: Options) -> Any:
    if options.any_connector:
        return import_module("kvfix_tools.lab.any_connector").AnyConnector
    if options.real_server:
        return import_module("kvfix_tools.lab.mp_real").RealMP
    if options.connector == "offloading":
        return import_module("kvfix_tools.lab.offloading").OffloadingAlone
    if options.connector != "v1":
        return MP
    if options.lmcache.get("use_layerwise"):
        return LayerwiseV1
    return AsyncV1 if options.lmcache.get("enable_async_loading") else V1


def _forget_configuration() -> None:
    """LMCache keeps one configuration per process; the next connector is to read its own."""
    for name in ("lmcache.integration.vllm.utils", ADAPTER):
        if name in sys.modules and hasattr(sys.modules[name], "_config_instance"):
            sys.modules[name]._config_instance = None  # type: ignore[attr-defined]


class LabEngine:
    """`log` has the events, `requests` all that were admitted, `counts` what the run has done (request_events.py)."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._faults_before = dict(session.faults)
        self.groups = kv_groups(options)
        room = options.num_blocks, options.block_size, self.groups[-1].block_size
        memories: list[Slots] = [Slots(*room), *(SlotsOfRank(rank, *room) for rank in range(1, options.ranks))]
        if options.context:
            memories = [SlotsOfShard(rank, options.ranks, *room) for rank in range(options.ranks)]
        #: By rank. The server of a multi-process connector has one cache for all.
        self.caches = [Cache() for _ in memories]
        self.slots, self.cache = memories[0], self.caches[0]
        _forget_configuration()
        self.connector: Any = self._connected(options, memories)
        self.workers = self.connector.workers
        self.scheduler = self.connector.scheduler
        self.model = Model(self.scheduler, memories, options, self.groups)
        self.liveness = Liveness(self.scheduler)
        self.request_events = events = RequestEvents(self.scheduler, self.connector, self.model, options.ranks)
        self.executor = Executor(self.scheduler.connector, options.ranks, events.counts)
        self.connector.listen(events)
        events.wrap_hooks(self.connector.in_scheduler)
        self.requests, self.log, self.counts = self.model.requests, events.log, events.counts
        clock.now = lambda: events.seconds  # what fixes go by
        #: Steps in a row in which nothing was scheduled and no transfer was in flight.
        self.idle = 0
        #: Steps whose answer the scheduler has not been given, and the blocks whose load has failed in them.
        self._answers: deque[tuple[Any, Any]] = deque()
        self._failed: deque[set[int]] = deque()
        #: Blocks that others have taken.
        self._held: list[Any] = []

    def _connected(self, options: Options, memories: list[Slots]) -> Any:
        """The connector in both roles."""
        return _connector_class(options)(options, memories, self.caches)

    def answered(self, outputs: Any) -> None:
        """The scheduler's outputs of a step, which an engine sends to its clients."""

    @property
    def steps(self) -> int:
        return self.request_events.steps

    @property
    def findings(self) -> list[Finding]:
        """With what has gone wrong in kvfix itself meanwhile: an engine goes on without the fix."""
        events = self.request_events
        went_wrong = [kind for kind, times in session.faults.items() if times > self._faults_before.get(kind, 0)]
        return events.findings + [events.finding(rules.FAULT_OF_KVFIX, "", kind) for kind in went_wrong]

    def free(self) -> int:
        """Free blocks, those that hold a cached prefix among them."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    # ------------------------------------------------------------------ EngineCore

    def iterate(self) -> None:
        """One iteration: schedule, load, compute, store, sample, update."""
        connector, events = self.connector, self.request_events
        events.steps += 1
        events.seconds += STEP
        connector.tick()
        self.liveness.begin()
        output = self._guard("schedule", "", self.scheduler.schedule)
        metadata = output.kv_connector_metadata
        scheduled: dict[str, int] = output.num_scheduled_tokens
        events.preempted()
        self.model.begin(output)
        events.scheduled(output, connector.metadata(metadata))
        forward = output.total_num_scheduled_tokens > 0
        self.counts["full_steps"] += not self.free()
        self.counts["busy_steps"] += bool(connector.busy())
        self.idle = 0 if forward or connector.busy() else self.idle + 1
        self.model.step_begins(output)
        connector.exchange()
        for worker, of_rank in zip(self.workers, self.executor.handed_out(metadata), strict=True):
            self._guard("start_load_kv", "", worker.start_step, of_rank, forward)
        self._load_from_other_connector()
        self._failed.append(set().union(*(worker.failed_blocks() for worker in self.workers)))
        for name, message in self.model.compute(output, set().union(*self._failed)):
            connector.reads_wrong(name, message)
        ended = output.finished_req_ids
        reports = [
            self._guard("wait_for_save", "", worker.finish_step, forward, ended, self.options.save_last)
            for worker in self.workers
        ]
        self._answers.append((output, self.executor.answer(self.model.output(scheduled), reports)))
        if self._may_schedule_another(forward):
            return
        self._take_answer()
        while self._answers and not self.scheduler.has_requests():
            self._take_answer()
        self.model.take_input()
        self._take_drafts(forward)
        events.ended()
        events.stuck()
        self._look_whether_it_stands_still(forward)

    def _may_schedule_another(self, forward: bool) -> bool:
        """Whether EngineCore schedules a step before it takes an answer (step_with_batch_queue, core.py 0.32.0:754)."""
        in_flight = len(self._answers)
        self.counts["steps_in_flight"] += in_flight > 2
        more = forward or (self.options.pipeline and self.scheduler.has_requests())
        return more and in_flight < self.options.steps_in_flight

    def _take_answer(self) -> None:
        self.answered(
            self._guard("update_from_output", "", self.scheduler.update_from_output, *self._answers.popleft())
        )
        self._failed.popleft()

    def _look_whether_it_stands_still(self, forward: bool) -> None:
        """Nothing can move (LAB009). What is owed: answers to steps, and the blocks of others, which come free."""
        paused = bool(getattr(self.scheduler, "pause_state", 0))  # 0.15 has no pause
        idle = paused or not self.scheduler.has_unfinished_requests()
        if forward or idle or self.connector.busy():
            self.request_events.stands_still(None)
            return
        owed = len(self._answers) + len(self._held)
        state = self.liveness.state(owed, self.request_events.undecided, len(self.connector.looking()))
        answer = liveness.can_move(state)
        offloads = bool(self.options.offloading) or self.options.connector == "offloading"
        may_lock_out = answer.verdict == "violated" and offloads
        locking_out = self.liveness.session_with_blocks() if may_lock_out else ""
        if locking_out:  # KVF219 is not for that connector: it goes on when the session's client goes away
            self.counts["locked_out_by_session"] += 1
            self.abort(locking_out)
        else:
            self.request_events.stands_still(answer)

    def _load_from_other_connector(self) -> None:
        """What the other connector was granted is in its slots before the step reads them."""
        if self.connector.other is not None:
            for name, (start, end) in self.connector.other.loads.items():
                self.model.fill(name, start, end)
                self.counts["loaded_beside"] += 1
            self.connector.other.loads.clear()

    def _take_drafts(self, forward: bool) -> None:
        """EngineCore.post_step: with asynchronous scheduling the drafts stay in the worker."""
        if self.model.drafter is not None and forward and not self.options.async_scheduling:
            self.scheduler.update_draft_token_ids(self.model.drafter.take())

    def _guard(self, where: str, name: str, function: Any, *args: Any) -> Any:
        """Call it for this request; EngineDied if it raises."""
        try:
            return function(*args)
        except Exception as error:
            self.request_events.add(ev.Raised(name, where, f"{type(error).__name__}: {error}".rstrip(": ")))
            raise EngineDied(str(error)) from error

    # ------------------------------------------------------------------ steps

    def do(self, step: str, *arguments: Any, **keywords: Any) -> None:
        """The step of this name: a method below, or one of the connector where it is about its server or lookups."""
        getattr(self if hasattr(self, step) else self.connector, step)(*arguments, **keywords)

    def admit(self, name: str, prompt: list[int] | None, max_tokens: int = 1, **more: Any) -> None:
        """A request arrives. more: of vllm_objects.request."""
        request = vllm_objects.request(self.options, name, prompt, max_tokens, **more)
        self.counts["ids_used_again"] += name in self.requests
        self.model.admit(name, request)
        self.request_events.admitted(name)
        self._guard("add_request", name, self.scheduler.add_request, request)

    def add_input(self, name: str, prompt: list[int], max_tokens: int = 1) -> None:
        """More input for a session, a request that was admitted as `resumable`."""
        self.counts["inputs"] += 1
        more = vllm_objects.request(self.options, name, prompt, max_tokens, resumable=True)
        self._guard("add_request", name, self.scheduler.add_request, more)
        self.model.take_input()

    def end_input(self, name: str) -> None:
        """A session gets no more input: it ends, at once if it waits for some."""
        self._guard("add_request", name, self.scheduler.add_request, vllm_objects.request(self.options, name, [1], 1))
        if self.requests[name].is_finished():
            self.request_events.aborted(name, set())

    def pause(self, everything: bool = False) -> None:
        """No new request is scheduled, or none at all (`pause_scheduler` of EngineCore), until `unpause`."""
        self.counts["pauses"] += 1
        states = interface.PauseState
        self.scheduler.set_pause_state(states.PAUSED_ALL if everything else states.PAUSED_NEW)

    def unpause(self) -> None:
        """Requests are scheduled again."""
        self.scheduler.set_pause_state(interface.PauseState.UNPAUSED)

    def is_free(self, name: str) -> bool:
        """Whether a request of this id may arrive: none has, or it has ended, scheduler and worker know it, and no step
        of it is in flight."""
        known = self.requests.get(name)
        if known is None:
            return True
        if any(name in output.num_scheduled_tokens for output, _ in self._answers):
            return False
        return known.is_finished() and name not in self.scheduler.requests and not self.scheduler.finished_req_ids

    def abort(self, name: str) -> None:
        """The client has disconnected."""
        request = self.requests[name]
        doing = {_STATE[request.status], *self.connector.in_flight(name)} if request.status in _STATE else set()
        self._guard("finish_requests", name, self.scheduler.finish_requests, name, RequestStatus.FINISHED_ABORTED)
        if request.is_finished():
            self.request_events.aborted(name, doing)

    def preempt(self, name: str) -> None:
        """vLLM takes the blocks of this running request, as it does when one before it needs a block."""
        request = self.requests[name]
        self.scheduler.running.remove(request)
        vllm_objects.preempt(self.scheduler, request, time.monotonic())
        self.scheduler.prev_step_scheduled_req_ids.discard(name)  # as vLLM does where it preempts between steps
        self.request_events.preempted()

    def budget(self, tokens: int) -> None:
        """From the next step on, at most so many tokens are scheduled in one."""
        self.scheduler.max_num_scheduled_tokens = tokens

    def keep_blocks(self, how_many: int) -> None:
        """Others take all free blocks but so many; a cached prefix loses its end first."""
        self.take_blocks(self.free() - how_many)

    def take_blocks(self, how_many: int) -> None:
        """Others take so many of the free blocks and write to them, until `free_blocks`."""
        pool = self.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(min(how_many, self.free()))
        numbers = [block.block_id for block in taken]
        self.model.written_by_others += numbers
        if self.connector.offloading is not None:
            self.connector.offloading.taken.update(numbers)
        self._held += taken

    def free_blocks(self) -> None:
        """The blocks of `take_blocks` come free."""
        self.scheduler.kv_cache_manager.block_pool.free_blocks(self._held)
        self._held, self.model.written_by_others = [], []

    def reset_prefix_cache(self) -> None:
        """vLLM forgets its own prefix cache, if no blocks are in use."""
        self.counts["resets"] += 1
        self.scheduler.reset_prefix_cache()

    def new_weights(self) -> None:
        """The weights change, and vLLM is to forget all KV, the connector's too; the weights stay where it says no.

        It raises if a request that does not run holds blocks (scheduler.py 0.32.0:2874-2880): its caller gets that.
        """
        self.counts["connector_resets"] += 1
        done = False
        with suppress(RuntimeError):
            done = self.scheduler.reset_prefix_cache(True, True)
        self.request_events.preempted()
        if done:
            self.model.change_weights()

    def has_in_other_connector(self, name: str) -> None:
        """The other connector of a MultiConnector has the KV of this request."""
        self.connector.other.has.add(name)

    def evict(self, chunks: int, forced: bool = False, rank: int = 0) -> None:
        """The cache drops its oldest chunks; `forced`: also those that a lookup has pinned, as when a pin times out.

        In process each rank has its own cache.
        """
        evicted = self.connector.evict(self.caches[rank], chunks, forced)
        self.counts["evicted_pinned" if forced else "evicted"] += evicted
        if evicted and forced:
            self.request_events.may_fail.add("")

    def fail_load(self, name: str, after_chunks: int = 0, rank: int = 0) -> None:
        """The next load of this request brings only so many chunks, in this rank."""
        self.workers[rank].failing[name] = after_chunks
        self.request_events.may_fail.add(name)

    def lose_loads(self, *ranks: int) -> None:
        """A step in which workers of a multi-process connector get no answer from the server: their loads fail.

        ranks: of these workers; by default all.
        """
        self.request_events.may_fail.add("")
        for worker in self.workers:
            worker.unanswered = not ranks or worker.rank in ranks
        self.step()

    def step(self, times: int = 1) -> None:
        """So many iterations of EngineCore."""
        for _ in range(times):
            self.iterate()

    def run(self, steps: int = 1000) -> None:
        """Step until nothing is to be done, at most so often; or until nothing has happened for IDLE steps."""
        self.idle = 0
        for _ in range(steps):
            if not self.scheduler.has_requests() or self.idle > IDLE:
                return
            self.step()

    def run_until_finished(self, name: str) -> None:
        """Step until this request has ended."""
        while not self.requests[name].is_finished():
            self.step()

    def settle(self) -> None:
        """All requests have ended: two more steps let the connector clean up, then nothing may be kept of them."""
        self.step(2)
        for _ in range(IDLE):  # a transfer in flight holds its blocks
            if not self.scheduler.requests and not self.connector.busy():
                break
            self.step()
        self.request_events.leaked()
        self.connector.never_given_back()

    def expect_all_ended(self) -> bool:
        """All is free, many steps were made: every request has ended, and nothing is kept of it."""
        if self.scheduler.has_unfinished_requests():
            self.request_events.never_end()
            return False
        self.settle()
        return True

    def expect_stored(self, name: str) -> None:
        """All of this request's prompt was computed: each whole chunk of it must be in the cache."""
        missing = self.connector.not_stored(self.requests[name])
        if missing:
            message = f"was computed, the chunks from tokens {missing} on are not stored"
            self.request_events.violated(rules.NOT_STORED, name, message)

    def expect_forgotten(self, name: str) -> None:
        """This request ended long ago, and many have since: nothing is kept of it."""
        for where, names in {**self.connector.kept(), **self.connector.kept_for_a_while()}.items():
            if name in names:
                self.request_events.add(ev.Left(name, where))

    def expect_hit(self, name: str) -> None:
        """What this request asks for is in the cache: it must have been found."""
        if not self.request_events.hits.get(name):
            self.request_events.violated(rules.NOT_FOUND, name, "is in the cache and was not found there")

    def expect_unharmed(self, name: str) -> None:
        """No load of this request's own failed: if it has ended, then with an answer."""
        status = self.requests[name].status
        if status == RequestStatus.FINISHED_ERROR:
            self.request_events.violated(rules.HARMED_BY_OTHERS, name, f"ended as {status.name}")
