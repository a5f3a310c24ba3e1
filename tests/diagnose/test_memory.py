import gc
import types
from collections.abc import Iterator
from itertools import chain

import pytest

from kvfix_tools.diagnose import diagnosis, ledger_events, line_scanner
from kvfix_tools.diagnose.diagnosis import FINDINGS
from kvfix_tools.diagnose.findings import lookups
from tests.bench.diagnose import FIXTURES, lives

#: Types that `kept` does not count, because kvfix-diagnose creates no module, function or class when it reads a log.
CODE = (types.ModuleType, types.FunctionType, types.MethodType, type)


def kept(*roots: object) -> int:
    """Return the number of objects that can be reached from these roots."""
    seen = {id(root) for root in roots}
    waiting = list(roots)
    while waiting:
        for each in gc.get_referents(waiting.pop()):
            if id(each) not in seen and not isinstance(each, CODE):
                seen.add(id(each))
                waiting.append(each)
    return len(seen)


def requests(first: int, many: int) -> Iterator[bytes]:
    """Yield, for each request, lines of a lookup, a load and a warning, and the beginning of a worker's traceback."""
    for number in range(first, first + many):
        yield (
            b"[2026-11-21 11:22:55,512] LMCache INFO: Reqid: r%d, Total tokens 300, Inference Engine computed tokens: "
            b"0, LMCache hit tokens: 256, need to load: 256 (vllm_v1_adapter.py:1476:lmcache.integration)\n"
            b"[2026-11-21 11:22:55,518] LMCache INFO: [req_id=r%d] Retrieved 256 out of 256 required tokens "
            b"(from 256 total tokens). size: 0.0002 gb (cache_engine.py:985:lmcache.v1.cache_engine)\n"
            b"[2026-11-21 11:22:55,519] LMCache WARNING: no peer has heard of %d before\n"
            b"(Worker pid=%d) ERROR 11-21 11:22:55 [core.py:7] Traceback (most recent call last):\n"
            b'(Worker pid=%d) ERROR 11-21 11:22:55 [core.py:7]   File "x%d.py", line 7, in f\n'
        ) % ((number,) * 6)


def test_what_is_kept_of_a_log_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read about 50 MB. The test lowers kvfix's limits, and fails if even one object per request stays in memory."""
    for module in (diagnosis, ledger_events):
        monkeypatch.setattr(module, "REQUESTS", 200)
    for name in ("_REQUESTS", "_ENGINES"):
        monkeypatch.setattr(lookups, name, 50)
    log, scanner = diagnosis.Diagnosis(), line_scanner.Scanner()
    counted: list[int] = []
    size = 0
    for part in range(10):
        parts = [lives(name, 1 << 20, first=part * 100) for name in FIXTURES if "crash" not in name]
        for block in chain(*parts, requests(part * 3000, 3000)):
            size += len(block)
            for line in scanner.scan(block):
                log.take(line)
        counted.append(kept(log, scanner))
    assert size > 45e6
    assert log.requests.named > 30_000
    assert max(counted) < counted[0] + 10_000, counted


def test_crashes_without_end() -> None:
    log = diagnosis.diagnosed(b"".join(lives("crash-0.3.10", 36 << 20)))
    assert FINDINGS <= len(log._found) < FINDINGS + 10
    assert sum(found.count for found in log.findings if found.rule.code == "KVD101") == log.counts["fatal"]
    # A crashed request also violates a rule, but the violation is no separate finding, however many requests crash.
    assert {found.rule.code for found in log.findings} == {"KVD101"}
