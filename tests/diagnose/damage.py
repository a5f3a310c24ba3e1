"""Every record's own log, as a paste damages it: of how many is the same code still the first finding?

    python -m tests.diagnose.damage [--every N] [--show DAMAGE]

Prints a table of every Nth sign; with --show those that this damage loses.

A finding is right if it is the one of the whole log; `vague` if a general record, an unknown failure or nothing takes
its place; wrong if it is another particular record.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

from kvfix_tools.diagnose import problems
from kvfix_tools.diagnose.problem import Problem
from kvfix_tools.diagnose.signs import Failed, Sign
from tests.diagnose.lines import codes, diagnose, stats
from tests.diagnose.sign_logs import shown

#: Another process of the same output, at work.
_OTHER = (
    '(APIServer pid=7) INFO:     10.0.0.7:40288 - "POST /v1/completions HTTP/1.1" 200 OK\n',
    stats(running=1, generation=3.0),
    "(VllmWorker rank=1 pid=9) INFO 12-03 01:24:37 [any.py:7] something that goes well\n",
)
#: What vLLM's logger and LMCache's put in front of a line.
_HEAD = re.compile(r"^(?:\(\w+ [^)]*pid=[^)]*\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
_FRAME = re.compile(r"^\[\d{4}-[^\]]*\] LMCache [A-Z]+: ?")


class Sample(NamedTuple):
    """ran: the line that says who ran, where the record needs it. lines: of the failure, without their breaks."""

    problem: Problem
    sign: Sign
    ran: str
    lines: list[str]

    @property
    def is_traceback(self) -> bool:
        return isinstance(self.sign, Failed)


def bare(line: str) -> str:
    return _FRAME.sub("", _HEAD.sub("", line))


def _wrapped(width: int) -> Callable[[list[str]], list[str]]:
    def wrap(lines: list[str]) -> list[str]:
        return [line[at : at + width] for line in lines for at in range(0, max(1, len(line)), width)]

    return wrap


def _mixed(lines: list[str]) -> list[str]:
    return [each for number, line in enumerate(lines) for each in (line, _OTHER[number % 3].rstrip("\n"))]


def _two_ranks(lines: list[str]) -> list[str]:
    other = [line.replace("pid=276", "pid=277") for line in lines]
    return [line for pair in zip(lines, other, strict=True) for line in pair]


def _boxed(lines: list[str]) -> list[str]:
    """As rich prints it at 120 columns."""
    text = [bare(line) for line in lines]
    frames = [each for each in text if each.startswith("  File")]
    inner = []
    for at, line in enumerate(text):
        found = re.match(r'  File "([^"]+)", line (\d+), in (\S+)', line)
        if found:
            inner += [f"{found[1]}:{found[2]} in {found[3]}", "", f"❱ {found[2]} │   {text[at + 1].strip()}", ""]
    box = [f"│ {line:<116} │" for line in inner]
    return (
        ["╭───────────── Traceback (most recent call last) ─────────────╮", *box, "╰" + "─" * 118 + "╯", text[-1]]
        if frames
        else text
    )


#: {name: (of tracebacks only, what it does to the lines)}
DAMAGES: dict[str, tuple[bool, Callable[[list[str]], list[str]]]] = {
    "whole": (False, lambda lines: lines),
    "without its first line": (True, lambda lines: lines[1:]),
    "without its last line": (True, lambda lines: lines[:-1]),
    "wrapped at 80": (False, _wrapped(80)),
    "wrapped at 100": (False, _wrapped(100)),
    "wrapped at 120": (False, _wrapped(120)),
    "bare, wrapped at 80": (False, lambda lines: _wrapped(80)([bare(line) for line in lines])),
    "quoted": (False, lambda lines: [f"> {line}" for line in lines]),
    "quoted twice, in a list": (False, lambda lines: [f"> > 1. {line}" for line in lines]),
    "without its prefix": (False, lambda lines: [bare(line) for line in lines]),
    "without prefix and blanks": (False, lambda lines: [bare(line).strip() for line in lines]),
    "its last two lines": (True, lambda lines: lines[-2:]),
    "its last two lines, bare": (True, lambda lines: [bare(line) for line in lines[-2:]]),
    "its exception alone": (True, lambda lines: lines[-1:]),
    "its exception alone, bare": (True, lambda lines: [bare(line) for line in lines[-1:]]),
    "its frames alone": (True, lambda lines: [bare(line) for line in lines[1:-1]]),
    "mixed with another process": (False, _mixed),
    "bare, mixed with another process": (False, lambda lines: _mixed([bare(line) for line in lines])),
    "of two ranks, mixed": (True, _two_ranks),
    "with line numbers": (False, lambda lines: [f"{7 + at:>5}  {line}" for at, line in enumerate(lines)]),
    "behind a container's name": (False, lambda lines: [f"vllm-0 | {bare(line)}" for line in lines]),
    "cut at 120": (False, lambda lines: [line[:120] for line in lines]),
    "with dots for its middle": (True, lambda lines: [lines[0], "...", *lines[-3:]]),
    "its blanks lost": (True, lambda lines: [re.sub(r"  +", " ", bare(line)) for line in lines]),
    "in a table": (False, lambda lines: [f"| {bare(line)} |" for line in lines]),
    "in one line": (True, lambda lines: [" ".join(bare(line) for line in lines)]),
    "in a title": (True, lambda lines: [f"[Bug]: {bare(lines[-1])}"]),
    "in backticks in prose": (True, lambda lines: [f"We get `{bare(lines[-1])}` after an hour of load."]),
    "boxed by rich": (True, _boxed),
}  # fmt: skip


@lru_cache(maxsize=8)
def samples(every: int) -> list[Sample]:
    """One of each sign whose own log has its record as the first finding."""
    found = []
    signs = [(each, sign) for each in problems.catalogue() for sign in each.shows]
    for problem, sign in signs:
        if crc32(repr(sign).encode()) % every:
            continue
        ran = (
            f"INFO 12-03 01:24:31 [factory.py:64] Creating v1 connector with name: {(*problem.connectors, '')[0]} and\n"
        )
        sample = Sample(problem, sign, ran if problem.named else "", shown(problem, sign).splitlines())
        if codes(diagnose(sample.ran + shown(problem, sign)))[:1] == [problem.code]:
            found.append(sample)
    return found


class Result(NamedTuple):
    sample: Sample
    #: right, vague, nothing, wrong
    verdict: str
    found: list[str]
    text: str


def results(name: str, every: int = 1) -> Iterator[Result]:
    of_tracebacks, damage = DAMAGES[name]
    for sample in samples(every):
        if of_tracebacks and not sample.is_traceback:
            continue
        text = sample.ran + "".join(f"{line}\n" for line in damage(sample.lines))
        found = codes(diagnose(text))
        yield Result(sample, _verdict(sample.problem, found), found, text)


def _verdict(problem: Problem, found: list[str]) -> str:
    if not found:
        return "nothing"
    if found[0] == problem.code:
        return "right"
    other = problems.find(found[0])
    return "vague" if other is None or other.general else "wrong"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--show", default="", help="print what this damage loses")
    options.add_argument("--every", type=int, default=1, help="of how many signs one is taken")
    given = options.parse_args()
    taken = samples(given.every)
    print(f"{len(taken)} signs of {len({each.problem.code for each in taken})} records")
    print(f"{'':34}{'signs':>7}{'right':>7}{'vague':>7}{'nothing':>9}{'wrong':>7}")
    for name in [given.show] if given.show else DAMAGES:
        done = list(results(name, given.every))
        counts = Counter(each.verdict for each in done)
        print(f"{name:34}{len(done):7}{counts['right']:7}{counts['vague']:7}{counts['nothing']:9}{counts['wrong']:7}")
        for each in done if given.show else ():
            if each.verdict != "right":
                print(f"\n{each.verdict}: {each.sample.problem.code} -> {each.found}\n{each.text}")


if __name__ == "__main__":
    main()
