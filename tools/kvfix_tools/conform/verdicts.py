"""Test one connector with the scenarios and the fuzzer. Give a verdict for each rule of the contract (contract.md)."""

import itertools
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix_tools.conform.scenarios import NEEDS, SCENARIOS, WITHOUT
from kvfix_tools.lab.engine.rules import WRONG_CONTENT, WRONG_TEXT
from kvfix_tools.lab.options import Options

if TYPE_CHECKING:
    from kvfix.ledger import Finding
    from kvfix_tools.conform.player import Subject
    from kvfix_tools.lab.fuzz.fuzz import Played
    from kvfix_tools.lab.fuzz.schedule import Schedule

_SHRINK, _SHRINK_ALL = 4.0, 30.0  # maximum seconds to shrink one schedule, and all schedules together
OK, VIOLATED, NOT_APPLICABLE = "ok", "violated", "not applicable"
NO_LOAD = "the connector had no hit and no load, so kvfix tested no loads"


class Rule(NamedTuple):
    """A rule of the contract. `of_finding` decides which rule a finding violates."""

    slug: str
    title: str
    doc: str
    proof: str  # name of a counter (counts.py). If the counter is 0, no scenario tested the rule
    codes: tuple[str, ...]  # codes of lab and ledger rules. A violation of a listed rule also violates this rule


_TEXT = Path(__file__).with_name("contract.md").read_text(encoding="utf-8")
_RULE = re.compile(r"## (\S+): (.+)\n\n((?:.+\n)+)\n- proof: (\w+)(?:\n- codes: (.+))?")
RULES = tuple(
    Rule(slug, title, doc, proof, tuple(codes.split())) for slug, title, doc, proof, codes in _RULE.findall(_TEXT)
)
SLUGS = {rule.slug: rule for rule in RULES}
#: Wrong KV in a scenario of one of these rules violates the rule. Wrong KV in any other scenario violates `granted`.
_OF_CONTENT = {
    "granted", "stored", "preempted", "aborted", "blocks-in-use", "failed-load", "reset", "groups", "ahead", "drafts",
    "restart",
}  # fmt: skip


def of_finding(code: str, about: str) -> str:
    """Return the rule that a finding violates. about: the rule that the scenario tests."""
    if code == "KVR011" and about == "parameters":  # KVR011 reports an exception, which `parameters` forbids
        return about
    return next((rule.slug for rule in RULES if code in rule.codes), about if about in _OF_CONTENT else "granted")


class Violation(NamedTuple):
    rule: str  # the violated rule of the contract
    code: str  # the code of the violated rule of the lab or the ledger
    where: str  # the name of the scenario, or the fuzzer seed
    message: str
    schedule: list[str]  # the shortest schedule that shows the violation
    options: dict[str, Any]  # options of the lab's engine that differ from their defaults
    history: list[str]


class Case(NamedTuple):
    name: str  # the name of the scenario
    rule: str
    outcome: str
    reason: str  # the violation, or why the scenario tested nothing
    seconds: float


class Verdict(NamedTuple):
    rule: str
    outcome: str
    reason: str


class Run:
    """The test of one connector, and its result. The caller applies fixes first. cannot: why the test cannot run."""

    def __init__(self, subject: "Subject", shrinking: float = _SHRINK_ALL) -> None:
        self.subject = subject
        self._shrinking = shrinking
        self.cases: list[Case] = []
        self.found: dict[tuple[str, str], Violation] = {}  # keys: (rule, signature)
        self.counts = Counter[str]()
        self.seeds = self.steps = 0
        self.seconds = 0.0
        self.cannot = ""

    @property
    def stand_in(self) -> str:
        return "" if self.cannot or self.subject.side is None else self.subject.side.stand_in

    @property
    def violations(self) -> list[Violation]:
        return list(self.found.values())

    @property
    def verdicts(self) -> list[Verdict]:
        return [self._verdict(rule.slug) for rule in RULES]

    @property
    def tested_nothing(self) -> str:
        """The reason why the run has tested no load, or "" if the run has tested a load."""
        return "" if self.counts.get("loaded_tokens") else NO_LOAD

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
        why = "; ".join(reasons) or ("a violation of another rule ended the scenarios" if cases else WITHOUT[proof])
        return Verdict(slug, NOT_APPLICABLE, why)

    def as_json(self) -> dict[str, Any]:
        return {
            "connector": self.subject.connector,
            "cannot": self.cannot,
            "stand_in": self.stand_in,
            "verdicts": [verdict._asdict() for verdict in self.verdicts],
            "violations": [violation._asdict() for violation in self.violations],
            "scenarios": [case._asdict() for case in self.cases],
            "counts": {name: number for name, number in self.counts.items() if number},
            "seeds": self.seeds,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "tested_nothing": self.tested_nothing,
        }

    def scenario(self, name: str) -> Case:
        from kvfix_tools.conform import player

        scenario = next(each for each in SCENARIOS if each.name == name)
        start = time.monotonic()
        why = next((NEEDS[need] for need in ("alone", *scenario.needs) if need in self.subject.lacks), "")
        outcome = NOT_APPLICABLE
        if not why:
            done, found = self._play(name, scenario.rule, self.subject.schedule(scenario), player.play)
            untested = (WITHOUT[count] for count in scenario.proof if not done.counts.get(count))
            why = found[0].message if found else next(untested, "")
            outcome = VIOLATED if found else NOT_APPLICABLE if why else OK
        case = Case(name, scenario.rule, outcome, why, round(time.monotonic() - start, 2))
        self.cases.append(case)
        return case

    def fuzz(self, seconds: float, seeds: Iterable[int], progress: Callable[[str], None] = lambda what: None) -> None:
        from kvfix_tools.conform import player
        from kvfix_tools.lab.fuzz import fuzz

        until = time.monotonic() + seconds
        for seed in itertools.takewhile(lambda _: time.monotonic() <= until, seeds):
            progress(f"seed {seed}")
            self._play(f"seed {seed}", "granted", player.drawn(seed, self.subject), fuzz.play)
            self.seeds += 1

    def _play(
        self, where: str, about: str, schedule: "Schedule", play: "Callable[[Schedule], Played]"
    ) -> "tuple[Played, list[Violation]]":
        """Play a schedule, and add its violations to `found`. Return what the lab recorded, and the violations."""
        from kvfix_tools.conform import player
        from kvfix_tools.lab.fuzz import fuzz

        made, done = [], play(schedule)
        self.steps += done.steps
        self.counts.update(done.counts)
        by_signature = {fuzz.signature(each): each for each in done.violations[::-1]}
        if any(found.code == WRONG_CONTENT.code for found in by_signature.values()):  # wrong KV causes wrong text
            by_signature = {each: found for each, found in by_signature.items() if found.code != WRONG_TEXT.code}
        for wanted, found in by_signature.items():
            rule = of_finding(found.code, about)
            if (rule, wanted) not in self.found:
                start, most = time.monotonic(), min(self._shrinking, _SHRINK)
                steps, found, shown = player.shortest(schedule, wanted, most, play, done)
                self._shrinking -= time.monotonic() - start
                self.found[rule, wanted] = Violation(
                    rule, found.code, where, str(found), [_said(step) for step in steps], _changed(schedule.options),
                    _history(shown, found),
                )  # fmt: skip
            made.append(self.found[rule, wanted])
        return done, made


def run(
    subject: "Subject",
    seconds: float,
    seeds: Iterable[int],
    progress: Callable[[str], None] = lambda what: None,
    shrinking: float = _SHRINK_ALL,
) -> Run:
    """Run all scenarios, then the fuzzer for `seconds`. shrinking: maximum seconds to shrink all schedules."""
    start, done = time.monotonic(), Run(subject, shrinking)
    try:
        progress("first engine")
        subject.start()
    except Exception as error:  # noqa: BLE001 - kvfix reports any error of the connector
        done.cannot = _why(error)
    else:
        for scenario in SCENARIOS:
            progress(scenario.name)
            done.scenario(scenario.name)
        done.fuzz(seconds, seeds, progress)
    done.seconds = time.monotonic() - start
    return done


def _why(error: Exception) -> str:
    """Return the error in one line. If a file of an installed package raised the error, name the file and the line."""
    text = " ".join(str(error).split()) or "no message"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    _, _, place = frame.filename.partition("/site-packages/")
    return f"{type(error).__name__}: {text[:240]}" + (f" ({place}:{frame.lineno})" if place else "")


def _changed(options: Options) -> dict[str, Any]:
    """Return the options of the lab, and the settings of the connector, that differ from the defaults."""
    settings = {**options.lmcache, **options.extra}
    return {name: getattr(options, name, settings.get(name)) for name in options.changed if name != "lose"}


def _said(step: Any) -> str:
    """Return a step as Python code. A long prompt appears as its length, without its tokens."""
    if not hasattr(step, "method"):
        return f"{step[0]}({', '.join(map(repr, step[1:]))})"
    given = [_short(each) for each in step.arguments]
    return f"{step.method}({', '.join(given + [f'{name}={_short(each)}' for name, each in step.keywords.items()])})"


def _short(value: Any) -> str:
    return f"<{len(value)} tokens>" if isinstance(value, list) and len(value) > 8 else repr(value)


def _history(done: "Played", found: "Finding") -> list[str]:
    """Return the last events of the finding's request, or of all requests if the finding has no request."""
    events = [each for each in done.log if not found.request or each[1].request in (found.request, "")]
    return [f"step {step}: {event.text()}" for step, event in events[-12:]]
