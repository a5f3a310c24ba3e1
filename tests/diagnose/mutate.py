"""Make damaged logs from lines of real logs, and diagnose them: `python -m tests.diagnose.mutate --count 100000`."""

import gzip
import io
import json
import random
import sys
import traceback
from functools import lru_cache

import typer
from rich.console import Console

from kvfix_tools.diagnose import log_files, report_json, report_text
from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.grammar import NEEDLES
from kvfix_tools.diagnose.line_scanner import Scanner
from tests.diagnose.lines import LOGS

RUBBISH = [
    b"\n", b"\r\n", b"\0", b"\x1b[31m", b"(EngineCore pid=1) ", b"] LMCache INFO: ", b"Reqid: ", b"9" * 5000, b"-",
    b"[" * 5000, b"AssertionError", b"AssertionError: Mismatch in tokens to load: ", b' File "", line 0, in f',
    b"assert ", b"%s",
    b"[2026-13-45 99:99:99,999] LMCache ERROR: ", b"Error: \n", b"pid=", b"()", b" LMCache DEBUG:", b"\xff\xfe",
    b'{"kind":"event","connector":[],"event":"Asked","request":7}', b'{"kind":"recorder","versions":[]}',
]  # fmt: skip


@lru_cache(maxsize=1)
def corpus() -> list[bytes]:
    """Return recorder.jsonl's lines and, from each real log, the first 20 and last 40 lines that match NEEDLES."""
    lines: list[bytes] = (LOGS / "recorder.jsonl").read_bytes().splitlines()
    for path in sorted(LOGS.glob("*.gz")):
        texts = gzip.decompress(path.read_bytes()).split(b"\n")
        found = [text for text in texts if any(needle in text for needle in NEEDLES)]
        lines += found[:20] + found[-40:]
    return lines


def draw(number: int) -> bytes:
    """Return the log with this number. To make a log again, pass the number that `main` printed."""
    dice = random.Random(f"0:{number}")
    lines = corpus()
    if dice.random() < 0.5:  # consecutive lines, so that the events of a request keep their order
        first = dice.randrange(len(lines))
        picked = lines[first : first + dice.randint(1, 40)]
    else:
        picked = dice.choices(lines, k=dice.randint(1, 25))
    log = dice.choice([b"\n", b"", b"\r\n"]).join(picked)
    if dice.random() < 0.2:
        return log[: dice.randrange(len(log) + 1)]
    for _ in range(dice.randrange(13)):
        at, many = dice.randrange(len(log) + 1), dice.randrange(400)
        piece = dice.choice([*RUBBISH, dice.randbytes(20)])
        changed = [
            log[:at] + log[at + many :],
            log[:at] + piece + log[at:],
            log[:at] + piece + log[at + len(piece) :],
            log[:at],
            log[at:] + log[: min(at, many)],
            log[:at] + log[max(0, at - many) :],
        ]
        log = dice.choice(changed)
    return log


def check(log: bytes, size: int = log_files.BLOCK) -> list[str]:
    diagnosis = Diagnosis(request="1-aa")
    scanner = Scanner()
    for block in log_files.blocks(log_files.Source("log", len(log)), io.BytesIO(log), size):
        for line in scanner.scan(block):
            diagnosis.take(line)
    for line in scanner.end():
        diagnosis.take(line)
    findings = diagnosis.end()
    json.loads(report_json.text(diagnosis, findings))
    report_text.print_all(diagnosis, findings, Console(file=io.StringIO(), force_terminal=True), True)
    assert report_text.page(diagnosis, findings).endswith("</html>\n")
    return [found.rule.code for found in findings]


def main(count: int = 1000, first: int = 0) -> None:
    """Read damaged logs. Exit 1 if reading fails for a log."""
    bad = 0
    for number in range(first, first + count):
        log = draw(number)
        try:
            check(log, (1 << 12, 1 << 16, log_files.BLOCK)[number % 3])
        except Exception:  # noqa: BLE001
            bad += 1
            print(f"log {number} ({len(log)} bytes):\n{traceback.format_exc()}", file=sys.stderr)
    print(f"{count} logs: {bad} were not read")
    sys.exit(bool(bad))


if __name__ == "__main__":
    typer.run(main)
