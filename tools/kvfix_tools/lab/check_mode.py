"""The lab with kvfix in mode `check`: what an engine would report to its user."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from kvfix.ledger import Finding
from kvfix.session import session
from kvfix_tools.lab.runner import applied
from kvfix_tools.lab.scenario import Scenario

if TYPE_CHECKING:
    from kvfix_tools.lab.lab_engine import LabEngine

#: Steps after the schedule: kvfix looks for what is kept of an ended request some steps later.
AFTER = 40
#: How the message of a finding begins that kvfix reported, to tell it from the lab's own.
REPORTED = "kvfix reports: "


@contextmanager
def reported() -> Iterator[list[Finding]]:
    """What kvfix reports meanwhile. Empty in the modes that look at no rule."""
    found: list[Finding] = []
    violations: Any = sys.modules.get("kvfix.connector_events.violations")
    if violations is None:
        yield found
        return
    report = violations.report

    def listen(watched: Any, hook: str, finding: Finding, error: Exception | None) -> None:
        found.append(finding._replace(message=f"{REPORTED}{finding.message}"))
        report(watched, hook, finding, error)

    with mock.patch.object(violations, "report", listen):
        yield found


def let_leaks_be_reported(engine: LabEngine) -> None:
    """Make the steps after which kvfix, if it watches, looks for what is kept of the last requests."""
    config = session.config
    if config is not None and config.watches:
        engine.step(AFTER)


def reports(scenario: Scenario) -> list[str]:
    """The reports without fixes, the first one first."""
    with tempfile.TemporaryDirectory(prefix="kvfix-lab-") as folder:
        with mock.patch.dict("os.environ", KVFIX_DUMP_DIR=folder), applied(False, "check"):
            from kvfix_tools.lab.lab_engine import EngineDied, LabEngine

            engine = LabEngine(scenario.options)
            with suppress(EngineDied):
                scenario.play(engine)
                let_leaks_be_reported(engine)
        written = sorted(Path(folder).rglob("*.txt"), key=lambda path: int(path.name.split("-")[3]))
        return [path.read_text() for path in written]
