"""`kvfix lab fuzz`: random schedules against the real scheduler and connector, until time, steps or seeds are out.

A run that loaded nothing, preempted nothing or never filled the blocks has tested nothing, and says so. In mode `check`
what kvfix reports is a violation too: a false one if the lab finds none.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from kvfix_tools.lab.releases import lacking
from kvfix_tools.lab.runner import applied
from kvfix_tools.lab.schedule import Schedule, draw


class Violation(NamedTuple):
    """One bug as far as its signature tells: how often it was found, and the first schedule, shrunk."""

    rule: str
    times: int
    seed: int
    message: str
    schedule: Schedule
    #: What all findings of this bug have in common (play_schedule.signature).
    signature: str

    def as_json(self) -> dict[str, Any]:
        steps = [list(step) for step in self.schedule.steps]
        return {
            "rule": self.rule,
            "count": self.times,
            "seed": self.seed,
            "message": self.message,
            "schedule": {"options": vars(self.schedule.options), "steps": steps},
        }


class Fuzzed(NamedTuple):
    """What was done, in steps of the scheduler, and what was found, the most frequent first."""

    steps: int
    seeds: int
    seconds: float
    #: Seeds that were played with each option of LMCache and behind another connector.
    options: dict[str, int]
    #: See run_log.py.
    counts: dict[str, int]
    violations: list[Violation]

    @property
    def tested_nothing(self) -> str:
        """Why the run proves nothing; "" if it does."""
        needed = {
            "loaded_tokens": "loaded no token",
            "stored_tokens": "stored no token",
            "preemptions": "preempted nobody",
            "full_steps": "never filled the blocks",
        }
        return ", ".join(missing for count, missing in needed.items() if not self.counts[count])

    def as_json(self) -> dict[str, Any]:
        violations = [violation.as_json() for violation in self.violations]
        counts = {
            "preemptions": self.counts["preemptions"],
            "retrieved_tokens": self.counts["loaded_tokens"],
            "stored_tokens": self.counts["stored_tokens"],
        }
        return {**self._asdict(), **counts, "violations": violations, "tested_nothing": self.tested_nothing}


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
    with applied(fixes, mode):
        from kvfix_tools.lab.play_schedule import play, shrink, signature
        from kvfix_tools.lab.run_log import COUNTED

        start, lacks = time.monotonic(), lacking()
        steps = played = 0
        counts, options = Counter(dict.fromkeys(COUNTED, 0)), Counter[str]()
        found: dict[str, list[Any]] = {}
        for seed in seeds:
            if steps >= most or time.monotonic() - start > seconds:
                break
            schedule = draw(seed, connector, plain, lacks)
            done = play(schedule)
            played += 1
            steps += done.steps
            counts.update(done.counts)
            options.update(schedule.options.changed)
            for finding in done.violations:
                found.setdefault(signature(finding), [0, seed, finding])[0] += 1
            progress(played, steps, len(found), time.monotonic() - start)
        took = time.monotonic() - start
        violations = []
        for wanted, (count, seed, finding) in sorted(found.items(), key=lambda item: -item[1][0]):
            schedule = draw(seed, connector, plain, lacks)
            if shrinking:
                schedule = shrink(schedule, wanted, shrinking)
                finding = next(each for each in play(schedule).findings if signature(each) == wanted)
            violations.append(Violation(finding.code, count, seed, str(finding), schedule, wanted))
    return Fuzzed(steps, played, round(took, 3), dict(options), dict(counts), violations)
