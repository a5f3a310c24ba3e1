"""Run the kit on one connector: the scenarios, the fuzzer, and a verdict for each rule of the contract."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix_tools.conform.contract import RULES, SLUGS, of_finding
from kvfix_tools.conform.scenario import WITHOUT, scenarios
from kvfix_tools.lab.rules import WRONG_CONTENT, WRONG_TEXT

if TYPE_CHECKING:
    from kvfix.ledger import Finding
    from kvfix_tools.conform.player import Subject
    from kvfix_tools.lab.fuzz import Played
    from kvfix_tools.lab.options import Options

#: Seconds for each violation, and for all of them together.
_SHRINK, _SHRINK_ALL = 4.0, 30.0
OK, VIOLATED, NOT_APPLICABLE = "ok", "violated", "not applicable"


class Violation(NamedTuple):
    """rule: of the contract. code: of the lab's or the ledger's rule. where: scenario, or seed of the fuzzer.

    schedule: the steps that show it, the shortest found. options: of the lab's engine, where they are not as they come.
    """

    rule: str
    code: str
    where: str
    message: str
    schedule: list[str]
    options: dict[str, Any]
    history: list[str]


class Case(NamedTuple):
    """One scenario: its outcome, and why it says nothing."""

    name: str
    rule: str
    outcome: str
    reason: str
    seconds: float


class Verdict(NamedTuple):
    rule: str
    outcome: str
    reason: str


class Conformance(NamedTuple):
    """Of one connector. counts: of request_events.py, in scenarios and fuzzer. cannot: why it could not be run.

    stand_in: what of it is not its own.
    """

    connector: str
    cases: list[Case]
    violations: list[Violation]
    counts: dict[str, int]
    seeds: int
    steps: int
    seconds: float
    cannot: str = ""
    stand_in: str = ""

    @property
    def verdicts(self) -> list[Verdict]:
        return [self._verdict(rule.slug) for rule in RULES]

    @property
    def tested_nothing(self) -> str:
        """Why the run proves nothing of loads; "" if it does."""
        return "" if self.counts.get("loaded_tokens") else "no hit and no load took place: nothing is tested of loads"

    @property
    def exit_code(self) -> int:
        if self.violations:
            return 1
        return 2 if self.cannot or self.tested_nothing else 0

    def _verdict(self, slug: str) -> Verdict:
        broken = [each for each in self.violations if each.rule == slug]
        if broken:
            return Verdict(slug, VIOLATED, broken[0].message)
        cases = [case for case in self.cases if case.rule == slug]
        reasons = dict.fromkeys(case.reason for case in cases if case.outcome == NOT_APPLICABLE)
        proof = SLUGS[slug].proof
        if self.counts.get(proof) and (SLUGS[slug].codes or any(case.outcome == OK for case in cases)):
            return Verdict(slug, OK, "")
        why = "; ".join(reasons) or ("a violation of another rule ended it" if cases else WITHOUT[proof])
        return Verdict(slug, NOT_APPLICABLE, why)

    def as_json(self) -> dict[str, Any]:
        return {
            "connector": self.connector,
            "cannot": self.cannot,
            "stand_in": self.stand_in,
            "verdicts": [verdict._asdict() for verdict in self.verdicts],
            "violations": [violation._asdict() for violation in self.violations],
            "scenarios": [case._asdict() for case in self.cases],
            "counts": self.counts,
            "seeds": self.seeds,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "tested_nothing": self.tested_nothing,
        }


class Run:
    """One connector, scenario by scenario: pytest has each as a test. The choice of kvfix is in place before."""

    def __init__(self, subject: Subject, shrinking: float = _SHRINK_ALL) -> None:
        self.subject = subject
        self._shrinking = shrinking
        self.counts = Counter[str]()
        self.steps = 0
        #: {(rule, signature): violation}
        self.violations: dict[tuple[str, str], Violation] = {}
        self.cases: list[Case] = []
        self._lacks = subject.lacks()

    def can_start(self) -> None:
        """Raises what making the connector raises, in either role."""
        self.subject.start()

    def scenario(self, name: str) -> Case:
        """Play it. Its violations are among `violations`."""
        from kvfix_tools.conform import player

        scenario = next(each for each in scenarios() if each.name == name)
        start = time.monotonic()
        why = player.why_not(scenario, self._lacks)
        outcome = NOT_APPLICABLE
        if not why:
            schedule = player.of_scenario(scenario, self.subject)
            done = self._done(player.play(schedule))
            found = self._violations(scenario.name, scenario.rule, schedule, done, player.play)
            why = found[0].message if found else player.untested(scenario, done)
            outcome = VIOLATED if found else NOT_APPLICABLE if why else OK
        case = Case(name, scenario.rule, outcome, why, round(time.monotonic() - start, 2))
        self.cases.append(case)
        return case

    def seed(self, seed: int) -> list[Violation]:
        """What the fuzzer draws from this seed."""
        from kvfix_tools.conform import player
        from kvfix_tools.lab import fuzz

        schedule = player.drawn(seed, self.subject)
        done = self._done(fuzz.play(schedule))
        return self._violations(f"seed {seed}", "granted", schedule, done, fuzz.play)

    def _done(self, done: Played) -> Played:
        self.steps += done.steps
        self.counts.update(done.counts)
        return done

    def _violations(
        self, where: str, about: str, schedule: Any, done: Played, play: Callable[[Any], Played]
    ) -> list[Violation]:
        from kvfix_tools.conform import player
        from kvfix_tools.lab import fuzz

        made = []
        by_signature = {fuzz.signature(each): each for each in done.violations[::-1]}
        if any(found.code == WRONG_CONTENT.code for found in by_signature.values()):  # then the text is too
            by_signature = {each: found for each, found in by_signature.items() if found.code != WRONG_TEXT.code}
        for wanted, found in by_signature.items():
            rule = of_finding(found.code, about)
            if (rule, wanted) not in self.violations:
                start, most = time.monotonic(), min(self._shrinking, _SHRINK)
                steps, found, done = player.shortest(schedule, wanted, most, play, done)
                self._shrinking -= time.monotonic() - start
                self.violations[rule, wanted] = Violation(
                    rule, found.code, where, str(found), [_said(step) for step in steps],
                    _changed(schedule.options),
                    _history(done, found),
                )  # fmt: skip
            made.append(self.violations[rule, wanted])
        return made


def run(
    subject: Subject,
    seconds: float,
    seeds: Sequence[int],
    progress: Callable[[str], None] = lambda _: None,
    shrinking: float = _SHRINK_ALL,
) -> Conformance:
    """All scenarios, then the fuzzer for so many seconds, or until the seeds are out. shrinking: seconds, for all."""
    start = time.monotonic()
    try:
        playing = Run(subject, shrinking)
        progress("first engine")
        playing.can_start()
    except Exception as error:  # noqa: BLE001 - it is the connector's, and is said
        return Conformance(subject.connector, [], [], {}, 0, 0, time.monotonic() - start, _why(error))
    for scenario in scenarios():
        progress(scenario.name)
        playing.scenario(scenario.name)
    until, played = time.monotonic() + seconds, 0
    for seed in seeds:
        if time.monotonic() > until:
            break
        progress(f"seed {seed}")
        playing.seed(seed)
        played += 1
    counts = {name: number for name, number in playing.counts.items() if number}
    broken = list(playing.violations.values())
    took = time.monotonic() - start
    stand_in = subject.side.stand_in if subject.side is not None else ""
    return Conformance(subject.connector, playing.cases, broken, counts, played, playing.steps, took, stand_in=stand_in)


def _why(error: Exception) -> str:
    """What it says, in one line, and where in an installed package it was raised."""
    text = " ".join(str(error).split()) or "it says nothing"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    _, _, place = frame.filename.partition("/site-packages/")
    return f"{type(error).__name__}: {text[:240]}" + (f" ({place}:{frame.lineno})" if place else "")


def _changed(options: Options) -> dict[str, Any]:
    """What of the lab engine's options is not as it comes; of its side the connector's settings too."""
    settings = {**options.lmcache, **options.extra}
    return {name: getattr(options, name, settings.get(name)) for name in options.changed if name != "lose"}


def _said(step: Any) -> str:
    """A step of a scenario or of the fuzzer, as it is typed; long prompts by their length."""
    if not hasattr(step, "method"):
        return f"{step[0]}({', '.join(map(repr, step[1:]))})"
    given = [_short(each) for each in step.arguments]
    return f"{step.method}({', '.join(given + [f'{name}={_short(each)}' for name, each in step.keywords.items()])})"


def _short(value: Any) -> str:
    return f"<{len(value)} tokens>" if isinstance(value, list) and len(value) > 8 else repr(value)


def _history(done: Played, found: Finding) -> list[str]:
    """The last events of its request; of all, if it is about none."""
    of_all = not found.request
    events = [(step, event) for step, event in done.log if of_all or event.request in (found.request, "")]
    return [f"step {step}: {event.text()}" for step, event in events[-12:]]
