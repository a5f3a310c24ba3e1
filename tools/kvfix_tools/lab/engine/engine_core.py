"""The core of the lab's engine: real scheduler and connector, with memory that knows the right content of each slot."""

import sys
from collections import deque
from functools import partial
from importlib import import_module
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kvfix import clock
from kvfix.engine_state.scheduler import QUEUES
from kvfix.ledger import Finding, liveness
from kvfix.ledger import events as ev
from kvfix.ledger.liveness import OUTSIDE_STATUSES
from kvfix.session import session
from kvfix_tools.lab.connectors.v1 import ADAPTER
from kvfix_tools.lab.engine import rules
from kvfix_tools.lab.engine.kv_layout import kv_groups
from kvfix_tools.lab.engine.memory import Cache, Slots, SlotsOfShard
from kvfix_tools.lab.engine.model import Model
from kvfix_tools.lab.engine.request_events import RequestEvents
from kvfix_tools.lab.engine.workers import Executor
from kvfix_tools.lab.options import KNOWN, OF_VLLM, Options

#: Seconds of the lab's time that a step takes.
STEP = 0.1
#: {status of an aborted request: counter}
_STATE = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
    RequestStatus.WAITING_FOR_REMOTE_KVS: "loading",
}


class EngineDied(Exception):
    """An exception has left the scheduler: EngineCore would be dead."""


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


class Liveness:
    """Makes a state for `liveness.can_move` from the scheduler, after a step without any tokens."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = manager = scheduler.kv_cache_manager
        coordinator: Any = manager.coordinator
        allocate, count = manager.allocate_slots, coordinator.get_num_blocks_to_allocate
        #: vLLM's last count of needed blocks; True: for the whole request (kv_cache_manager.py 0.32.0:499, 540).
        self._counted = (0, False)
        #: The request that the scheduler found no blocks for, and how many blocks it needs.
        self._refused: tuple[Any, int] = (None, 0)

        def get_num_blocks_to_allocate(*args: Any, **more: Any) -> Any:
            number = count(*args, **more)
            self._counted = number, more.get("apply_admission_cap", False)
            return number

        def allocate_slots(request: Any, *args: Any, **more: Any) -> Any:
            blocks = allocate(request, *args, **more)
            if blocks is None:
                number, whole = self._counted
                self._refused = request, number + (0 if whole else more.get("reserved_blocks", 0))
            return blocks

        coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate
        manager.allocate_slots = allocate_slots

    def begin(self) -> None:
        self._refused = (None, 0)

    def state(self, in_flight: int, undecided: set[str], lookups: int) -> liveness.State:
        """Return the state after a step that scheduled nothing.

        - in_flight: transfers, answers to steps, and blocks of `take_blocks`
        - undecided: requests whose promise is not known yet
        - lookups: lookups in flight
        """
        scheduler = self._scheduler
        queues = [getattr(scheduler, name) for name in QUEUES if hasattr(scheduler, name)]
        waiting = [self._waiting(request, undecided) for queue in queues for request in queue]
        ended = len(scheduler.requests) - len(waiting) - len(scheduler.running)  # kept until their stores have ended
        free = self._manager.block_pool.get_num_free_blocks()
        return liveness.State(tuple(waiting), free, len(scheduler.running), in_flight + ended, lookups)

    def session_with_blocks(self) -> str:
        """Return a session that keeps blocks while it waits for input or for more blocks, or ""."""
        names = (name for name, each in self._scheduler.requests.items() if getattr(each, "resumable", False))
        return next((name for name in names if any(self._manager.get_block_ids(name))), "")

    def _waiting(self, request: Any, undecided: set[str]) -> liveness.Waiting:
        name, status = request.request_id, request.status
        waits_for, sessions = liveness.PLACE, getattr(self._scheduler, "num_waiting_for_streaming_input", 0)
        if status == RequestStatus.WAITING_FOR_REMOTE_KVS and name not in self._scheduler.finished_recving_kv_req_ids:
            waits_for = liveness.LOAD
        elif status.name in OUTSIDE_STATUSES or 0 < sessions >= self._scheduler.max_num_active_reqs:
            waits_for = liveness.OUTSIDE  # vLLM admits no request if sessions that wait for input use all places
        elif name in undecided:
            waits_for = liveness.LOOKUP
        refused, needs = self._refused
        groups = self._manager.get_block_ids(name)
        held = sum(block != 0 for blocks in groups for block in blocks)  # block 0 replaces a freed block
        return liveness.Waiting(name, waits_for, needs if request is refused else None, held)


class EngineCore:
    """log: events. requests: all that arrived. counts: see counts.py. An exception of the scheduler ends the engine."""

    def __init__(self, options: Options, caches: list[Cache] | None = None) -> None:
        """caches: of another engine, by rank; None: new caches."""
        self.options = options
        self._faults_before = dict(session.faults)
        self.groups = kv_groups(options)
        kind = partial(SlotsOfShard, options.ranks) if options.context else Slots
        room = options.num_blocks, options.block_size, self.groups[-1].block_size
        memories = [kind(*room, rank) for rank in range(options.ranks)]
        #: By rank. The server of a multi-process connector has one cache for all ranks.
        self.caches = caches or [Cache() for _ in memories]
        self.slots, self.cache = memories[0], self.caches[0]
        for name in ("lmcache.integration.vllm.utils", ADAPTER):
            if hasattr(sys.modules.get(name), "_config_instance"):  # LMCache's configuration, one per process
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
        clock.now = lambda: events.seconds  # the clock of the fixes
        #: Steps in a row in which nothing was scheduled and no transfer was in flight.
        self.idle = 0
        #: Steps whose answers the scheduler does not have yet, and the blocks whose load failed in these steps.
        self._answers: deque[tuple[Any, Any]] = deque()
        self._failed: deque[set[int]] = deque()
        #: Blocks that `take_blocks` has taken.
        self._held: list[Any] = []

    def _connected(self, options: Options, memories: list[Slots]) -> Any:
        return side_class(options)(options, memories, self.caches)

    def answered(self, outputs: Any) -> None:
        """Called with the scheduler's outputs of a step, which an engine sends to its clients."""

    @property
    def steps(self) -> int:
        return self.request_events.steps

    @property
    def findings(self) -> list[Finding]:
        """All findings, including errors in kvfix itself, which an engine only logs."""
        events = self.request_events
        went_wrong = [kind for kind, times in session.faults.items() if times > self._faults_before.get(kind, 0)]
        return events.findings + [events.finding(rules.FAULT_OF_KVFIX, "", kind) for kind in went_wrong]

    def close(self) -> None:
        self.connector.close()

    def free(self) -> int:
        """Return the number of free blocks, including blocks with a cached prefix."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

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
        if connector.other is not None:  # its loads
            for name, span in connector.other.loads.items():
                self.model.fill(name, *span)
            self.counts["loaded_beside"] += len(connector.other.loads)
            connector.other.loads.clear()
        self._failed.append(set().union(*(worker.failed_blocks() for worker in self.workers)))
        for name, message in self.model.compute(output, set().union(*self._failed)):
            connector.reads_wrong(name, message)
        ended = output.finished_req_ids
        reports = [
            self._guard("wait_for_save", "", worker.finish_step, forward, ended, self.options.save_last)
            for worker in self.workers
        ]
        self._answers.append((output, self.executor.answer(self.model.output(scheduled), reports)))
        in_flight = len(self._answers)
        self.counts["steps_ahead"] += in_flight > 1
        self.counts["steps_in_flight"] += in_flight > 2
        goes_on = forward or (self.options.pipeline and self.scheduler.has_requests())
        if goes_on and in_flight < self.options.steps_in_flight:
            return  # EngineCore schedules again before an answer (step_with_batch_queue, core.py 0.32.0:754)
        self._take_answer()
        while self._answers and not self.scheduler.has_requests():
            self._take_answer()
        self.model.take_input()
        if self.options.drafter and forward and not self.options.async_scheduling:
            # EngineCore.post_step; with asynchronous scheduling the drafts stay in the worker
            self.scheduler.update_draft_token_ids(self.model.drafter.take())
        events.ended()
        events.stuck()
        self._check_liveness(forward)

    def _take_answer(self) -> None:
        answer = self._answers.popleft()
        self.answered(self._guard("update_from_output", "", self.scheduler.update_from_output, *answer))
        self._failed.popleft()

    def _check_liveness(self, forward: bool) -> None:
        """Report if no request can move (LAB009). Answers to steps, and taken blocks, count as in flight."""
        paused = bool(getattr(self.scheduler, "pause_state", 0))  # 0.15 has no pause
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
        if locking_out:  # KVF219 does not cover this connector; if the session's client disconnects, requests move
            self.counts["locked_out_by_session"] += 1
            self.abort(locking_out)
        else:
            self.request_events.stands_still(answer)

    def _guard(self, where: str, name: str, function: Any, *args: Any) -> Any:
        """Call the function for this request. Raises EngineDied if it raises."""
        try:
            return function(*args)
        except Exception as error:
            self.request_events.add(ev.Raised(name, where, f"{type(error).__name__}: {error}".rstrip(": ")))
            raise EngineDied(str(error)) from error

    def abort(self, name: str) -> None:
        """The client has disconnected."""
        request = self.requests[name]
        doing = {_STATE[request.status], *self.connector.in_flight(name)} if request.status in _STATE else set()
        self._guard("finish_requests", name, self.scheduler.finish_requests, name, RequestStatus.FINISHED_ABORTED)
        if request.is_finished():
            self.request_events.aborted(name, doing)
