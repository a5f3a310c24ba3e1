"""Play a schedule in a world and shrink one that violates a rule to its shortest form."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import NamedTuple

from vllm.v1.request import RequestStatus

from kvfix.ledger import Finding
from kvfix.ledger.events import Event
from kvfix_tools.lab import checked
from kvfix_tools.lab.scenario import prompt
from kvfix_tools.lab.schedule import Schedule, Step
from kvfix_tools.lab.world import Died, World


class Played(NamedTuple):
    """What came of a schedule: `log` has all that happened, (step, event)."""

    findings: list[Finding]
    steps: int
    counts: dict[str, int]
    log: list[tuple[int, Event]]


def play(schedule: Schedule, end: int = 4000) -> Played:
    """All steps, then everything is freed and the engine runs until nothing is left to do, at most `end` steps.

    With probes in place, what they alarm about is among the findings.
    """
    world = World(schedule.options)
    with checked.alarms() as alarms, suppress(Died):  # among the findings
        for step in schedule.steps:
            move(world, step)
        world.free_blocks()
        world.budget(schedule.options.max_num_batched_tokens)
        world.run(end)
        if world.scheduler.has_unfinished_requests():
            world.never_ends()
        else:
            world.settle()
            steps = world.steps
            checked.look_for_left(world)
            return Played(world.findings + alarms, steps, world.counts, world.log)
    return Played(world.findings + alarms, world.steps, world.counts, world.log)


def move(world: World, step: Step) -> None:
    """One step; one that does not fit the world as it is (an abort where nobody is) does nothing."""
    kind, *rest = step
    if kind == "step":
        if world.scheduler.has_requests():
            world.step()
    elif kind == "admit":
        name, seed, tokens, max_tokens = rest
        if world.is_free(name):
            world.admit(name, prompt(tokens, seed), max_tokens)
    elif kind in ("abort", "fail_load", "preempt", "is_beside"):
        open_now = [name for name, request in world.requests.items() if not request.is_finished()]
        if open_now:
            name = open_now[rest[0] % len(open_now)]
            if kind == "abort":
                world.abort(name)
            elif kind == "is_beside":
                world.is_beside(name)
            elif kind == "fail_load":
                world.fail_load(name, rest[1])
            elif world.requests[name].status == RequestStatus.RUNNING:
                world.preempt(name)
    elif kind == "lose_loads":
        if world.scheduler.has_requests():
            world.lose_loads()
    elif kind == "evict":
        world.evict(*rest)
    elif kind == "take_blocks":
        world.take_blocks(*rest)
    elif kind == "budget":
        world.budget(*rest)
    elif kind == "timeout":
        world.lookups_fail(1)
    elif kind == "slow_lookups":
        world.slow_lookups(*rest)
    elif kind == "wait":
        world.wait(*rest)
    elif kind == "free_blocks":
        world.free_blocks()
    elif kind == "reset_prefix_cache":
        world.reset_prefix_cache()
    else:
        raise ValueError(f"no step {kind!r}")


def signature(finding: Finding) -> str:
    """What is the same about two findings of one bug: the rule, and its words without numbers and names."""
    return f"{finding.code} {re.sub(r'r?[0-9]+', 'N', finding.message)[:160]}"


def shrink(schedule: Schedule, wanted: str, seconds: float = 45.0) -> Schedule:
    """The shortest schedule found in the time that still has a finding of this signature: steps out, numbers down."""
    until = time.monotonic() + seconds

    def shows(candidate: Schedule) -> bool:
        return any(signature(found) == wanted for found in play(candidate).findings)

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
    for index, step in enumerate(best.steps):
        for smaller in _smaller(step):
            candidate = best._replace(steps=(*best.steps[:index], smaller, *best.steps[index + 1 :]))
            if time.monotonic() < until and shows(candidate):
                best = candidate
                break
    return best


def _smaller(step: Step) -> list[Step]:
    """The same step with its last numbers small."""
    if step[0] == "admit":
        return [(*step[:4], tokens) for tokens in (1, 2, 5) if tokens < step[4]]
    return [(step[0], 1)] if step[0] == "take_blocks" and step[1] > 1 else []
