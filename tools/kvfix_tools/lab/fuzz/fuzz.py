"""Play or shrink a random schedule on the real scheduler and connector. Reports of kvfix are findings too."""

import dataclasses
import re
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

from kvfix.ledger import Finding
from kvfix.ledger.events import Event
from kvfix_tools.lab.engine import rules
from kvfix_tools.lab.engine.lab_engine import EngineDied, LabEngine
from kvfix_tools.lab.engine.memory import GARBAGE
from kvfix_tools.lab.fuzz import pair_schedule
from kvfix_tools.lab.fuzz.parameters import CONFIGURED
from kvfix_tools.lab.fuzz.schedule import DrawnStep, Schedule
from kvfix_tools.lab.options import PAIRS, Options
from kvfix_tools.lab.pair.pair import Neighbours, Pair
from kvfix_tools.lab.runner import let_leaks_be_reported, reported
from kvfix_tools.lab.steps import prompt


class Played(NamedTuple):
    """The results of a schedule. log: (step, event) of all events."""

    findings: list[Finding]
    steps: int
    counts: dict[str, int]
    log: list[tuple[int, Event]]

    @property
    def violations(self) -> list[Finding]:
        return [found for found in self.findings if found.verdict == "violated"]


def play(schedule: Schedule, end: int = 4000) -> Played:
    """Play all steps, and free taken blocks. Then run until idle, for at most `end` steps, or 8 * `end` in a pair."""
    options = schedule.options
    if options.real_transfers:  # also play the schedule with the lab's simulation of NIXL
        return _play_both(options, lambda pair: played(pair, _play_pair, schedule, end))
    if options.connector in PAIRS:
        return played(Pair(options), _play_pair, schedule, end)
    if options.neighbours:
        return played(Neighbours(options), _play_neighbours, schedule, end)
    return played(LabEngine(options), _play_engine, schedule, end)


def played(engines: Any, plays: Callable[[Any, Schedule, int], Any], schedule: Schedule, end: int) -> Played:
    """Play a schedule with `plays`. If `plays` returns a number of steps, that number replaces `engines.steps`."""
    steps = None
    with reported() as reports, suppress(EngineDied):  # the error is in a finding
        steps = plays(engines, schedule, end)
    engines.close()
    return Played(engines.findings + reports, steps or engines.steps, engines.counts, engines.log)


def _play_engine(engine: LabEngine, schedule: Schedule, end: int) -> int | None:
    for step in schedule.steps:
        move(engine, step)
    if not ends(engine, end):
        return None
    steps = engine.steps
    let_leaks_be_reported(engine)
    return steps


def ends(engine: LabEngine, end: int) -> bool:
    """Free the taken blocks and run the engine for at most `end` steps. Return True if all requests have ended."""
    engine.free_blocks()
    engine.budget(engine.options.max_num_batched_tokens)
    if engine.counts["pauses"]:
        engine.unpause()
    if engine.counts["server_stops"]:
        engine.do("server_goes_on")
    for session in open_sessions(engine):
        engine.end_input(session)
    engine.run(end)
    return engine.expect_all_ended()


def _play_neighbours(two: Neighbours, schedule: Schedule, end: int) -> None:
    for number, step in enumerate(schedule.steps):
        for engine in two.of(number, step):
            with engine.running():
                move(engine, step)
    for engine in two.engines:
        with engine.running():
            ends(engine, end)


def _play_pair(pair: Pair, schedule: Schedule, end: int) -> None:
    for step in schedule.steps:
        pair_schedule.move(pair, step)
    pair.free_blocks()
    pair.budget(schedule.options.max_num_batched_tokens)
    if schedule.options.peer_ranks:
        pair.run(4 * end)
        pair.faults_end()
        pair.ask("last", prompt(2 * schedule.options.block_size + 1, 7), 2)
    pair.run(4 * end)  # several requests may wait, one after another, for the timeout of a peer
    pair.expect_all_ended()


def move(engine: LabEngine, step: DrawnStep) -> None:
    """Make one step. A step that is not possible, such as an abort without an open request, does nothing."""
    kind, *rest = step
    if kind in ("step", "lose_loads"):
        if engine.scheduler.has_requests():
            getattr(engine, kind)(*rest)
    elif kind in ("admit", "configured"):
        name, seed, tokens, max_tokens, *configured = rest
        if engine.is_free(name):
            more: dict[str, Any] = {"priority": seed} if engine.options.policy == "priority" else {}
            if configured:
                more["sampling"] = {"extra_args": {"kv_transfer_params": CONFIGURED[configured[0]]}}
            engine.admit(name, prompt(tokens, seed), max_tokens, **more)
    elif kind in ("session", "input", "end_input"):
        _move_session(engine, kind, *rest)
    elif kind in ("abort", "fail_load", "fail_store", "preempt", "is_beside"):
        open_now = [name for name, request in engine.requests.items() if not request.is_finished()]
        if open_now:
            _move_request(engine, kind, open_now[rest[0] % len(open_now)], *rest[1:])
    elif kind == "stored_elsewhere":
        if not engine.counts["connector_resets"]:  # after a reset, KV from elsewhere may come from the old weights
            engine.do(kind, prompt(rest[1], rest[0]))
    elif kind == "server_restarts":
        engine.do("server_dies")
        engine.step(rest[0])
        engine.do("server_comes_back")
    elif kind == "timeout":
        engine.do("lookups_fail", 1)
    else:
        engine.do(kind, *rest)


def open_sessions(engine: LabEngine) -> list[str]:
    queues = [(name, request, getattr(request, "streaming_queue", None)) for name, request in engine.requests.items()]
    return [name for name, request, queue in queues if not (queue is None or None in queue or request.is_finished())]


def _move_session(engine: LabEngine, kind: str, which: Any, seed: int = 0, tokens: int = 1, most: int = 1) -> None:
    """Keep at most three sessions open, each with at most a quarter of max_model_len tokens."""
    sessions = open_sessions(engine)
    room = engine.options.max_model_len // 4
    if kind == "session":
        if len(sessions) < 3 and tokens + most <= room and engine.is_free(which):
            engine.admit(which, prompt(tokens, seed), most, resumable=True)
        return
    if not sessions:
        return
    name = sessions[which % len(sessions)]
    request: Any = engine.requests[name]
    queued = sum(len(update.prompt_token_ids) + update.max_tokens for update in request.streaming_queue)
    if kind == "end_input":
        engine.end_input(name)
    elif request.num_prompt_tokens + request.max_tokens + queued + tokens + most <= room:
        engine.add_input(name, prompt(tokens, seed), most)


def _move_request(engine: LabEngine, kind: str, name: str, chunks: int, rank: int = 0) -> None:
    if kind == "abort":
        engine.abort(name)
    elif kind == "fail_store":
        engine.do(kind, name, rank)
    elif kind == "is_beside":
        engine.has_in_other_connector(name)
    elif kind == "fail_load":
        # With several ranks, the decoder in `disagg_spec` may get wrong KV after a failed load, in spite of KVF030.
        asked = getattr(engine.requests[name], "kv_transfer_params", None) or {}
        if engine.options.ranks == 1 or "disagg_spec" not in asked:
            engine.fail_load(name, chunks, rank)
    elif engine.requests[name].status == RequestStatus.RUNNING:
        engine.preempt(name)


def signature(finding: Finding) -> str:
    """Return the rule and the message without numbers, names and paths. Findings of one bug have equal signatures."""
    return f"{finding.code} {re.sub(r'/[^ ]+|r?[0-9]+', 'N', finding.message)[:160]}"


def shrink(schedule: Schedule, wanted: str, seconds: float = 45.0, player: Callable[[Any], Played] = play) -> Schedule:
    """Search for at most `seconds`. Return the shortest schedule found that has a finding of this signature."""
    until = time.monotonic() + seconds

    def shows(candidate: Schedule) -> bool:
        return any(signature(found) == wanted for found in player(candidate).findings)

    best = schedule
    size = max(1, len(best.steps) // 2)
    while size and time.monotonic() < until:
        start, shorter = 0, False
        while start < len(best.steps) and time.monotonic() < until:
            candidate = best._replace(steps=best.steps[:start] + best.steps[start + size :])
            if candidate.steps and shows(candidate):
                best, shorter = candidate, True
            else:
                start += size
        if not shorter or size > len(best.steps):
            size //= 2
    for index, step in enumerate(best.steps if player is play else ()):
        for smaller in _smaller(step):
            candidate = best._replace(steps=(*best.steps[:index], smaller, *best.steps[index + 1 :]))
            if time.monotonic() < until and shows(candidate):
                best = candidate
                break
    return best


def _smaller(step: DrawnStep) -> list[DrawnStep]:
    """Return variants of this step with a smaller `max_tokens` or fewer blocks."""
    if step[0] in ("admit", "ask"):
        return [(*step[:4], tokens, *step[5:]) for tokens in (1, 2, 5) if tokens < step[4]]
    return [(*step[:-1], 1)] if step[0] == "take_blocks" and step[-1] > 1 else []


#: {name of a value (see `_state`): the value}. The lab's simulation of NIXL leaves garbage in a slot if
#: the source of a transfer has changed or the peer has ended. Real NIXL may leave any content in this slot.
State = dict[str, Any]


class Watched(Pair):
    """Two engines. states: the state of both engines after each step, to compare real NIXL with its simulation."""

    def __init__(self, options: Options) -> None:
        self.states: list[State] = []
        #: Number of the engines' steps at the last recorded state.
        self._taken = -1
        super().__init__(options)

    def tick(self) -> None:
        moves = self.network.busy or self.steps != self._taken
        super().tick()
        is_new = moves or self.network.busy  # False: both engines wait for a timeout, and no state changes
        self._taken = self.steps
        self.states.append(_state(self) if is_new else self.states[-1])


def _state(pair: Pair) -> State:
    state: State = {"findings": [found.code for found in pair.findings], "steps": pair.steps}
    for engine in pair.engines:
        for name, request in engine.requests.items():
            last = request.output_token_ids[-1] if request.num_output_tokens else None
            state[f"{name} of {engine.name}"] = request.status.name, request.num_output_tokens, last
        slots = engine.slots
        state[f"the blocks of {engine.name}"] = slots.read(range(len(slots)), 0, len(slots) * slots.block_size)
    return state


def _differences(was: State, has: State) -> list[tuple[str, Any, Any]]:
    found = []
    for about in {**was, **has}:
        one, other = was.get(about), has.get(about)
        if one == other:
            continue
        if isinstance(one, list) and isinstance(other, list) and len(one) == len(other) and about != "findings":
            wrong = next((at for at, each in enumerate(one) if each not in (other[at], GARBAGE)), None)
            if wrong is None:
                continue
            about, one, other = f"slot {wrong} of {about}", one[wrong], other[wrong]
        found.append((about, one, other))
    return found


def _play_both(options: Options, play: Callable[[Pair], Played]) -> Played:
    """Return the result of `play` with real NIXL. The findings include the first difference from simulated NIXL."""
    model = Watched(dataclasses.replace(options, real_transfers=False))
    play(model)
    real = Watched(options)
    done = play(real)
    empty: dict[str, Any] = {}
    states = enumerate(zip_longest(model.states, real.states, fillvalue=empty))
    events = enumerate(zip_longest(model.log, real.log))
    in_states = ((step, *each) for step, (was, has) in states for each in _differences(was, has))
    in_events = ((number, "the events", one, other) for number, (one, other) in events if one != other)
    for step, about, one, other in islice(chain(in_states, in_events), 1):
        rule, message = rules.DIFFERS_FROM_MODEL, f"step {step}, {about}: {other} with NIXL, {one} with simulated NIXL"
        done.findings.append(Finding(rule.code, rule.name, "violated", "", message, real.log[-1][1]))
    return done
