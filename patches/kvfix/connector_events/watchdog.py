"""Report when the engine has made no progress for KVFIX_WATCHDOG seconds (a standstill).

Each process with a connector runs the watchdog in a daemon thread. The watchdog reads the engine's state at intervals.
The watchdog takes no lock and calls no function of the engine. A standstill is one of these states:

- the main thread stays in one call of a connector's hook or, while the engine starts, in one call of LMCache
- requests wait, no request has computed a token or ended, and the workers compute nothing

The watchdog does not report:

- an engine without requests, or a paused engine
- requests that wait for their clients
- a step that the workers have not answered yet, such as a long prefill or a compilation
- a decode instance that makes steps while its requests wait for prefill, because the connector's own timeout applies
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvfix import engine_log, engine_state
from kvfix.connector_events import recorder, signals, violations
from kvfix.engine_state import places
from kvfix.engine_state.places import Call
from kvfix.ledger import liveness, standstill
from kvfix.ledger.standstill import LATE, Look
from kvfix.session import session

#: Environment variable: the watchdog reports after this number of seconds without progress. 0 turns the watchdog off.
SECONDS, DEFAULT = "KVFIX_WATCHDOG", 60.0
#: `_look` reads the state at most _TRIES times, every _PAUSE seconds, until no function of the scheduler is running.
_TRIES, _PAUSE = 200, 0.003
#: If the main thread stays in one call for _STANDS tries, `_look` stops and takes the state of the last try.
_STANDS = 50
#: Scheduler functions that EngineCore's step calls. If none of these functions runs, the step waits for workers.
_SCHEDULING = frozenset(("schedule", "update_from_output"))
#: Connectors that load from a prefill instance. A load waits until the prefill instance has computed the prompt.
_PEERS = frozenset(("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector"))
_STEP, _CORE = frozenset(("step", "step_with_batch_queue")), "/v1/engine/core"


def start() -> None:
    """Start the watchdog of this process once. Never raises."""
    limit = _limit()
    if limit and session.watchdog is None:
        session.watchdog = watchdog = Watchdog(limit)
        threading.Thread(target=watchdog.run, name="kvfix-watchdog", daemon=True).start()


def stop() -> None:
    """End the watchdog's thread after its current look."""
    if session.watchdog is not None:
        session.watchdog.stopped.set()
        session.watchdog = None


def _limit() -> float:
    text = os.environ.get(SECONDS, "")
    try:
        return max(0.0, float(text)) if text else DEFAULT
    except ValueError:
        engine_log.warning(f"{SECONDS}={text} is not a number of seconds: kvfix uses {DEFAULT:g}")
        return DEFAULT


class Watchdog:
    """Look at the engine every `limit` / 12 seconds. Report each standstill once."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self.stopped = threading.Event()
        #: For each standstill from `_standing`: the time when the standstill began.
        self._since: dict[tuple[Any, ...], float] = {}
        #: The last reported standstill, and the time when this standstill began.
        self._told: tuple[tuple[Any, ...], float] | None = None
        #: The results of the last look: computed tokens by request id, and the number of steps of all connectors.
        self._computed: dict[str, int] = {}
        self._steps = 0

    def run(self) -> None:
        while not self.stopped.wait(self._limit / 12):
            engine_log.guarded("kvfix.connector_events.watchdog", self._look_once)

    def _look_once(self) -> None:
        standing = self.is_due()
        if standing and self._told != (found := (standing, self._since[standing])) and self._reported(*found):
            self._told = found

    def is_due(self) -> tuple[Any, ...]:
        """Note the current standstills. Return a standstill that has lasted `limit` seconds, or ()."""
        now = self._clock()
        self._since = {each: self._since.get(each, now) for each in self._standing()}
        return next((each for each, since in self._since.items() if now - since >= self._limit), ())

    def _standing(self) -> Iterator[tuple[Any, ...]]:
        """Yield one tuple for each standstill. Every look yields the same tuple for the same standstill."""
        inside = _inside(calls := _calls())
        if inside:
            yield inside
        if not self._moves(calls):
            yield ("requests",)

    def _moves(self, calls: list[Call]) -> bool:
        computed: dict[str, int] = {}
        paused = False
        watched = recorder.connectors()
        steps = sum(each.steps for each in watched)
        of_others = set(liveness.OUTSIDE_STATUSES)
        if steps != self._steps and any(each.name in _PEERS for each in watched):
            of_others.add("WAITING_FOR_REMOTE_KVS")
        for scheduler in recorder.schedulers():
            paused = paused or bool(getattr(getattr(scheduler, "_pause_state", None), "value", 0))
            for request in list(scheduler.requests.values()):
                if request.status.name not in of_others and not request.status.name.startswith("FINISHED"):
                    computed[request.request_id] = request.num_computed_tokens
        went_on = any(computed.get(name) != tokens for name, tokens in self._computed.items())
        computing = steps == self._steps and _is_with_workers(calls)  # new steps show that the workers answer
        self._computed, self._steps = computed, steps
        return not computed or paused or went_on or computing

    def _reported(self, standing: tuple[Any, ...], began: float) -> bool:
        """Look twice. Return False if the standstill ends before the second look. Return True after the report."""
        first, _ = self._look()
        if self.stopped.wait(min(LATE, self._limit)) or self.is_due() != standing or self._since[standing] != began:
            return False
        look, stacks = self._look()
        found = standstill.verdicts([first, look])
        # The state of this process comes after the states of the other processes.
        states = [{"kind": "state", **each} for each in reversed(look.processes)]
        path = violations.written(recorder.write, "standstill", None, [*states, *stacks])
        what = " The cause is not known: read the state and the stacks of the engine."
        if found:
            code, name, _, message, now, _ = found[0]
            what = f" {code} {name}: {message}. Do now: {now}."
        where = f" State, stacks and events: {path}" if path else ""
        who = f"the main thread has been in {standing[1]}" if standing[0] == "call" else "no request has made progress"
        engine_log.warning(f"{who} for {self._clock() - began:.0f} s.{what}{where}")
        return True

    def _look(self) -> tuple[Look, list[dict[str, Any]]]:
        """Return the states of all processes, and the stacks of other processes. Retry while a scheduler step runs."""
        held, same = (), 0
        for _ in range(_TRIES):
            inside = _inside(calls := _calls())
            state = engine_state.collect(True, next(iter(recorder.schedulers()), None), calls=calls)
            held, same = inside, same + 1 if inside and inside == held else 0
            if not state["in_step"] or same >= _STANDS or self.stopped.wait(_PAUSE):
                break
        others = signals.lines_of_others()
        states = [each for each in others if each["kind"] == "state"]
        stacks = [each for each in others if each["kind"] == "stacks"]
        return Look(self._clock(), [state, *states]), stacks


def _calls() -> list[Call]:
    """Return the stack of the main thread, innermost call first; [] if the stack is not known."""
    return places.stacks().get(threading.main_thread().ident or 0, [])


def _inside(calls: list[Call]) -> tuple[Any, ...]:
    """Return ("call", name, begin) if the main thread is in a hook, or in LMCache's start-up code. Else return ()."""
    main = threading.main_thread().ident
    for watched in recorder.connectors():
        running = (watched.running or {}).get(main or 0)
        if running is not None and watched.role:
            return "call", f"{running[0]} of {watched.name}", running[1]
    if any(watched.steps for watched in recorder.connectors()) or recorder.schedulers():
        return ()
    for name, file, _ in reversed(calls):
        if "lmcache" in file.lower() and name == "__init__":
            return "call", f"the start of LMCache ({file.rpartition('/')[2]})", 0
    return ()


def _is_with_workers(calls: list[Call]) -> bool:
    """Return True if EngineCore's step waits for workers or computes in this process, or if the stack is unknown."""
    step = next((at for at, (name, file, _) in enumerate(calls) if name in _STEP and _CORE in file), None)
    if step is None:
        return not 0 < len(calls) < places.MOST  # a stack of MOST calls, as in a compilation, may lack the step's call
    return _SCHEDULING.isdisjoint(name for name, _, _ in calls[:step])
