"""`kvfix lab continue FILE`: rebuild an engine's state from a file, and run the engine from this state.

`kvfix look --save` or the watchdog writes the file. The file lacks the prompts and the numbers of tokens to generate,
so the lab chooses both. First, the lab loads KV into the blocks of waiting requests, and computes the tokens of running
requests. Then the lab admits the other requests.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvfix.ledger import liveness
from kvfix.ledger.liveness import OUTSIDE_STATUSES, Engine
from kvfix_tools import recording
from kvfix_tools.lab import runner
from kvfix_tools.lab.engine import rules
from kvfix_tools.lab.engine.lab_engine import EngineDied, LabEngine
from kvfix_tools.lab.fuzz import fuzz
from kvfix_tools.lab.fuzz.schedule import DrawnStep, Schedule
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.releases import lacking
from kvfix_tools.lab.replay_recording import KINDS

#: MOST_STEPS: maximum steps to reach one condition. END: maximum steps until all requests have ended.
MOST_STEPS, END = 400, 4000
STILL = 3  # steps in a row without progress, after which the lab reports that no request can move
_SIZES = ("max_num_batched_tokens", "max_num_seqs", "max_model_len")


class Outcome(NamedTuple):
    """ended: number of ended requests. stuck: why no request makes progress, or "". also: other violations."""

    ended: int
    requests: int
    stuck: str
    also: list[str]

    def __str__(self) -> str:
        text = f"stuck: {self.stuck}" if self.stuck else "not stuck"
        return f"{text}; {self.ended} of {self.requests} requests end" + "".join(f"; {each}" for each in self.also)


class Continued(NamedTuple):
    """frees: at most 20 waiting requests. Without fixes, the hang ends if one is aborted. differs: see `_Builder`."""

    schedule: Schedule
    as_released: Outcome
    with_fixes: Outcome
    frees: list[str]
    differs: list[str]

    def as_json(self, versions: dict[str, str]) -> dict[str, Any]:
        parts = {"as_released": self.as_released._asdict(), "with_fixes": self.with_fixes._asdict()}
        return {"schema": 1, "versions": versions, **parts, "frees": self.frees, "differs": self.differs}


def continued(path: Path) -> Continued:
    """Rebuild and continue the state in this file. Raises OSError, or ValueError for a state that cannot be rebuilt."""
    engine = _read(path)
    options = _options(engine)
    with runner.applied(fixes=False):
        builder = _Builder(options, engine)
        try:
            builder.build()
        except EngineDied as error:
            builder.differs.append(f"EngineCore died before the lab reached the state: {error}")
    schedule = Schedule(options, tuple(builder.steps))
    as_released, with_fixes = _outcome(schedule, False), _outcome(schedule, True)
    waiting = [row["id"] for row in liveness.waiting(engine) if row["id"] in builder.names] if as_released.stuck else []
    freed = {name: _outcome(schedule, False, name) for name in waiting[:20]}  # each run aborts one request
    frees = [name for name, each in freed.items() if not each.stuck and each.ended == each.requests]
    return Continued(schedule, as_released, with_fixes, frees, builder.differs)


def shortest(done: Continued, seconds: float) -> Schedule:
    with runner.applied(fixes=False):
        found = fuzz.play(done.schedule).findings
        wanted = next((each for each in found if each.code == rules.NO_REQUEST_CAN_MOVE.code), None)
        return done.schedule if wanted is None else fuzz.shrink(done.schedule, fuzz.signature(wanted), seconds)


def _read(path: Path) -> Engine:
    """Return the only engine of the file. Raises ValueError if the file has no engine or more than one engine."""
    text = path.read_text(errors="replace")
    if text.lstrip().startswith('{"schema"'):
        whole = json.loads(text)
        processes = whole.get("processes", []) if whole.get("kind") == "look" else []
    else:
        processes = recording.read(path).lines.get("state", [])
    found = liveness.engines(processes)
    if len(found) != 1:
        raise ValueError(
            f"the file has the state of {len(found)} schedulers, but the lab needs one: write it with "
            "`kvfix look PID --save FILE`, or take the file of the watchdog"
        )
    return found[0]


def _options(engine: Engine) -> Options:
    """Return the options for this engine. Raises ValueError if the lab cannot play this engine."""
    state, connectors = engine.scheduler, [each for each in engine.connectors if each["class"] in KINDS]
    if len(connectors) != 1:
        names = ", ".join(each["class"] for each in engine.connectors) or "no connector"
        raise ValueError(f"the lab needs exactly one connector of {', '.join(KINDS)}; the engine has {names}")
    settings = state.get("settings") or {}
    if any(settings.get(each) is None for each in _SIZES):
        raise ValueError("the file does not have the scheduler's settings: an older kvfix wrote it")
    if settings.get("groups", 1) != 1:
        raise ValueError(f"the lab continues engines with one KV group; this one has {settings['groups']}")
    (connector,), lacks = connectors, lacking()
    asynchronous = connector.get("asynchronous") and "enable_async_loading" not in lacks
    return Options(
        connector=KINDS[connector["class"]],
        block_size=state["block_size"],
        num_blocks=state["pool"]["blocks"] + 1,
        chunk_size=connector["chunk_size"],
        delay=3 + len(_loaded(engine.requests)),  # steps per load, so that all loads begin before the first load ends
        reserve_full_isl=bool(settings.get("reserve_full_isl")),
        async_scheduling=bool(settings.get("async_scheduling")) and "async_scheduling" not in lacks,
        policy=state["policy"] or "fcfs",
        lmcache={"enable_async_loading": True} if asynchronous else {},
        **{each: settings[each] for each in _SIZES},
    )


def _loaded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the waiting requests that have blocks. The load of each returned request is in flight or has ended."""
    return [row for row in rows if row["queue"] not in ("running", "ended", "") and row["blocks"]]


class _Builder:
    """Finds the steps that rebuild the state. `differs`: how the rebuilt engine differs from the engine in the file."""

    def __init__(self, options: Options, engine: Engine) -> None:
        self.lab = LabEngine(options)
        self.steps: list[DrawnStep] = []
        self.differs: list[str] = []
        self._state, self._chunk = engine.scheduler, options.chunk_size
        rows = [row for row in engine.requests if row["queue"] not in ("ended", "")]
        outside = [row["id"] for row in rows if row["status"] in OUTSIDE_STATUSES]
        self._rows = [row for row in rows if row["id"] not in outside]
        self.differs += [f"{name} waits for its client, so the lab leaves it out" for name in outside]
        ended = [row["id"] for row in engine.requests if row["queue"] == "ended"]
        self.differs += [f"{name} has ended, so the lab leaves it out" for name in ended]
        if engine.ranks > 1:
            self.differs.append(f"the lab plays one rank, not {engine.ranks} ranks")
        self.names = [row["id"] for row in self._rows]
        # a request's number determines its prompt, and is its priority
        order = sorted(self._rows, key=lambda row: (row["priority"], -row["arrived"]))
        self._numbers = {row["id"]: number for number, row in enumerate(order)}

    def build(self) -> None:
        running = [row for row in self._rows if row["queue"] == "running"]
        loaded = sorted(_loaded(self._rows), key=lambda row: -row["arrived"])
        # the lab's prompts include generated tokens, so one step can compute all tokens of running requests
        self._do("budget", max(1, sum(row["computed"] for row in running)))
        for row in loaded:
            hit = max(row["hit"] or 0, -(-row["computed"] // self._chunk) * self._chunk)
            self._do("stored_elsewhere", self._numbers[row["id"]], hit)
            self._admit(row, row["total"])
            self._do("step")  # so vLLM admits this request before the next one arrives
        for row in sorted(running, key=lambda row: row["computed"] < row["prompt"]):
            self._admit(row, row["computed"] if row["computed"] >= row["prompt"] else row["total"])
        blocks, done = self.lab.model.blocks, self._computed
        self._until(lambda: all(blocks(row["id"]) for row in loaded) and all(done(row["id"]) for row in running))
        self._do("budget", 0)  # with a budget of 0 tokens, a step admits no request
        for row in self._rows:
            if row not in running and row not in loaded:
                self._admit(row, row["total"])
        self._until(lambda: not self.lab.connector.busy())
        others = self.lab.free() - self._state["pool"]["free"]
        if others > 0:
            self.differs.append(f"the engine had {others} fewer free blocks, so the lab takes {others} of its own")
            self._do("take_blocks", others)
        for row in self._rows:
            has, was = (done(row["id"]), len(blocks(row["id"]))), (row["computed"], row["blocks"])
            if has != was:
                text = f"has {has[0]} tokens computed in {has[1]} blocks, not {was[0]} in {was[1]}"
                self.differs.append(f"{row['id']} {text}")
        self._do("budget", self.lab.options.max_num_batched_tokens)
        for _ in range(2 * self.lab.options.delay + 2 * STILL):
            self._do("step")

    def _admit(self, row: dict[str, Any], tokens: int) -> None:
        room = self.lab.options.max_model_len - tokens  # a request generates up to 16 tokens
        self._do("admit", row["id"], self._numbers[row["id"]], max(1, tokens), max(1, min(16, room)))

    def _until(self, done: Callable[[], bool]) -> None:
        for _ in range(MOST_STEPS):
            if done():
                return
            self._do("step")
        self.differs.append(f"after {MOST_STEPS} steps, a load is unfinished or a running request lacks tokens")

    def _do(self, *step: Any) -> None:
        fuzz.move(self.lab, step)
        self.steps.append(step)

    def _computed(self, name: str) -> int:
        return int(self.lab.requests[name].num_computed_tokens)


def _outcome(schedule: Schedule, fixes: bool, abort: str = "") -> Outcome:
    """Play the schedule. abort: a request to abort when no request can move."""

    still = rules.NO_REQUEST_CAN_MOVE.code

    def stuck() -> list[str]:
        return [found.message for found in engine.findings if found.code == still]

    with runner.applied(fixes):
        engine = LabEngine(schedule.options)
        before = 0
        with suppress(EngineDied):  # the error is also a finding
            for step in schedule.steps:
                fuzz.move(engine, step)
            if abort:
                engine.run(END)
                before = len(stuck())
                if not engine.requests[abort].is_finished():
                    engine.abort(abort)
            engine.run(END)
        also = [str(found) for found in engine.findings if found.verdict == "violated" and found.code != still]
        ended = sum(request.is_finished() for request in engine.requests.values())
        return Outcome(ended, len(engine.requests), next(iter(stuck()[before:]), ""), also)
