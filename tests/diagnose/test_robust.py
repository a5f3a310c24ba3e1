"""Whatever happened to a log on its way, reading it ends, and says something. KVFIX_TEST_EXAMPLES sets how often."""

from __future__ import annotations

import gzip
import io
import json
import os
from functools import lru_cache
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvfix_tools.diagnose import page, reader, report, scan, trace
from kvfix_tools.diagnose.case import Case
from kvfix_tools.diagnose.timeline import Timeline

EXAMPLES = int(os.environ.get("KVFIX_TEST_EXAMPLES", "300"))


@lru_cache(maxsize=1)
def corpus() -> list[bytes]:
    """Lines of the real logs that mean something, and some between them."""
    lines: list[bytes] = []
    for path in sorted((Path(__file__).parent / "logs").glob("*.gz")):
        block = gzip.decompress(path.read_bytes())
        spans = list(scan.spans(block))
        lines += [block[start:end] for start, end in spans[:20] + spans[-40:]]
    return lines


RUBBISH = [
    b"\n", b"\r\n", b"\0", b"\x1b[31m", b"(EngineCore pid=1) ", b"] LMCache INFO: ", b"Reqid: ", b"9" * 5000, b"-",
    b"AssertionError", b"AssertionError: Mismatch in tokens to load: ", b' File "", line 0, in f', b"assert ", b"%s",
    b"[2026-13-45 99:99:99,999] LMCache ERROR: ", b"Error: \n", b"pid=", b"()", b" LMCache DEBUG:", b"\xff\xfe",
]  # fmt: skip
PIECES = st.one_of(st.binary(max_size=40), st.sampled_from(RUBBISH))
MUTATION = st.tuples(st.integers(0, 5), st.integers(0, 10**6), st.integers(0, 400), PIECES)


def mutated(log: bytes, changes: list[tuple[int, int, int, bytes]]) -> bytes:
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


def known(hits: list[scan.Hit]) -> list[scan.Hit]:
    return [hit for hit in hits if hit[3] != scan.DEBUG]


@given(
    picked=st.lists(st.integers(0, 10**6), min_size=1, max_size=25),
    changes=st.lists(MUTATION, max_size=12),
    join=st.sampled_from([b"\n", b"", b"\r\n"]),
)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_a_mutated_log_is_read_to_its_end(
    picked: list[int], changes: list[tuple[int, int, int, bytes]], join: bytes
) -> None:
    lines = corpus()
    log = mutated(join.join(lines[number % len(lines)] for number in picked), changes)
    case = Case(watch="1-aa", timeline=Timeline())
    source = reader.Source("log", len(log))
    base = 1
    for block in reader.blocks(source, io.BytesIO(log)):
        case.take("log", base, scan.hits(block))
        base += block.count(b"\n")
    findings = case.end()
    # Lines that are taken at one go are those that are found one by one.
    assert known(scan.hits(log)) == known(scan._others(log, scan.spans))
    # What is kept from the ledger until it is wanted changes nothing.
    lazy = Case()
    lazy.take("log", 1, scan.hits(log))
    eager = Case(timeline=Timeline())
    eager.take("log", 1, scan.hits(log))
    assert report.as_json(lazy, lazy.end()) == report.as_json(eager, eager.end())
    json.loads(report.as_json(case, findings))
    report.print_all(case, findings, Console(file=io.StringIO(), force_terminal=True), True)
    assert page.page(case, findings).endswith("</html>\n")
    json.dumps(trace.events(case, findings))


@given(log=st.binary(max_size=4000))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_any_bytes_at_all(log: bytes) -> None:
    case = Case()
    case.take("log", 1, scan.hits(log))
    case.end()
