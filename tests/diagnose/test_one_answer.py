import random
from functools import lru_cache

import pytest
from msgspec import structs

from kvfix_tools.diagnose import problems
from kvfix_tools.diagnose.diagnosis import Diagnosis, diagnosed
from tests.diagnose.lines import LOGS, finding_logs, real


@lru_cache(maxsize=1)
def known() -> list[bytes]:
    """Return the real engines' logs that show a problem, and the logs in finding_logs.toml that have a finding."""
    whole = [real(path.name.removesuffix(".log.gz")) for path in sorted(LOGS.glob("*.gz"))]
    failed = [log for log in whole if troubles(diagnosed(log))]
    return failed + [log.encode() for logs in finding_logs("found").values() for log in logs]


def troubles(log: Diagnosis) -> set[str]:
    return {found.rule.code for found in log.findings if not found.is_note}


def test_the_end_of_a_log_and_its_decisive_line_do_not_contradict_the_whole() -> None:
    """Each certain finding of the last 200 lines, or of the decisive line, is also a finding of the whole log."""
    for log in known():
        whole = diagnosed(log)
        lines = log.splitlines(keepends=True)
        decisive = whole.findings[0].evidence[:1] if whole.findings else []
        for part in [lines[-200:], *(lines[each.line - 1 : each.line] for each in decisive)]:
            certain = {
                found.rule.code
                for found in diagnosed(b"".join(part)).findings
                if found.is_certain and not found.rule.symptom and found.rule.name != "unknown-failure"
            }
            assert certain <= troubles(whole), (troubles(whole), part[-1][:200])


def shown(log: Diagnosis, codes: dict[str, str]) -> list[tuple[object, ...]]:
    return [
        (codes.get(found.rule.code, found.rule.code), found.verdict, found.severity, found.sentence, found.count,
         found.follows and codes.get(found.follows.rule.code, found.follows.rule.code))
        for found in log.findings
    ]  # fmt: skip


def test_other_codes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [shown(diagnosed(log), {}) for log in known()]
    records = problems.catalogue()
    codes = [each.code for each in records]
    numbers = random.Random(7).sample(range(2000, 10_000), len(codes))
    new = {code: f"KVD{number}" for code, number in zip(codes, numbers, strict=True)}
    renumbered = tuple(
        structs.replace(each, code=new[each.code], replaces=tuple(new.get(code, code) for code in each.replaces))
        for each in records
    )
    monkeypatch.setattr(problems, "catalogue", lambda: renumbered)
    for name, kept in vars(problems).items():
        if hasattr(kept, "cache_clear"):  # the function caches data of the records
            monkeypatch.setattr(problems, name, lru_cache(maxsize=None)(kept.__wrapped__))
    old = {code: each for each, code in new.items()}
    assert [shown(diagnosed(log), old) for log in known()] == before
    assert any(found[0] in new for log in before for found in log)
