"""`kvfix lab fuzz`: random schedules against the real scheduler and connector, until time, steps or seeds are out.

A run that loaded nothing, preempted nothing or never filled the blocks has tested nothing, and says so. In mode `check`
the probes look on as in an engine, and what they alarm about is a violation too: a false one if the lab finds none.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import kvfix
from kvfix_tools.lab.runner import lacking, quiet
from kvfix_tools.lab.schedule import Schedule, draw


class Violation(NamedTuple):
    """One bug as far as its signature tells: how often it was seen, and the first schedule, shrunk."""

    rule: str
    times: int
    seed: int
    message: str
    schedule: Schedule
    #: What all findings of this bug have in common (play.signature).
    signature: str

    def as_json(self) -> dict[str, Any]:
        steps = [list(step) for step in self.schedule.steps]
        schedule = {"options": vars(self.schedule.options), "steps": steps}
        return {
            "rule": self.rule,
            "count": self.times,
            "seed": self.seed,
            "message": self.message,
            "schedule": schedule,
        }


class Fuzzed(NamedTuple):
    """What was done, in steps of the scheduler, and what was found, the most frequent first."""

    steps: int
    seeds: int
    seconds: float
    #: Seeds that were played with each option of LMCache and beside another connector.
    options: dict[str, int]
    #: See record.py.
    counts: dict[str, int]
    violations: list[Violation]

    @property
    def tested_nothing(self) -> str:
        """Why the run proves nothing; "" if it does."""
        missing = [
            what
            for what, done in (
                ("loaded no token", "loaded_tokens"),
                ("stored no token", "stored_tokens"),
                ("preempted nobody", "preemptions"),
                ("never filled the blocks", "full_steps"),
            )
            if not self.counts[done]
        ]
        return ", ".join(missing)

    def as_json(self) -> dict[str, Any]:
        violations = [violation.as_json() for violation in self.violations]
        told = {
            "preemptions": self.counts["preemptions"],
            "retrieved_tokens": self.counts["loaded_tokens"],
            "stored_tokens": self.counts["stored_tokens"],
        }
        return {**self._asdict(), **told, "violations": violations, "tested_nothing": self.tested_nothing}


def fuzz(
    connector: str,
    seeds: range,
    seconds: float,
    fixes: bool,
    plain: bool = False,
    shrinking: float = 45.0,
    progress: Callable[[int, int, int, float], None] = lambda *_: None,
    mode: str = "fix",
    most: float = math.inf,
) -> Fuzzed:
    """Play the seeds in order, at most so many seconds. shrinking: seconds for each kind of violation; 0: as drawn.

    mode: of `kvfix.apply`. most: steps after which no other seed is played.
    """
    with quiet():
        from kvfix_tools.lab.play import play, shrink, signature
        from kvfix_tools.lab.record import COUNTED

        kvfix.revert()
        if fixes or mode != "fix":
            kvfix.apply(mode, only=None if fixes else [])
        try:
            start, lacks = time.monotonic(), lacking()
            steps = played = 0
            counts, options = Counter(dict.fromkeys(COUNTED, 0)), Counter[str]()
            seen: dict[str, list[Any]] = {}
            for seed in seeds:
                if steps >= most or time.monotonic() - start > seconds:
                    break
                schedule = draw(seed, connector, plain, lacks)
                done = play(schedule)
                played += 1
                steps += done.steps
                counts.update(done.counts)
                options.update(schedule.options.changed)
                for finding in done.findings:
                    if finding.verdict == "violated":
                        seen.setdefault(signature(finding), [0, seed, finding])[0] += 1
                progress(played, steps, len(seen), time.monotonic() - start)
            took = time.monotonic() - start
            violations = []
            for wanted, (count, seed, finding) in sorted(seen.items(), key=lambda item: -item[1][0]):
                schedule = draw(seed, connector, plain, lacks)
                if shrinking:
                    schedule = shrink(schedule, wanted, shrinking)
                    finding = next(found for found in play(schedule).findings if signature(found) == wanted)
                violations.append(Violation(finding.code, count, seed, str(finding), schedule, wanted))
        finally:
            kvfix.revert()
    return Fuzzed(steps, played, round(took, 3), dict(options), dict(counts), violations)
