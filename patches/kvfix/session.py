"""The state of kvfix in this process: its configuration, wrapped functions, reports and recorded events.

Only the object `session` holds state. This module imports little, so that `apply()` is fast.
"""

import os
from _thread import RLock
from collections import deque
from itertools import count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Any

    from kvfix.applicability import Applicability
    from kvfix.config import Config
    from kvfix.fixes.record import Target
    from kvfix.metrics import Tally
    from kvfix.wrapping import WrappedFunction

#: Events that the recorder keeps. An event takes about 200 bytes.
EVENTS = 8192


class Session:
    """The state of kvfix in this process. `session` is the only instance."""

    def __init__(self) -> None:
        #: None: kvfix does nothing in this process.
        self.config: Config | None = None
        #: {environment variable: its value before `apply()` changed it; None: not set}.
        self.environment: dict[str, str | None] = {}

        # The log of the engine (engine_log).
        #: The texts that were logged, the oldest first.
        self.reported: dict[str, None] = {}
        #: {kind of a line: (lines logged, monotonic seconds of the last line, lines left out after it)}.
        self.lines: dict[str, tuple[int, float, int]] = {}
        #: Errors in kvfix by kind.
        self.faults: dict[str, int] = {}

        # Imports (activation). Any thread may import a module.
        #: Modules with functions to wrap; None: not read yet.
        self.modules: frozenset[str] | None = None
        #: (thread, module) for each module for which kvfix is asking the other finders in this thread.
        self.finding: set[tuple[int, str]] = set()
        #: Modules whose code runs now, because they are being imported.
        self.executing: set[str] = set()

        # Fixes (applying). A thread that holds the lock imports no module with fixed functions.
        self.lock = RLock()
        self.wrapped: dict[tuple[str, str], WrappedFunction] = {}
        #: {function of a wanted fix, in an imported module: its outcome}.
        self.outcomes: dict[Target, Applicability] = {}
        #: {function of a wanted fix: the verdict on the function without kvfix's wrappers} (applying).
        self.judged: dict[Target, Applicability] = {}
        #: {name: module} of the modules whose import has ended while kvfix was active.
        self.complete: dict[str, Any] = {}
        #: {module: codes of fixes that were applied to it and are not logged yet}.
        self.newly_applied: dict[str, dict[str, None]] = {}
        #: {key of wrappers: how often they acted and failed} (metrics).
        self.tallies: dict[str, Tally] = {}
        #: {code of a fix that `kvfix attach` does not apply to this running engine: reason}.
        self.held_back: dict[str, str] = {}
        #: Requests that began before `kvfix attach`. No rule checks them, and fixes with NEW_REQUESTS skip them.
        self.before: Container[str] = ()

        # Connector events, except in mode `fix`.
        #: The last events (recorder.Entry).
        self.events: deque[Any] = deque(maxlen=EVENTS)
        #: {number: WatchedConnector}, as long as the connector or scheduler exists (recorder).
        self.connectors: Any = None
        self.numbers = count(1)
        #: `restart_recording` increments this number. kvfix ignores a WatchedConnector of an earlier generation.
        self.generation = 0
        #: The last generation with an error in the connector events.
        self.failed_generation = -1

        # Reports (violations, dump, signals, metrics).
        #: {rule: number of its violations, reported or not}.
        self.violations: dict[str, int] = {}
        #: {kind of report: monotonic seconds of the last report}, and the number of reports of all kinds.
        self.report_times: dict[str, float] = {}
        self.reports = 0
        self.suppressed: list[tuple[str, str]] | None = None
        #: Paths of recorder files, and of the files that announce this process to `kvfix dump`.
        self.files: list[str] = []
        self.announced: set[str] = set()
        self.signal_installed = False
        #: The watchdog of this process (watchdog.Watchdog), while its thread runs.
        self.watchdog: Any = None
        #: Prometheus metrics by name; None: the client has failed once.
        self.metrics: dict[str, Any] | None = {}

    @property
    def mode(self) -> str:
        return self.config.mode if self.config is not None else "fix"

    def restart_recording(self) -> None:
        """Forget everything that was recorded and reported about connectors."""
        self.generation += 1
        self.events.clear()
        if self.connectors is not None:
            self.connectors.clear()
        self.violations.clear()
        self.report_times.clear()
        self.reports, self.suppressed = 0, None

    def _in_child(self) -> None:
        """Reset a forked child. Records and files belong to the parent, whose other threads may have held the lock."""
        self.lock = RLock()
        self.restart_recording()
        for tally in self.tallies.values():
            tally.acted = tally.faults = 0
        self.files.clear()
        self.announced.clear()
        self.signal_installed = False
        self.watchdog = None


session = Session()
os.register_at_fork(after_in_child=session._in_child)
