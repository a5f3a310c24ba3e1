"""Define the class of each engine in a pair, and base classes for the pair, its connectors and its network."""

import functools
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from unittest import mock

from kvfix import clock
from kvfix.connector_events import readers
from kvfix.ledger import Finding
from kvfix.ledger.events import Event
from kvfix.wrapping import WrappedFunction
from kvfix_tools.lab.connectors.connector import Connector
from kvfix_tools.lab.engine import vllm_objects
from kvfix_tools.lab.engine.lab_engine import STEP, LabEngine, side_class
from kvfix_tools.lab.engine.memory import Slots
from kvfix_tools.lab.engine.request_events import RequestEvents
from kvfix_tools.lab.engine.workers import Worker
from kvfix_tools.lab.fuzz.parameters import Params
from kvfix_tools.lab.options import Options

if TYPE_CHECKING:
    from kvfix_tools.lab.pair.pair import Pair


class Engines:
    """Combines the results of two engines, with the interface of LabEngine. gone: engines that a restart replaced."""

    engines: Sequence[LabEngine]
    gone: Sequence[LabEngine] = ()

    @property
    def steps(self) -> int:
        return sum(engine.steps for engine in (*self.gone, *self.engines))

    @property
    def findings(self) -> list[Finding]:
        return [found for engine in (*self.gone, *self.engines) for found in engine.findings]

    @property
    def log(self) -> list[tuple[int, Event]]:
        return [entry for engine in (*self.gone, *self.engines) for entry in engine.log]

    @property
    def counts(self) -> Counter[str]:
        return sum((Counter(engine.counts) for engine in (*self.gone, *self.engines)), Counter[str]())

    def close(self) -> None:
        for engine in self.engines:
            engine.connector.close()


class PairNetwork:
    """The messages and transfers in flight between two engines. delay: how many steps a transfer takes."""

    #: `Pair.add`, which records a lease event in the ledger that both engines share.
    add: Callable[[Event], None]

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.now = 0
        self.counts: Counter[str] = Counter()
        #: Addresses whose listener thread has died.
        self.dead_listeners: list[str] = []
        #: {kind of operation: how many of the next operations of this kind fail}. setup: preparing a transfer.
        self.failing = {"transfer": 0, "handshake": 0, "setup": 0, "notice": 0}
        #: How many steps a handshake or a message takes.
        self.handshake_steps = 1
        #: How many steps pass between the wake-up of a writer thread and its work.
        self.writers_take = 0

    def fails(self, what: str) -> bool:
        fails = self.failing[what] > 0
        self.failing[what] -= fails
        return fails


class PairSide(Connector):
    """The scheduler and worker roles of one engine's connector. name: host name. engine_id: new at each start."""

    worker_class: Any
    #: The scheduler part (`connector_scheduler`) of the connector that joins the two engines.
    scheduler_side: Any

    def __init__(self, options: Options, memories: Sequence[Slots], network: Any, name: str, engine_id: str) -> None:
        self.network, self.name, self.engine_id = network, name, engine_id
        self.join()
        self._make(options, memories)

    @abstractmethod
    def join(self) -> None:
        """Replace the connector's real communication by `network`. `__init__` calls `join` before `_make`."""

    def _make(self, options: Options, memories: Sequence[Slots]) -> None:
        config = self.configured(options)
        self.scheduler = vllm_objects.scheduler(options, config)
        self.in_scheduler = self._of_lmcache(options, self.scheduler.connector)
        self.scheduler_side = self.in_scheduler.connector_scheduler
        self.workers = [self._worker_of_rank(rank, slots, options, config) for rank, slots in enumerate(memories)]
        self._join_others(options)
        self.reader = readers.reader(self.in_scheduler)
        self.introduce(self.in_scheduler)

    def _worker_of_rank(self, rank: int, slots: Slots, options: Options, config: Any) -> Any:
        return self.worker_class(self, slots, vllm_objects.worker(options, config), options)

    def introduce(self, in_scheduler: Any) -> None:
        """Give the workers' handshake data to `in_scheduler`. Connectors without handshake data do nothing."""

    @property
    def between(self) -> Sequence[Any]:
        """The workers of the connector that joins the two engines, in the order of their ranks."""
        return self.workers

    def listen(self, events: RequestEvents) -> None:
        super().listen(events)
        for worker in self.between:
            worker.events = events

    def configured(self, options: Options) -> Any:
        config = vllm_objects.vllm_config(options)
        config.kv_transfer_config.engine_id = self.engine_id
        config.cache_config.kv_cache_layout = "LBHNC"
        return config

    @abstractmethod
    def for_prefill(self, name: str) -> Params:
        """Return the kv_transfer_params that the router sends to prefill."""

    def for_decode(self, name: str, answer: Params | None) -> Params | None:
        """Return the parameters for decode. answer: parameters from prefill, or None if the router does not wait."""
        return answer

    @property
    @abstractmethod
    def leases(self) -> set[str]:
        """The requests whose blocks this engine holds for the peer."""

    def storing(self) -> set[str]:
        return super().storing() | self.leases

    def kept_of_peer(self) -> set[str]:
        """Return the peer's requests for which this engine keeps state."""
        return set()

    @abstractmethod
    def keeps(self, request: str) -> bool:
        """Return True if this engine holds the blocks of this ended request for the peer."""


class PairWorker(Worker):
    """The worker role of a connector that joins two engines. side: the PairSide of this worker's engine."""

    events: RequestEvents
    clears = by_request = True

    def __init__(self, side: Any, rank: int, slots: Slots, called: Any, adapter: Any) -> None:
        super().__init__(rank, slots, called, called, adapter, {})
        self.side = side
        self._reader = readers.reader(called)
        #: {request: (first token, end)} of the loads that the worker has not reported as finished
        self.due: dict[str, tuple[int, int]] = {}

    def start_step(self, metadata: Any, forward: bool) -> None:
        self.take_due(metadata)
        super().start_step(metadata, forward)
        self.begun()

    def begun(self) -> None:
        """Do nothing. Subclasses may override `begun`, which runs after the worker's connectors have begun a step."""

    def take_due(self, metadata: Any) -> None:
        self.due.update({name: (start, end) for name, start, end in self._reader.loads(metadata) or ()})


class PairEngine(LabEngine):
    """One of two engines. name: prefill or decode, which is also the name of the engine's host."""

    connector: PairSide

    def __init__(self, options: Options, pair: "Pair", name: str, engine_id: str) -> None:
        self.name = name
        self._pair = pair
        self._engine_id = engine_id
        with running(name):
            super().__init__(options)

    def _connected(self, options: Options, memories: Sequence[Slots]) -> Any:
        return side_class(options)(options, memories, self._pair.network, self.name, self._engine_id)

    def answered(self, outputs: Any) -> None:
        for of_client in outputs.values():
            for output in of_client.outputs:
                if output.finish_reason is not None:
                    self._pair.answered(self, output)

    def do(self, step: str, *arguments: Any, **keywords: Any) -> None:
        with running(self.name):
            super().do(step, *arguments, **keywords)

    def iterate(self) -> None:
        """Make one iteration. If the scheduler waits for a lookup, the waiting time passes in both engines."""
        events, pair = self.request_events, self._pair
        events.seconds = pair.seconds - STEP
        clock.now = lambda: events.seconds
        with running(self.name):
            super().iterate()
        clock.now = lambda: pair.seconds
        if (waited := events.seconds - pair.seconds) > STEP:
            pair.time_passes(waited)


#: Both engines share vLLM's classes and kvfix's wrappers. So each wrapper checks which engine is running (_RUNNING).
#: _FIXED: name of the engine with the fixes. "" means no engine. asyncio tasks inherit the values of both variables.
_RUNNING = ContextVar("_RUNNING", default="")
_FIXED = ContextVar("_FIXED", default="")


@contextmanager
def _set(variable: ContextVar[str], name: str) -> Iterator[None]:
    before = variable.set(name)
    try:
        yield
    finally:
        variable.reset(before)


#: running(name) returns a context that marks the engine of this name as the running engine.
running = functools.partial(_set, _RUNNING)


@contextmanager
def fixes_in(name: str) -> Iterator[None]:
    """Let the fixes that are applied in this context act only in the engine of this name."""
    add = WrappedFunction.add

    def add_in_one(function: WrappedFunction, key: str, place: int, wrapper: Callable[..., Any]) -> None:
        add(function, key, place, lambda inner: _in_one(inner, wrapper(inner)))

    with _set(_FIXED, name), mock.patch.object(WrappedFunction, "add", add_in_one):
        yield


def _in_one(inner: Callable[..., Any], fixed: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        fixes = _RUNNING.get() and _RUNNING.get() == _FIXED.get()
        return (fixed if fixes else inner)(*args, **kwargs)

    return chosen


def as_released() -> Any:
    """Return a context to use inside `fixes_in`. While the context is active, no engine has the fixes."""
    return _set(_FIXED, "")
