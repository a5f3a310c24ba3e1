"""Reports an engine that stands still, once: its requests wait, and none has gone on for KVFIX_WATCHDOG seconds.

A daemon thread of each process with a connector. It looks from time to time, takes no lock and calls nothing of the
engine. Two things count, for as long as they last without a break:

- the main thread is in one call of a hook, or of LMCache while the engine starts;
- requests wait, and no request has computed a token or ended, while the workers compute nothing.

No hang: an engine without requests, a pause, requests that wait for their clients, and a step that the workers have not
answered: a long prefill, a compiler. A worker that stands in a hook reports itself.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvfix import engine_log, engine_state
from kvfix.connector_events import dump, recorder, signals, violations
from kvfix.engine_state import places
from kvfix.ledger import owed, standstill
from kvfix.session import session

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

#: Environment variable: seconds without any progress; 0: no watchdog. And what holds without it.
SECONDS, DEFAULT = "KVFIX_WATCHDOG", 60.0
#: Looks within that time.
_LOOKS = 12
#: How often a look is tried, and seconds between.
_TRIES, _PAUSE = 200, 0.003
#: Functions within EngineCore's step that are the scheduler's; in any other a step is with the workers.
_SCHEDULING = frozenset(("schedule", "update_from_output"))
_STEP, _CORE = frozenset(("step", "step_with_batch_queue")), "/v1/engine/core"


def start() -> None:
    """Start the thread of this process once. Never raises."""
    limit = _limit()
    if limit and session.watchdog is None:
        session.watchdog = watchdog = Watchdog(limit)
        threading.Thread(target=watchdog.run, name="kvfix-watchdog", daemon=True).start()


def stop() -> None:
    """End the thread at its next look."""
    if session.watchdog is not None:
        session.watchdog.stopped.set()
        session.watchdog = None


def _limit() -> float:
    text = os.environ.get(SECONDS, "")
    try:
        return max(0.0, float(text)) if text else DEFAULT
    except ValueError:
        engine_log.warning(f"{SECONDS}={text} is no number of seconds: {DEFAULT:g} are taken")
        return DEFAULT


class Watchdog:
    """limit: seconds."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self.stopped = threading.Event()
        #: Since when nothing has gone on, and what stands: see `_standing`.
        self._since = clock()
        self._standing: tuple[Any, ...] = ()
        #: At the last look: computed tokens of each request, and the steps that the connectors have seen.
        self._computed: dict[str, int] = {}
        self._steps = 0

    def run(self) -> None:
        while not self.stopped.wait(self._limit / _LOOKS):
            if engine_log.guarded("kvfix.connector_events.watchdog", self._look_once):
                return

    def _look_once(self) -> bool:
        """Whether it has reported a standstill."""
        return self.is_due() and self._reported()

    def is_due(self) -> bool:
        """Whether the same has stood still for `limit` seconds. It is to be asked again and again."""
        standing, now = self._stands(), self._clock()
        if not standing or standing != self._standing:
            self._standing, self._since = standing, now
        return bool(standing) and now - self._since >= self._limit

    def _stands(self) -> tuple[Any, ...]:
        """What stands now, equal for as long as it is the same; () if something moves, or nothing has to."""
        inside = _call(frames := places.frames())
        moves = self._moves(frames)
        return inside or (() if moves else ("requests",))

    def _moves(self, frames: list[FrameType]) -> bool:
        computed: dict[str, int] = {}
        paused = False
        for scheduler in recorder.schedulers():
            paused = paused or bool(getattr(getattr(scheduler, "_pause_state", None), "value", 0))
            for request in list(scheduler.requests.values()):
                if request.status.name not in owed.OUTSIDE_STATUSES and not request.status.name.startswith("FINISHED"):
                    computed[request.request_id] = request.num_computed_tokens
        steps = sum(watched.steps for watched in recorder.connectors())
        went_on = any(computed.get(name) != tokens for name, tokens in self._computed.items())
        computing = steps == self._steps and _is_with_workers(frames)  # of a step without tokens it soon has the answer
        self._computed, self._steps = computed, steps
        return not computed or paused or went_on or computing

    def _reported(self) -> bool:
        """Write and log it, if two looks agree that it stands still."""
        began = self._since
        looks = [self._look()]
        if self.stopped.wait(min(standstill.LATE, self._limit)) or not self.is_due() or self._since != began:
            return False
        looks.append(self._look())
        found = standstill.verdicts(looks)
        path = _written(looks[-1].processes[0])
        _ask_others()
        what = " The cause is not known: see its state and stacks."
        if found:
            code, name, _, message, now, _ = found[0]
            what = f" {code} {name}: {message}. Do now: {now}."
        where = f" State, stacks and events: {path}" if path else ""
        who = f"it has been in {self._standing[1]}" if self._standing[0] == "call" else "no request has gone on"
        engine_log.warning(f"{who} for {self._clock() - began:.0f} s.{what}{where}")
        return True

    def _look(self) -> standstill.Look:
        """While the scheduler is at work its queues are not complete: another moment is looked for."""
        for _ in range(_TRIES):
            state = engine_state.collect(True, next(iter(recorder.schedulers()), None))
            if not state["in_step"] or self.stopped.wait(_PAUSE):
                break
        return standstill.Look(self._clock(), [state])


def _call(frames: list[FrameType]) -> tuple[Any, ...]:
    """The call that the main thread is in: of a hook; of LMCache, before the first step."""
    main = threading.main_thread().ident
    for watched in recorder.connectors():
        running = (watched.running or {}).get(main or 0)
        if running is not None and watched.role:
            return "call", f"{running[0]} of {watched.name}", running[1]
    if any(watched.steps for watched in recorder.connectors()) or session.schedulers:
        return ()
    for frame in reversed(frames):
        if "lmcache" in frame.f_code.co_filename.lower() and frame.f_code.co_name == "__init__":
            return "call", f"the start of {type(frame.f_locals.get('self')).__name__}", id(frame)
    return ()


def _is_with_workers(frames: list[FrameType]) -> bool:
    """Whether EngineCore's step has given work to the workers and waits for them, or computes in this process."""
    codes = [frame.f_code for frame in frames]
    step = next((at for at, code in enumerate(codes) if code.co_name in _STEP and _CORE in code.co_filename), None)
    return step is not None and _SCHEDULING.isdisjoint(code.co_name for code in codes[:step])


def _written(state: dict[str, Any]) -> str:
    """Path of the recorder file with the state and the stacks of all threads; "" if it cannot be written."""
    more = [{"kind": "state", **state}, {"kind": "stacks", "text": _stacks()}]
    try:
        return dump.write("standstill", None, more)
    except OSError as error:
        violations.cannot_write(error)
        return ""


def _stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _ask_others() -> None:
    """Ask the other processes of this engine for their recorders, as `kvfix dump` does."""
    for pid in dump.announced():
        with suppress(OSError):
            os.kill(pid, signals.SIGNAL)
