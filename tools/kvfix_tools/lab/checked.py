"""A scenario in mode `check`, without a fix: what the engine would have left for its user to read."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import kvfix
from kvfix_tools.lab.runner import quiet
from kvfix_tools.lab.scenario import Scenario

#: Steps after the schedule: an ended request is looked for in the connector's state some steps later.
AFTER = 40


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
                for _ in range(AFTER):
                    world.step()
        finally:
            kvfix.revert()
            os.environ.pop("KVFIX_DUMP_DIR")
            if before is not None:
                os.environ["KVFIX_DUMP_DIR"] = before
        written = sorted(Path(folder).glob("*.txt"), key=lambda path: int(path.name.split("-")[3]))
        return [path.read_text() for path in written]
