"""The lab's engine: vLLM's real scheduler, a real connector, and memory whose right contents the lab knows.

A schedule is a list of method calls on LabEngine or on its connector. Each call does what a client or another engine
would do, causes a fault, or checks an expectation. In this file, a step is one iteration of the engine.
"""

import sys
import time
from collections import deque
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from vllm.v1.core.sched import interface
from vllm.v1.request import RequestStatus

from kvfix import clock
from kvfix.ledger import Finding, liveness
from kvfix.ledger import events as ev
from kvfix.session import session
from kvfix_tools.lab.connectors.v1 import ADAPTER
from kvfix_tools.lab.engine import rules, vllm_objects
from kvfix_tools.lab.engine.kv_layout import kv_groups
from kvfix_tools.lab.engine.memory import Cache, Slots, SlotsOfShard
from kvfix_tools.lab.engine.model import Model
from kvfix_tools.lab.engine.request_events import Liveness, RequestEvents
from kvfix_tools.lab.engine.workers import Executor
from kvfix_tools.lab.options import KNOWN, OF_VLLM, Options

#: `run` ends after more than this many idle steps in a row. In the lab, each lookup and each load takes fewer steps.
IDLE = 64
#: Duration of a step, in seconds of the lab's own clock.
STEP = 0.1
#: {status of a request when it is aborted: SUFFIX of the counter aborted_SUFFIX that counts the abort}
_STATE = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
    RequestStatus.WAITING_FOR_REMOTE_KVS: "loading",
}


class EngineDied(Exception):
    """The scheduler or a worker has raised an exception that would end EngineCore."""


def side_class(options: Options) -> Any:
    side = "any_connector:AnyConnector" if options.any_connector else KNOWN[options.connector].side
    if options.real_server:
        side = "mp_real:RealMP"
    elif options.connector == "v1" and options.lmcache.get("use_layerwise"):
        side = "v1_layers:LayerwiseV1"
    elif options.connector == "v1" and options.lmcache.get("enable_async_loading"):
        side = "v1_async:AsyncV1"
    module, name = side.split(":")
    return getattr(import_module(f"kvfix_tools.lab.connectors.{module}"), name)


class LabEngine:
    """An engine that stops at its first exception. log: all events. requests: {id: request}. counts: see counts.py."""

    def __init__(self, options: Options, caches: list[Cache] | None = None) -> None:
        """Make an engine. caches: the caches of another engine, one for each rank. Default: new caches."""
        self.options = options
        self._faults_before = dict(session.faults)
        self.groups = kv_groups(options)
        kind = partial(SlotsOfShard, options.ranks) if options.context else Slots
        room = options.num_blocks, options.block_size, self.groups[-1].block_size
        memories = [kind(*room, rank) for rank in range(options.ranks)]
        #: The cache of each rank. With a multi-process connector, all ranks use the first cache.
        self.caches = caches or [Cache() for _ in memories]
        self.slots, self.cache = memories[0], self.caches[0]
        for name in ("lmcache.integration.vllm.utils", ADAPTER):
            if hasattr(sys.modules.get(name), "_config_instance"):  # drop the configuration that LMCache keeps
                vars(sys.modules[name])["_config_instance"] = None
        self.connector: Any = self._connected(options, memories)
        self.workers = self.connector.workers
        self.scheduler = self.connector.scheduler
        self.model = Model(self.scheduler, memories, options, self.groups)
        self.liveness = Liveness(self.scheduler)
        self.request_events = events = RequestEvents(self.scheduler, self.connector, self.model, options)
        self.executor = Executor(self.scheduler.connector, options.ranks, events.counts)
        self.connector.listen(events)
        events.wrap_hooks(self.connector.in_scheduler)
        self.requests, self.log, self.counts = self.model.requests, events.log, events.counts
        clock.now = lambda: events.seconds  # the fixes read this clock
        #: Number of steps in a row that scheduled no tokens and had no transfer or lookup in flight.
        self.idle = 0
        #: _answers: (scheduler output, model output) of each step whose model output the scheduler does not have yet.
        #: _failed: for each step in _answers, the blocks whose load failed in this step.
        self._answers: deque[tuple[Any, Any]] = deque()
        self._failed: deque[set[int]] = deque()
        #: Blocks that `take_blocks` has taken.
        self._held: list[Any] = []

    def _connected(self, options: Options, memories: list[Slots]) -> Any:
        return side_class(options)(options, memories, self.caches)

    def answered(self, outputs: Any) -> None:
        """Do nothing. `PairEngine` overrides this method to get the outputs that a real engine sends to its clients."""

    @property
    def steps(self) -> int:
        return self.request_events.steps

    @property
    def findings(self) -> list[Finding]:
        """Return all findings, including errors of kvfix itself. In production, kvfix only logs its own errors."""
        events = self.request_events
        went_wrong = [kind for kind, times in session.faults.items() if times > self._faults_before.get(kind, 0)]
        return events.findings + [events.finding(rules.FAULT_OF_KVFIX, "", kind) for kind in went_wrong]

    def close(self) -> None:
        self.connector.close()

    def free(self) -> int:
        """Return the number of free blocks, including blocks with a cached prefix."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def iterate(self) -> None:
        """Make one step: schedule, load, compute, store, sample, and update the scheduler, in this order."""
        connector, events = self.connector, self.request_events
        events.steps += 1
        events.seconds += STEP
        connector.tick()
        self.liveness.begin()
        output = self._guard("schedule", "", self.scheduler.schedule)
        metadata = output.kv_connector_metadata
        scheduled: dict[str, int] = output.num_scheduled_tokens
        events.preempted()
        self.model.drafter.begin(output)
        events.scheduled(output, connector.metadata(metadata))
        forward = output.total_num_scheduled_tokens > 0
        self.counts["full_steps"] += not self.free()
        self.counts["busy_steps"] += bool(connector.busy())
        self.idle = 0 if forward or connector.busy() else self.idle + 1
        for group in self.model.groups:
            group.begin(output)
        connector.exchange()
        for worker, of_rank in zip(self.workers, self.executor.handed_out(metadata), strict=True):
            self._guard("start_load_kv", "", worker.start_step, of_rank, forward)
        if connector.other is not None:  # the lab writes the KV that the MultiConnector's other connector loads
            for name, span in connector.other.loads.items():
                self.model.fill(name, *span)
            self.counts["loaded_beside"] += len(connector.other.loads)
            connector.other.loads.clear()
        self._failed.append(set().union(*(worker.failed_blocks() for worker in self.workers)))
        for name, message in self.model.compute(output, set().union(*self._failed)):
            connector.reads_wrong(name, message)
        end = forward, output.finished_req_ids, self.options.save_last
        reports = [self._guard("wait_for_save", "", worker.finish_step, *end) for worker in self.workers]
        self._answers.append((output, self.executor.answer(self.model.output(scheduled), reports)))
        in_flight = len(self._answers)
        self.counts["steps_ahead"] += in_flight > 1
        self.counts["steps_in_flight"] += in_flight > 2
        goes_on = forward or (self.options.pipeline and self.scheduler.has_requests())
        if goes_on and in_flight < self.options.steps_in_flight:
            return  # like step_with_batch_queue (core.py 0.32.0:754), schedule the next step before taking this output
        self._take_answer()
        while self._answers and not self.scheduler.has_requests():
            self._take_answer()
        self.model.take_input()
        if self.options.drafter and forward and not self.options.async_scheduling:
            # as EngineCore.post_step does; with asynchronous scheduling the drafts stay in the worker
            self.scheduler.update_draft_token_ids(self.model.drafter.take())
        events.ended()
        events.stuck()
        self._check_liveness(forward)

    def _take_answer(self) -> None:
        answer = self._answers.popleft()
        self.answered(self._guard("update_from_output", "", self.scheduler.update_from_output, *answer))
        self._failed.popleft()

    def _check_liveness(self, forward: bool) -> None:
        """Report LAB009 if no request can progress. Blocks in `_held` and steps without output count as in flight."""
        paused = bool(getattr(self.scheduler, "pause_state", 0))  # vLLM 0.15 cannot pause
        idle = paused or not self.scheduler.has_unfinished_requests()
        if forward or idle or self.connector.busy():
            self.request_events.stands_still(None)
            return
        in_flight = len(self._answers) + len(self._held)
        state = self.liveness.state(in_flight, self.request_events.undecided, len(self.connector.looking()))
        answer = liveness.can_move(state)
        self.counts["looked_for_standstill"] += 1
        offloads = bool(self.options.offloading) or self.options.connector in OF_VLLM
        may_lock_out = answer.verdict == "violated" and offloads
        locking_out = self.liveness.session_with_blocks() if may_lock_out else ""
        if locking_out:  # with offloading, KVF219 does not end this deadlock between a session and a request
            self.counts["locked_out_by_session"] += 1
            self.abort(locking_out)
        else:
            self.request_events.stands_still(answer)

    def _guard(self, where: str, name: str, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            self.request_events.add(ev.Raised(name, where, f"{type(error).__name__}: {error}".rstrip(": ")))
            raise EngineDied(str(error)) from error

    def abort(self, name: str) -> None:
        """Abort this request, as vLLM does if the client disconnects."""
        request = self.requests[name]
        doing = {_STATE[request.status], *self.connector.in_flight(name)} if request.status in _STATE else set()
        self._guard("finish_requests", name, self.scheduler.finish_requests, name, RequestStatus.FINISHED_ABORTED)
        if request.is_finished():
            self.request_events.aborted(name, doing)

    def do(self, step: str, *arguments: Any, **keywords: Any) -> None:
        """Call the engine's method `step`. If the engine has no such method, call the connector's method."""
        getattr(self if hasattr(self, step) else self.connector, step)(*arguments, **keywords)

    # ------------------------------------------------------------------ requests

    def admit(self, name: str, prompt: list[int] | None, max_tokens: int = 1, **more: Any) -> None:
        """Admit a new request. more: other arguments of vllm_objects.request."""
        request = vllm_objects.request(self.options, name, prompt, max_tokens, **more)
        self.counts["ids_used_again"] += name in self.requests
        self.model.admit(name, request)
        self.request_events.admitted(name)
        self._guard("add_request", name, self.scheduler.add_request, request)

    def add_input(self, name: str, prompt: list[int], max_tokens: int = 1) -> None:
        """Give more input to a session. A session is a request that was admitted with `resumable=True`."""
        self.counts["inputs"] += 1
        more = vllm_objects.request(self.options, name, prompt, max_tokens, resumable=True)
        self._guard("add_request", name, self.scheduler.add_request, more)
        self.model.take_input()

    def serve(self, name: str, prompt: list[int] | None, max_tokens: int = 1, **more: Any) -> None:
        """Admit a new request, and run the engine until it has no work."""
        self.admit(name, prompt, max_tokens, **more)
        self.run()

    def store(self, name: str, prompt: list[int], max_tokens: int = 1, **more: Any) -> None:
        """Run a request to its end, so that its prompt is stored. Then empty vLLM's own prefix cache."""
        self.serve(name, prompt, max_tokens, **more)
        self.reset_prefix_cache()

    def end_input(self, name: str) -> None:
        """End the input of a session. A session that waits for input ends at once."""
        self._guard("add_request", name, self.scheduler.add_request, vllm_objects.request(self.options, name, [1], 1))
        if self.requests[name].is_finished():
            self.request_events.check_text(name)
            self.request_events.aborted(name, set())

    def pause(self, everything: bool = False) -> None:
        """Start no new request until `unpause` (EngineCore.pause_scheduler). everything: schedule no request at all."""
        self.counts["pauses"] += 1
        states = interface.PauseState
        self.scheduler.set_pause_state(states.PAUSED_ALL if everything else states.PAUSED_NEW)

    def unpause(self) -> None:
        self.scheduler.set_pause_state(interface.PauseState.UNPAUSED)

    def is_free(self, name: str) -> bool:
        """Return True if the id is unused, or if scheduler and worker know that the request with this id has ended."""
        known = self.requests.get(name)
        if known is None or any(name in output.num_scheduled_tokens for output, _ in self._answers):
            return known is None
        return known.is_finished() and name not in self.scheduler.requests and not self.scheduler.finished_req_ids

    def preempt(self, name: str) -> None:
        """Preempt this running request, as vLLM does when an earlier request needs a block."""
        request = self.requests[name]
        self.scheduler.running.remove(request)
        vllm_objects.preempt(self.scheduler, request, time.monotonic())
        self.scheduler.prev_step_scheduled_req_ids.discard(name)  # as vLLM does when it preempts between two steps
        self.request_events.preempted()

    # ------------------------------------------------------------------ memory

    def budget(self, tokens: int) -> None:
        """Limit the scheduled tokens of each later step."""
        self.scheduler.max_num_scheduled_tokens = tokens

    def keep_blocks(self, how_many: int) -> None:
        """Take blocks until `how_many` are free. The pool hands out the last blocks of a cached prefix first."""
        self.take_blocks(self.free() - how_many)

    def take_blocks(self, how_many: int) -> None:
        """Take at most `how_many` free blocks and write garbage to these blocks. `free_blocks` frees the blocks."""
        pool = self.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(min(how_many, self.free()))
        numbers = [block.block_id for block in taken]
        self.model.written_by_others += numbers
        if self.connector.offloading is not None:
            self.connector.offloading.others_take(numbers)
        self._held += taken

    def free_blocks(self) -> None:
        self.scheduler.kv_cache_manager.block_pool.free_blocks(self._held)
        self._held, self.model.written_by_others = [], []

    def reset_prefix_cache(self, running: bool = False) -> None:
        """Reset vLLM's prefix cache, if no blocks are in use. running: preempt the running requests first."""
        self.counts["resets"] += 1
        self.counts["resets_while_running"] += bool(running and self.scheduler.running)
        _ = self._reset(True) if running else self._reset()

    def new_weights(self) -> None:
        """Reset the caches of vLLM and of the connector. If the reset succeeds, change the model's weights."""
        self.counts["connector_resets"] += 1
        if self._reset(True, True):
            self.model.change_weights()

    def _reset(self, *running_and_connector: bool) -> bool:
        """Return True if the reset succeeds. vLLM raises if a waiting request has blocks (scheduler.py 0.32.0:2870)."""
        done = False
        with suppress(RuntimeError):
            done = self.scheduler.reset_prefix_cache(*running_and_connector)
        self.request_events.preempted()
        return done

    def has_in_other_connector(self, name: str) -> None:
        """Let the other connector of a MultiConnector have the KV of this request."""
        self.connector.other.has.add(name)

    def evict(self, chunks: int, forced: bool = False, rank: int = 0) -> None:
        """Evict the oldest chunks. forced: pinned chunks too, as after pin timeouts. rank: rank of the cache (v1)."""
        evicted = self.connector.evict(self.caches[rank], chunks, forced)
        self.counts["evicted_pinned" if forced else "evicted"] += evicted
        if evicted and forced:
            self.request_events.may_fail.add("")

    # ------------------------------------------------------------------ faults

    def fail_load(self, name: str, after_chunks: int = 0, rank: int = 0) -> None:
        """Make the next load of this request in this rank fail after `after_chunks` chunks."""
        self.workers[rank].failing[name] = after_chunks
        self.request_events.may_fail.add(name)

    def lose_loads(self, *ranks: int) -> None:
        """Make a step in which the server does not answer these ranks (default: all), so that their loads fail."""
        self.request_events.may_fail.add("")
        for worker in self.workers:
            worker.unanswered = not ranks or worker.rank in ranks
        self.step()

    # ------------------------------------------------------------------ time

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.iterate()

    def run(self, steps: int = 1000) -> None:
        """Make steps until the engine has no work, or was idle for more than IDLE steps. Make at most `steps` steps."""
        self.idle = 0
        for _ in range(steps):
            if not self.scheduler.has_requests() or self.idle > IDLE:
                return
            self.step()

    def run_until_finished(self, name: str) -> None:
        while not self.requests[name].is_finished():
            self.step()

    # ------------------------------------------------------------------ expectations

    def settle(self) -> None:
        """Make steps until no transfer is in flight. Then check that the connector keeps no state of ended requests."""
        self.step(2)
        for _ in range(IDLE):  # an ended request stays in `scheduler.requests` while a transfer uses its blocks
            if not self.scheduler.requests and not self.connector.busy():
                break
            self.step()
        self.request_events.leaked()
        self.connector.never_given_back()

    def expect_all_ended(self) -> bool:
        """Check that all requests have ended and the connector keeps no state. The caller makes steps first (`run`)."""
        # check each request, because a paused scheduler reports no unfinished requests
        if not all(request.is_finished() for request in self.requests.values()):
            self.request_events.never_end()
            return False
        self.settle()
        return True

    def expect_stored(self, name: str) -> None:
        """Check that the cache has each whole chunk of this request's prompt."""
        missing = self.connector.not_stored(self.requests[name])
        if missing:
            message = f"was computed, but its chunks that begin at tokens {missing} are not stored"
            self.request_events.violated(rules.NOT_STORED, name, message)

    def expect_hit(self, name: str) -> None:
        if not self.request_events.hits.get(name):
            self.request_events.violated(rules.NOT_FOUND, name, "is in the cache and was not found there")

    def expect_unharmed(self, name: str) -> None:
        """Check that this request did not end with an error because loads of other requests failed."""
        status = self.requests[name].status
        if status == RequestStatus.FINISHED_ERROR:
            self.request_events.violated(rules.HARMED_BY_OTHERS, name, f"ended as {status.name}")
