"""Raise errors at random lines of fixes while the lab runs an engine. Run `python -m tests.lab.faults DRAWS`."""

import ast
import functools
import inspect
import itertools
import json
import linecache
import random
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import typer

from kvfix import metrics, wrapping
from kvfix_tools.lab import runner
from kvfix_tools.lab.fuzz.schedule import draw
from kvfix_tools.lab.scenario import Scenario, find
from tests import late

Function = Callable[..., Any]
#: (path of a source file, line number)
Line = tuple[str, int]


class Fault(Exception):
    """The error that this module raises in the code of a fix."""


class Plan:
    """Counts how often each line of the fix `code` runs. Raises in run `time` of `line`. always: also in later runs."""

    def __init__(self, code: str = "", line: Line | None = None, time: int = 0, always: bool = False) -> None:
        self.code, self.line, self.time, self.always = code, line, time, always
        self.lines: Counter[Line] = Counter()
        self.raised = 0
        self.inner = False
        self.entered: set[tuple[Any, int]] = set()

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        if self.inner and frame.f_back is not None and frame.f_back.f_globals.get("__name__") == __name__:
            return None  # the engine calls this fix function, so raise only in functions that the fix function calls
        return self.at if frame.f_globals.get("__name__", "").startswith("kvfix.fixes.") else None

    def at(self, frame: Any, event: str, _: Any) -> Any:
        where = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not self._is_passed(frame, where):
            self.lines[where] += 1
            times = self.lines[where]
            if where == self.line and (times == self.time or (self.always and times > self.time)):
                self.raised += 1
                raise Fault("drawn by the lab")
        return self.at

    def _is_passed(self, frame: Any, where: Line) -> bool:
        """Return True for `try:`, a line of `_cannot_fail`, and a `with` line that runs again when its block ends."""
        text = linecache.getline(*where).strip()
        if text == "try:" or where[1] in _cannot_fail(where[0]):
            return True
        if not text.startswith("with "):
            return False
        is_entered = (frame, where[1]) in self.entered
        self.entered.add((frame, where[1]))
        return is_entered


PLAN = Plan()


@contextmanager
def planned(*plan: Any) -> Iterator[None]:
    PLAN.__init__(*plan)  # type: ignore[misc]
    try:
        yield
    finally:
        PLAN.__init__()  # type: ignore[misc]


#: A statement with only these nodes of `ast` cannot raise.
_SAFE = (
    ast.Return, ast.Expr, ast.Assign, ast.Name, ast.Constant, ast.Yield, ast.Tuple, ast.expr_context, ast.Pass,
    ast.Continue, ast.Break, ast.FunctionDef, ast.arguments, ast.arg,
)  # fmt: skip


@functools.cache
def _cannot_fail(file: str) -> frozenset[int]:
    """Return the numbers of lines that cannot raise, and of lines in `finally` blocks, which must restore objects."""
    tree = ast.parse("".join(linecache.getlines(file)))
    safe = [each for node in ast.walk(tree) if isinstance(node, ast.Try) for each in node.finalbody]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            safe.append(ast.Pass(lineno=node.lineno, end_lineno=node.lineno))
        elif isinstance(node, ast.stmt) and all(isinstance(each, _SAFE) for each in ast.walk(node)):
            safe.append(node)
    return frozenset(line for each in safe for line in range(each.lineno, (each.end_lineno or 0) + 1))


@contextmanager
def traced(inner: bool) -> Iterator[None]:
    before = sys.gettrace(), PLAN.inner
    PLAN.inner = inner
    sys.settrace(PLAN.trace)
    try:
        yield
    finally:
        sys.settrace(before[0])
        PLAN.inner = before[1]


def raising(code: str, function: Function, inner: bool = False) -> Function:
    """Wrap a function of the fix `code`, so that PLAN may raise there. inner: True if the engine calls the function."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if code != PLAN.code:
            return function(*args, **kwargs)
        with traced(inner):
            answer = function(*args, **kwargs)
        return _steps(answer, inner) if inspect.isgenerator(answer) else answer

    return call


def _steps(steps: Generator[Any, Any, Any], inner: bool) -> Generator[Any, Any, Any]:
    sent = None
    while True:
        try:
            with traced(inner):
                got = steps.send(sent)
        except StopIteration as done:
            return done.value
        try:
            sent = yield got
        except GeneratorExit:
            with traced(inner):
                steps.close()
            raise


def install() -> None:
    """Replace functions of `kvfix.wrapping`, so that PLAN can raise in fixes. Call `install` before importing fixes."""
    assert "kvfix.fixes.api" not in sys.modules, "a fix is loaded"
    for name in ("before", "after", "around"):
        setattr(wrapping, name, _with_faults(getattr(wrapping, name)))
    replaced, view = wrapping.replaced, wrapping.View

    def replaced_with(owner: Any, **attributes: Any) -> Any:
        return replaced(owner, **{name: _inner(each) for name, each in attributes.items()})

    class View(view):  # type: ignore[misc, valid-type]
        def __init__(self, own: Any, **instead: Any) -> None:
            super().__init__(own, **{name: _inner(each) for name, each in instead.items()})

    wrapping.replaced, wrapping.View = replaced_with, View  # type: ignore[misc, assignment]


def _inner(value: Any) -> Any:
    """Wrap a fix's function, because the engine itself will call the function. Return any other value unchanged."""
    is_traced = getattr(sys.gettrace(), "__self__", None) is PLAN
    is_code = inspect.isfunction(value) and value.__module__.startswith("kvfix.fixes.")
    return raising(PLAN.code, value, inner=True) if is_traced and is_code else value


def _with_faults(wrap: Function) -> Function:
    def with_faults(code: Function, when: Function | None = None, **more: Any) -> Any:
        def wrapper(function: Function) -> Any:
            fix = metrics.composing.key
            return wrap(raising(fix, code), raising(fix, when) if when is not None else None, **more)(function)

        return wrapper

    return with_faults


#: If a fix with `on_fault` "closed" fails, the lab may report a short load, a missing store or a missing hit.
CLOSED = ("LAB002", "LAB004", "LAB006")
#: If one of these fixes fails, prefill writes nothing, and decode still waits for its load when the schedule ends.
UNTIL_TIMEOUT = ("KVF321", "KVF322", "KVF323", "KVF352")


class Case(NamedTuple):
    """A schedule. `play` plays the schedule, and returns an object with `findings`. opt_in: opt-in fixes to apply."""

    name: str
    play: Function
    opt_in: tuple[str, ...] = ()

    def findings(self, fixes: bool = True, skipped: str = "") -> Any:
        """Play the case with or without fixes, and return the findings. skipped: code of a fix that is not applied."""
        with runner.applied(fixes, only=[code for code in runner.played(*self.opt_in) if code != skipped]):
            return self.play().findings


def of_scenario(scenario: Scenario) -> Case:
    return Case(scenario.slug, scenario.played, scenario.fixes)


def cases(fix: Any, seeds: int = 0) -> list[Case]:
    """Return the applicable scenarios of the fix, and `seeds` random schedules for each connector of the scenarios."""
    known = [scenario for scenario in map(find, fix.scenarios) if scenario is not None]
    found = [scenario for scenario in known if runner.expected(scenario) != "not-applicable"]
    connectors = dict.fromkeys(scenario.options.connector for scenario in found)
    drawn = [(seed, connector) for connector in connectors for seed in range(seeds)]
    schedules = [Case("seed {} of {}".format(*each), lambda each=each: late.play(draw(*each))) for each in drawn]
    return [*map(of_scenario, found), *schedules]


class Counted(NamedTuple):
    case: Case
    released: frozenset[str]
    lines: dict[Line, int]


def counted(fix: Any, case: Case) -> Counted:
    """Play the case without and with the fix. Return the codes found without the fix, and the runs of each fix line."""
    released = frozenset(found.code for found in (*case.findings(False), *case.findings(skipped=fix.code)))
    with planned(fix.code):
        case.findings()
        return Counted(case, released, dict(PLAN.lines))


def outcome(fix: Any, counted: Counted, line: Line, time: int, always: bool) -> str:
    """Play the case, and raise at `line`. Return a message if a finding is not allowed, else ""."""
    with planned(fix.code, line, time, always):
        found = counted.case.findings()
        raised = PLAN.raised
    is_closed = fix.on_fault == "closed"
    allowed = (counted.released | {"LAB007"} | set(CLOSED if is_closed else ())) - set(["LAB001"] if is_closed else ())
    if fix.code in UNTIL_TIMEOUT:
        allowed |= {"LAB003"}
    worse = [str(each) for each in found if each.code not in allowed]
    if raised and not any(each.code == "LAB007" for each in found):
        worse.append("the fault is not counted")
    where = f"{line[0].rpartition('/')[2]}:{line[1]} {'always from' if always else 'at'} time {time}"
    return f"{fix.code} {counted.case.name} {where}: {worse}" if worse else ""


def faults(draws: int, seed: int = 0, seeds: int = 0, only: Sequence[str] = (), say: Function = lambda _: None) -> Any:
    """Raise at random lines of each fix that has scenarios. Return the draws per fix, and the messages of `outcome`."""
    install()
    from kvfix import catalogue

    chance, done, worse = random.Random(seed), Counter[str](), []
    for fix in (each for each in catalogue.fixes() if not only or each.code in only):
        of_all = (counted(fix, case) for case in cases(fix, seeds))
        plays = list(itertools.islice((each for each in of_all if each.lines), (draws + 1) // 2))  # two draws a play
        for number in range(draws if plays else 0):
            play = plays[number % len(plays)]
            line = chance.choice(sorted(play.lines))
            came = outcome(fix, play, line, chance.randint(1, play.lines[line]), chance.random() < 0.5)
            done[fix.code] += 1
            if came:
                worse.append(came)
                say(came)
        say(f"{fix.code}: {done[fix.code]} draws, {sum(len(play.lines) for play in plays)} lines in {len(plays)} plays")
    return {"draws": dict(done), "worse": worse}


def main(draws: int, seed: int = 0, seeds: int = 4, only: str = "", lmcache_path: str | None = None) -> None:
    """Raise at `draws` random lines of each fix, and print each outcome that is worse than without the fix."""
    runner.prepare(lmcache_path)
    with runner.quiet():
        found = faults(draws, seed, seeds, tuple(filter(None, only.split(","))), functools.partial(print, flush=True))
    print(json.dumps({"draws": sum(found["draws"].values()), "worse": len(found["worse"])}))
    raise SystemExit(bool(found["worse"]))


if __name__ == "__main__":
    typer.run(main)
