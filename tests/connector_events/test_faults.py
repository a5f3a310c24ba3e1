"""An error in any part of kvfix.connector_events changes no decision of the scheduler, and causes one log line."""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kvfix
from kvfix.connector_events import readers, recorder
from kvfix.connector_events.watched import WatchedConnector
from kvfix.ledger import Finding, Ledger, events
from kvfix.session import session
from kvfix_tools.lab.fuzz.schedule import draw
from tests import healthy, late


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


class Odd:
    def __eq__(self, other: object) -> bool:
        return fails()

    __hash__ = None  # type: ignore[assignment]


def play_all() -> dict[str, Any]:
    # Leave out draft models and pauses, because both would reduce the number of events.
    schedules = [draw(3, connector, plain=True, lacks=("drafter", "pause")) for connector in ("v1", "mp")]

    def decided() -> list[Any]:
        return [healthy.events(late.play(schedule)) for schedule in schedules]

    alone = decided()
    faults = {what: watch(plant, decided, alone) for what, plant in FAULTS.items()}
    return {"events": sum(map(len, alone)), "faults": faults}


def watch(plant: Callable[[], Any], decided: Callable[[], Any], alone: list[Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, KVFIX_DUMP_DIR=folder):
        kvfix.apply("check")
        session.reported.clear()
        session.faults.clear()
        with plant():
            again = decided()
        names = [path.name for path in Path(folder).rglob("kvfix-*.*")]
        logged = [line[:200] for line in sorted(session.reported) if "applied" not in line and " acted: " not in line]
        kvfix.revert()
    written = sum(name.endswith(".txt") for name in names)
    return {"same": again == alone, "logged": logged, "written": written, "dumps": len(names)}


def patched(target: str) -> Callable[[], Any]:
    return partial(mock.patch, target, fails)


def ledger(feed: Callable[..., Any]) -> Any:
    """Replace `feed` of the ledger that kvfix uses in the engine, but not of the lab's own ledger."""
    return mock.patch("kvfix.connector_events.watched.Ledger", type("Planted", (Ledger,), {"feed": feed}))


def reader(kind: str, method: str, replacement: Any = fails) -> Any:
    """Replace a method of the reader that kvfix uses in the engine, but not of the lab's own reader."""
    make = readers.reader

    def planted(connector: Any) -> Any:
        made = make(connector)
        if type(made).__name__ == kind:
            setattr(made, method, replacement)
        return made

    return mock.patch("kvfix.connector_events.readers.reader", planted)


@contextmanager
def violated(*more: Any) -> Iterator[None]:
    """Make each Asked event violate a rule. more: contexts that plant faults in the code that handles the violation."""

    def feed(self: Any, event: Any) -> list[Any]:
        asked = isinstance(event, events.Asked)
        return [Finding("KVR001", "planted", "violated", event.request, "it is planted", event)] if asked else []

    with ExitStack() as stack:
        for each in [ledger(feed), *more]:
            stack.enter_context(each)
        yield


@contextmanager
def odd_event() -> Iterator[None]:
    odd: Any = object()
    with violated():
        recorder.add(1, "planted", events.Asked(odd, odd, odd, odd, odd))
        yield


def signal_at_a_lookup(self: Any, event: Any) -> list[Any]:
    if isinstance(event, events.Asked):
        os.kill(os.getpid(), signal.SIGUSR2)
    return []


def backwards(clock: str) -> Any:
    return mock.patch(clock, iter(range(10**9, 0, -1)).__next__)


#: All hooks except `get_transfer_results`, because the lab calls this hook only with several KV groups.
HOOKS = [name for name in vars(WatchedConnector) if name.startswith(("before_", "after_")) and "results" not in name]
#: Entries that also make kvfix report a finding, for which kvfix logs a separate line.
WITH_FINDING: dict[str, Callable[[], Any]] = {
    "a violation": violated,
    "odd object in an event": odd_event,
    "report": lambda: violated(mock.patch("kvfix.connector_events.violations.compose", fails)),
    "fixes of a finding": lambda: violated(mock.patch("kvfix.catalogue.rows_handling", fails)),
    "metrics": lambda: violated(
        mock.patch.dict(sys.modules, prometheus_client=object()), mock.patch.object(session, "metrics", {})
    ),
    "disk full": lambda: violated(mock.patch("os.replace", side_effect=OSError(28, "No space left on device"))),
    "read-only directory": lambda: violated(mock.patch.dict(os.environ, KVFIX_DUMP_DIR="/proc/kvfix")),
    "snapshot": lambda: violated(mock.patch("kvfix.connector_events.recorder.snapshot", fails)),
    "sizes": lambda: violated(mock.patch("kvfix.connector_events.readers.sizes", fails)),
}
READERS = ("hit", "loads", "stores", "kept", "lookup_timeout")
FAULTS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: mock.patch.dict(os.environ),
    **{f"hook {name}": patched(f"kvfix.connector_events.watched.WatchedConnector.{name}") for name in HOOKS},
    **{f"reader V1.{name}": partial(reader, "V1", name) for name in READERS},
    **{f"reader MP.{name}": partial(reader, "MP", name) for name in ("hit", "loads", "stores", "kept")},
    "place": patched("kvfix.connector_events.watched.place"),
    "announcement": patched("kvfix.connector_events.signals.write_announcement"),
    "no WatchedConnector": patched("kvfix.connector_events.watched.WatchedConnector.__init__"),
    "recorder": patched("kvfix.connector_events.recorder.add"),
    "a count that is none": partial(reader, "V1", "hit", lambda *_: Odd()),
    "rule": lambda: ledger(fails),
    "clock goes back": lambda: backwards("kvfix.clock.now"),
    "wall clock goes back": lambda: backwards("time.time_ns"),
    "signal in a hook": lambda: ledger(signal_at_a_lookup),
    **WITH_FINDING,
}
#: Faults that cause no error in kvfix. kvfix handles clocks that go back, signals, and objects that JSON cannot encode.
HARMLESS = (
    "nothing", "a violation", "odd object in an event", "clock goes back", "wall clock goes back", "signal in a hook"
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_engine_goes_on(fault: str, outcomes: dict[str, Any]) -> None:
    found = outcomes["faults"][fault]
    assert found["same"], found
    findings = [line for line in found["logged"] if line.startswith("KVR")]
    assert bool(findings) is (fault in WITH_FINDING), found
    assert len(found["logged"]) - len(findings) == (fault not in HARMLESS), found


def test_the_schedules_have_events(outcomes: dict[str, Any]) -> None:
    assert outcomes["events"] > 500
    assert outcomes["faults"]["a violation"]["written"] == 1  # kvfix writes one report for all violations of a rule
    assert outcomes["faults"]["odd object in an event"]["written"] > 0
    assert outcomes["faults"]["signal in a hook"]["dumps"] > 0
