"""One situation has one answer: in a whole log, in its end and in its decisive line."""

from __future__ import annotations

import gzip

from kvfix_tools.diagnose.diagnosis import Diagnosis, diagnosed
from tests.diagnose.finding_logs import hits
from tests.diagnose.test_real_logs import LOGS


def troubles(log: Diagnosis) -> list[str]:
    return [found.rule.code for found in log.findings if not found.is_note]


def test_the_end_of_a_log_and_its_decisive_line_do_not_contradict_the_whole() -> None:
    """A certain finding in a part is found in the whole. A symptom, or an unknown line, is no contradiction."""
    real = [gzip.decompress(path.read_bytes()) for path in sorted(LOGS.glob("*.gz"))]
    failing = [log for log in real if troubles(diagnosed(log))]
    for log in failing + [log.encode() for logs in hits().values() for log in logs]:
        whole = diagnosed(log)
        lines = log.splitlines(keepends=True)
        parts = [
            lines[-200:],
            *(lines[each.line - 1 : each.line] for found in whole.findings[:1] for each in found.evidence[:1]),
        ]
        for part in parts:
            certain = [
                found.rule.code
                for found in diagnosed(b"".join(part)).findings
                if found.is_certain and not found.rule.symptom and found.rule.name != "unknown-failure"
            ]
            assert set(certain) <= set(troubles(whole)), (troubles(whole), part[-1][:200])
