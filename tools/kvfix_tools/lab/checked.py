"""The lab in mode `check`: what an engine would have left for its user to read, and what it would have said."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvfix
from kvfix import arrival
from kvfix.ledger import Finding
from kvfix_tools.lab.runner import quiet
from kvfix_tools.lab.scenario import Scenario

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World

#: Steps after the schedule: an ended request is looked for in the connector's state some steps later.
AFTER = 40
#: How the message of an alarm begins, to tell it from what the lab itself has found.
ALARM = "the probes alarm: "


@contextmanager
def alarms() -> Iterator[list[Finding]]:
    """What the probes alarm about meanwhile. Empty where they are not in place, or only record."""
    found: list[Finding] = []
    alarm: Any = sys.modules.get("kvfix.probes.alarm")
    ring: Any = getattr(alarm, "ring", None)

    def listen(watch: Any, hook: str, finding: Finding, error: Exception | None) -> None:
        found.append(finding._replace(message=f"{ALARM}{finding.message}"))
        ring(watch, hook, finding, error)

    if alarm is not None:
        alarm.ring = listen
    try:
        yield found
    finally:
        if alarm is not None:
            alarm.ring = ring


def look_for_left(world: World) -> None:
    """Let the probes, if there are any, look for what is left of the last requests."""
    choice = arrival.choice()
    for _ in range(AFTER if choice is not None and choice.probes else 0):
        world.step()


def reports(scenario: Scenario, mode: str = "check") -> list[str]:
    """The reports, the first one first. The choice of kvfix in this process is set for it, and gone afterwards."""
    before = os.environ.get("KVFIX_DUMP_DIR")
    with quiet(), tempfile.TemporaryDirectory(prefix="kvfix-lab-") as folder:
        from kvfix_tools.lab.world import Died, World

        os.environ["KVFIX_DUMP_DIR"] = folder
        kvfix.revert()
        kvfix.apply(mode, only=[])
        try:
            world = World(scenario.options)
            with suppress(Died):
                scenario.play(world)
                look_for_left(world)
        finally:
            kvfix.revert()
            os.environ.pop("KVFIX_DUMP_DIR")
            if before is not None:
                os.environ["KVFIX_DUMP_DIR"] = before
        written = sorted(Path(folder).rglob("*.txt"), key=lambda path: int(path.name.split("-")[3]))
        return [path.read_text() for path in written]
