"""Logs as they come in: cut, glued, doubled, with rubbish in them. Reading each of them ends, and says something.

    python -m tests.diagnose.mutate --count 100000 [--first N] [--seed S]

The logs are made of lines of the real ones in logs/. Each has a number: one that fails is told by it, and comes again.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import sys
import time
import traceback
from functools import lru_cache
from pathlib import Path

from rich.console import Console

from kvfix_tools.diagnose import page, reader, report, scan, trace
from kvfix_tools.diagnose.case import Case
from kvfix_tools.diagnose.timeline import Timeline

LOGS = Path(__file__).parent / "logs"
RUBBISH = [
    b"\n", b"\r\n", b"\0", b"\x1b[31m", b"(EngineCore pid=1) ", b"] LMCache INFO: ", b"Reqid: ", b"9" * 5000, b"-",
    b"AssertionError", b"AssertionError: Mismatch in tokens to load: ", b' File "", line 0, in f', b"assert ", b"%s",
    b"[2026-13-45 99:99:99,999] LMCache ERROR: ", b"Error: \n", b"pid=", b"()", b" LMCache DEBUG:", b"\xff\xfe",
    b'{"kind":"event","connector":[],"event":"Asked","request":7}', b'{"kind":"recorder","versions":[]}',
]  # fmt: skip
JOINS = [b"\n", b"", b"\r\n"]
#: kind, place, how many bytes, what is put there
Change = tuple[int, int, int, bytes]


@lru_cache(maxsize=1)
def corpus() -> list[bytes]:
    """Lines of the real logs that mean something, and some between them."""
    lines: list[bytes] = (LOGS / "recorder.jsonl").read_bytes().splitlines()
    for path in sorted(LOGS.glob("*.gz")):
        block = gzip.decompress(path.read_bytes())
        spans = list(scan.spans(block))
        lines += [block[start:end] for start, end in spans[:20] + spans[-40:]]
    return lines


def mutated(log: bytes, changes: list[Change]) -> bytes:
    for kind, place, many, piece in changes:
        at = place % (len(log) + 1)
        if kind == 0:
            log = log[:at] + log[at + many :]
        elif kind == 1:
            log = log[:at] + piece + log[at:]
        elif kind == 2:
            log = log[:at] + piece + log[at + len(piece) :]
        elif kind == 3:
            log = log[:at]
        elif kind == 4:
            log = log[at:] + log[: min(at, many)]
        else:
            log = log[:at] + log[max(0, at - many) :]
    return log


def draw(seed: int, number: int) -> bytes:
    """The log of this number. A fifth of them are only cut off."""
    dice = random.Random(f"{seed}:{number}")
    lines = corpus()
    if dice.random() < 0.5:  # lines that follow one another in a real log tell a story
        first = dice.randrange(len(lines))
        picked = lines[first : first + dice.randint(1, 40)]
    else:
        picked = dice.choices(lines, k=dice.randint(1, 25))
    log = dice.choice(JOINS).join(picked)
    if dice.random() < 0.2:
        return log[: dice.randrange(len(log) + 1)]
    changes = [
        (dice.randrange(6), dice.randrange(10**6), dice.randrange(400), dice.choice([*RUBBISH, dice.randbytes(20)]))
        for _ in range(dice.randrange(13))
    ]
    return mutated(log, changes)


def check(log: bytes, size: int = reader.BLOCK) -> list[str]:
    """Read it, in blocks of this size, and put out all that can be. Answers the codes of what was found."""
    case = Case(watch="1-aa", timeline=Timeline())
    base = 1
    for block in reader.blocks(reader.Source("log", len(log)), io.BytesIO(log), size):
        case.take("log", base, scan.hits(block))
        base += block.count(b"\n")
    findings = case.end()
    json.loads(report.as_json(case, findings))
    report.print_all(case, findings, Console(file=io.StringIO(), force_terminal=True), True)
    assert page.page(case, findings).endswith("</html>\n")
    json.dumps(trace.events(case, findings))
    same_either_way(log)
    return [found.rule.code for found in findings]


def same_either_way(log: bytes) -> None:
    """Lines that are taken at one go are those found one by one; what is kept from the ledger changes nothing."""
    assert _known(scan.hits(log)) == _known(scan._others(log, scan.spans))
    lazy, eager = Case(), Case(timeline=Timeline())
    for each in (lazy, eager):
        each.take("log", 1, scan.hits(log))
    assert report.as_json(lazy, lazy.end()) == report.as_json(eager, eager.end())


def _known(hits: list[scan.Hit]) -> list[scan.Hit]:
    return [hit for hit in hits if hit[3] != scan.DEBUG]


def main() -> int:
    options = argparse.ArgumentParser(description="Reads mutated and truncated logs. Exit 1 if one is not read.")
    options.add_argument("--count", type=int, default=1000, help="how many logs")
    options.add_argument("--first", type=int, default=0, help="number of the first")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    start, told, bad = time.monotonic(), time.monotonic(), 0
    codes: dict[str, int] = {}
    size = 0
    for number in range(given.first, given.first + given.count):
        log = draw(given.seed, number)
        size += len(log)
        try:
            found = check(log, (1 << 12, 1 << 16, reader.BLOCK)[number % 3])
        except Exception:  # noqa: BLE001
            bad += 1
            print(f"log {number} of seed {given.seed} ({len(log)} bytes):\n{traceback.format_exc()}", file=sys.stderr)
            continue
        for code in found or ["nothing"]:
            codes[code] = codes.get(code, 0) + 1
        if time.monotonic() - told > 10:
            told = time.monotonic()
            done = number + 1 - given.first
            print(f"{done} of {given.count} logs, {done / (told - start):.0f} a second", file=sys.stderr)
    print(f"{given.count} logs, {size / 1e6:.0f} MB, {time.monotonic() - start:.0f} s: {bad} were not read")
    print("found: " + ", ".join(f"{code} {many}" for code, many in sorted(codes.items())))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
