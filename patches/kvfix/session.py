"""The state of kvfix in this process: its configuration, wrapped functions, reports and recorded events.

The object `session` holds all of this state. This module imports little, so that `kvfix.apply()` is fast.
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

#: Number of events that the recorder keeps. An event takes about 200 bytes.
EVENTS = 8192


class Session:
    def __init__(self) -> None:
        #: None if kvfix does nothing in this process.
        self.config: Config | None = None
        #: Earlier value of each environment variable that `apply()` has changed. None: the variable was not set.
        self.environment: dict[str, str | None] = {}

        # The lines of kvfix in the engine's log (engine_log).
        #: The logged texts, the oldest first.
        self.reported: dict[str, None] = {}
        #: {kind of line: (number of logged lines, monotonic seconds of the last line, lines left out since then)}.
        self.lines: dict[str, tuple[int, float, int]] = {}
        #: {kind of an error in kvfix's code: number of errors}.
        self.faults: dict[str, int] = {}

        # Imports (activation). Any thread may import a module.
        #: Names of the modules with functions to wrap. None until `activation` has read the names from the fixes.
        self.modules: frozenset[str] | None = None
        #: Pairs (thread id, module). In this thread, `activation.Finder` is asking Python's finders for the module.
        self.finding: set[tuple[int, str]] = set()
        #: Modules whose code an import is executing now.
        self.executing: set[str] = set()

        # Fixes (applying). A thread that holds the lock imports no module with functions to fix.
        self.lock = RLock()
        self.wrapped: dict[tuple[str, str], WrappedFunction] = {}
        #: {target in an imported module: state after kvfix has tried to apply the target's fix}.
        self.outcomes: dict[Target, Applicability] = {}
        #: {target: state of the target's function without kvfix's wrappers}.
        self.judged: dict[Target, Applicability] = {}
        #: The modules whose import has ended while kvfix was active, by name.
        self.complete: dict[str, Any] = {}
        #: {module: codes of the fixes that kvfix has applied in the module, but has not logged yet}.
        self.newly_applied: dict[str, dict[str, None]] = {}
        #: {key: how often the wrappers with this key have acted and failed} (metrics). The key of a fix is its code.
        self.tallies: dict[str, Tally] = {}
        #: {code of a fix: reason why `kvfix attach` does not apply the fix to this running engine}.
        self.held_back: dict[str, str] = {}
        #: Ids of requests that began before `kvfix attach`. Rules, and fixes with NEW_REQUESTS, skip these requests.
        self.before: Container[str] = ()

        # Connector events, in all modes except `fix`.
        #: The last events (recorder.Entry).
        self.events: deque[Any] = deque(maxlen=EVENTS)
        #: {number: WatchedConnector} for the connectors and schedulers that exist (recorder).
        self.connectors: Any = None
        self.numbers = count(1)
        #: `restart_recording` increments this number. kvfix ignores a WatchedConnector of an earlier generation.
        self.generation = 0
        #: The newest generation in which the code of the connector events has failed.
        self.failed_generation = -1

        # Reports (violations, dump, signals, metrics).
        #: {rule: number of violations, including violations without a report}.
        self.violations: dict[str, int] = {}
        #: {kind of report: monotonic seconds of the last report}. `reports` is the number of reports of all kinds.
        self.report_times: dict[str, float] = {}
        self.reports = 0
        self.suppressed: list[tuple[str, str]] | None = None
        #: `files`: paths of recorder files. `announced`: paths of the files that announce this process to `kvfix dump`.
        self.files: list[str] = []
        self.announced: set[str] = set()
        self.signal_installed = False
        #: The watchdog.Watchdog of this process while its thread runs, otherwise None.
        self.watchdog: Any = None
        #: {name: Prometheus metric}, or None after prometheus_client has failed.
        self.metrics: dict[str, Any] | None = {}

    @property
    def mode(self) -> str:
        return self.config.mode if self.config is not None else "fix"

    def restart_recording(self) -> None:
        """Forget all recorded events and all reports."""
        self.generation += 1
        self.events.clear()
        if self.connectors is not None:
            self.connectors.clear()
        self.violations.clear()
        self.report_times.clear()
        self.reports, self.suppressed = 0, None

    def _in_child(self) -> None:
        """Reset the state in a forked child. Events and files belong to the parent, whose threads may hold the lock."""
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
