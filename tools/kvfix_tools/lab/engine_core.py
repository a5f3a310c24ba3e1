"""EngineCore of the lab: the real scheduler and connector over memory that knows what belongs in it, step by step.

Everything that happens to a request's tokens goes to the ledger as an event; what rules and memory find wrong is in
`findings`. An exception that leaves the scheduler ends it, as it ends EngineCore.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from typing import Any

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvfix import clock
from kvfix.ledger import Finding
from kvfix.ledger import events as ev
from kvfix.session import session
from kvfix_tools.lab import rules, vllm_objects
from kvfix_tools.lab.memory import Cache, Slots
from kvfix_tools.lab.model import Model
from kvfix_tools.lab.mp import MP
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.request_events import RequestEvents
from kvfix_tools.lab.run_log import RunLog
from kvfix_tools.lab.v1 import ADAPTER, V1
from kvfix_tools.lab.v1_async import AsyncV1

#: Seconds of the lab's time that a step takes.
STEP = 0.1


class EngineDied(Exception):
    """EngineCore would be dead: an exception left the scheduler."""


def _make_connector(options: Options, slots: Slots, cache: Cache) -> tuple[V1 | MP, Any]:
    """The connector with its scheduler, and the other one of a MultiConnector, or None."""
    _forget_configuration()
    if options.connector != "v1":
        return MP(options, slots, cache), None
    scheduler = vllm_objects.scheduler(options, vllm_objects.vllm_config(options))
    other, connector = scheduler.connector._connectors if options.beside else (None, scheduler.connector)
    kind = AsyncV1 if options.lmcache.get("enable_async_loading") else V1
    return kind(scheduler, connector, slots, cache), other


def _forget_configuration() -> None:
    """LMCache keeps one configuration per process; the next connector is to read its own."""
    for name in ("lmcache.integration.vllm.utils", ADAPTER):
        if name in sys.modules and hasattr(sys.modules[name], "_config_instance"):
            sys.modules[name]._config_instance = None  # type: ignore[attr-defined]


class EngineCore:
    """What has happened is in `log`, `findings` and `counts`; see run_log.py."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._faults_before = dict(session.faults)
        self.slots = Slots(options.num_blocks, options.block_size)
        self.cache = Cache()
        self.connector: Any
        self.connector, self.other_connector = _make_connector(options, self.slots, self.cache)
        self.scheduler = self.connector.scheduler
        self.run_log = RunLog()
        self.model = Model(self.scheduler, self.slots, self.run_log)
        self.request_events = RequestEvents(self.scheduler, self.connector, self.model, self.run_log)
        self.connector.listen(self.request_events)
        self.request_events.wrap_hooks(self.connector.in_scheduler)
        clock.now = lambda: self.run_log.seconds  # what fixes go by
        #: Steps in a row in which nothing was scheduled and no transfer was in flight.
        self.idle = 0
        #: Steps whose answer the scheduler has not been given, and the blocks whose load has failed in them.
        self._answers: deque[tuple[Any, Any]] = deque()
        self._failed: deque[set[int]] = deque()

    @property
    def requests(self) -> dict[str, Request]:
        """All that were admitted, by name."""
        return self.model.requests

    @property
    def log(self) -> list[tuple[int, ev.Event]]:
        """All that happened: (step, event)."""
        return self.run_log.events

    @property
    def findings(self) -> list[Finding]:
        """With what has gone wrong in kvfix itself meanwhile: an engine goes on without the fix."""
        went_wrong = [kind for kind, times in session.faults.items() if times > self._faults_before.get(kind, 0)]
        return self.run_log.findings + [self.run_log.finding(rules.FAULT_OF_KVFIX, "", kind) for kind in went_wrong]

    @property
    def counts(self) -> Counter[str]:
        return self.run_log.counts

    @property
    def steps(self) -> int:
        return self.run_log.steps

    def free(self) -> int:
        """Free blocks, those that hold a cached prefix among them."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def iterate(self) -> None:
        """One iteration: schedule, load, compute, store, sample, update."""
        self.run_log.steps += 1
        self.run_log.seconds += STEP
        self.connector.tick()
        output = self.guard("schedule", "", self.scheduler.schedule)
        metadata = output.kv_connector_metadata
        if self.other_connector is not None:
            metadata = metadata.metadata[1]
        scheduled: dict[str, int] = output.num_scheduled_tokens
        self.request_events.preempted()
        self.request_events.scheduled(output, metadata)
        forward = output.total_num_scheduled_tokens > 0
        self.counts["full_steps"] += not self.free()
        self.counts["busy_steps"] += bool(self.connector.busy())
        self.idle = 0 if forward or self.connector.busy() else self.idle + 1
        self.model.block_table.update(output)
        self.guard("start_load_kv", "", self.connector.start_step, metadata, forward)
        self._load_from_other_connector()
        self._failed.append(self.connector.failed_blocks())
        self.model.compute(scheduled, set().union(*self._failed))
        finish = (forward, output.finished_req_ids, self.options.save_last)
        sending, receiving, invalid = self.guard("wait_for_save", "", self.connector.finish_step, *finish)
        report = KVConnectorOutput(finished_sending=sending, finished_recving=receiving, invalid_block_ids=invalid)
        self._answers.append((output, self.model.output(scheduled, report)))
        if self.options.async_scheduling and forward and len(self._answers) < 2:
            return
        self.guard("update_from_output", "", self.scheduler.update_from_output, *self._answers.popleft())
        self._failed.popleft()
        self.request_events.ended()
        self.request_events.stuck()

    def _load_from_other_connector(self) -> None:
        """What the other connector was granted is in its slots before the step reads them."""
        if self.other_connector is not None:
            for name, (start, end) in self.other_connector.loads.items():
                self.model.fill(name, start, end)
                self.counts["loaded_beside"] += 1
            self.other_connector.loads.clear()

    def guard(self, where: str, name: str, function: Any, *args: Any) -> Any:
        """Call it for this request; EngineDied if it raises."""
        try:
            return function(*args)
        except Exception as error:
            self.run_log.add(ev.Raised(name, where, f"{type(error).__name__}: {error}".rstrip(": ")))
            raise EngineDied(str(error)) from error
