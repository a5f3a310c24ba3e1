"""Two engines that share LMCache's cache: each loads chunks that the other one has stored."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from kvfix import clock
from kvfix_tools.lab.connectors.mp import ADAPTER, MP
from kvfix_tools.lab.engine.lab_engine import LabEngine
from kvfix_tools.lab.engine.memory import Cache, Slots
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.pair import one_side
from kvfix_tools.lab.pair.pair_engine import TwoEngines

#: Steps that are not played with two engines: the weights of both would have to change.
_NOT_PLAYED = ("new_weights",)


class Neighbour(LabEngine):
    """One of two engines. caches: caches of the other engine, by rank; None: new caches."""

    def __init__(self, options: Options, name: str, caches: list[Cache] | None = None) -> None:
        self.name = name
        self._shared = caches
        with one_side.running(name):
            super().__init__(options)

    def _connected(self, options: Options, memories: list[Slots]) -> Any:
        if self._shared is not None:
            self.caches, self.cache = self._shared, self._shared[0]
        return super()._connected(options, memories)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run this engine inside the context: the clock and new clients of LMCache then belong to this engine."""
        clock.now = lambda: self.request_events.seconds
        if isinstance(self.connector, MP):
            self.connector._replace(import_module(ADAPTER))
        with one_side.running(self.name):
            yield


class Neighbours(TwoEngines):
    """Two engines with these options."""

    engines: tuple[Neighbour, Neighbour]

    def __init__(self, options: Options) -> None:
        first = Neighbour(options, "first")
        self.engines = first, Neighbour(options, "second", first.caches)

    def of(self, number: int, step: tuple[Any, ...]) -> tuple[Neighbour, ...]:
        """Return the engines that make this step. The number of a request selects its engine."""
        kind = step[0]
        if kind in ("step", *_NOT_PLAYED):
            return self.engines if kind == "step" else ()
        if kind in ("admit", "configured", "session"):
            number = int(step[1].removeprefix("r"))
        if kind == "evict" and step[2]:
            for engine in self.engines:  # loads of both engines may come short
                engine.request_events.may_fail.add("")
        return (self.engines[number % 2],)
