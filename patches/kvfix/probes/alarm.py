"""What becomes of a finding: once it is in the log, a report and a dump are written, and in `strict` it is raised."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from kvfix import notice, redact
from kvfix.probes import metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfix.cures import Cure
    from kvfix.ledger import Finding
    from kvfix.ledger.events import Raised
    from kvfix.probes.watch import Watch

#: A file with a line for each finding that is known and not to be told: `KVR009` or `KVR009 _requests_priority*`.
SUPPRESS = "KVFIX_SUPPRESS"
#: Dumps of one process, and seconds between two about the same.
DUMPS, PAUSE = 16, 60.0

mode = "observe"
#: Weak references to the schedulers of this process that have done something.
schedulers: list[Callable[[], Any]] = []
#: Findings by rule, told or not.
found: Counter[str] = Counter()
_written: dict[str, float] = {}
_count = 0
_suppressed: list[tuple[str, str]] | None = None


class Violation(Exception):
    """Mode `strict`: an invariant of the KV-cache accounting was violated; `finding` says which, and how."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"kvfix {finding}")
        self.finding = finding


def restart() -> None:
    global _count, _suppressed
    _count, _suppressed = 0, None
    schedulers.clear()
    found.clear()
    _written.clear()


def ring(watch: Watch, hook: str, finding: Finding, error: Exception | None) -> None:
    """A rule was violated by what `hook` did. Raises Violation in `strict`, unless the hook raises already."""
    if _is_suppressed(finding):
        return
    found[finding.code] += 1
    metrics.violated(finding.code)
    kind = f"{finding.code} {_without_numbers(finding.message)}"
    if _is_due(kind):
        cures = _cures(finding)
        place = _guarded("violation", watch, hook, finding, cures)
        cured = f" Cured by {', '.join(f'{cure.code} {cure.slug}' for cure in cures)}." if cures else ""
        report = f" Report: {place}" if place else ""
        notice.warn(f"{finding} (in {hook} of {watch.name}).{cured}{report}")
    if mode == "strict" and error is None:
        raise Violation(finding)


def crash(watch: Watch, hook: str, event: Raised) -> None:
    """Mode `observe`: an exception leaves a hook. The record of what was before is kept."""
    if _is_due(f"exception {hook} {_without_numbers(event.error)}"):
        place = _guarded("exception", watch, hook, None, [])
        if place:
            notice.warn(f"{event.where} of {watch.name} raises {event.error}. What was before it: {place}")


def words_of(error: BaseException) -> str:
    """Type and message of an exception, short, without secrets and lists of numbers, which may be somebody's tokens."""
    text = redact.text(re.sub(r"[\[(]\s*\d+(,\s*\d+){7,}[^\])]*[\])]?", "[...]", str(error)[:2000]))
    return f"{type(error).__name__}: {text[:300]}".rstrip(": ")


def _cures(finding: Finding) -> list[Cure]:
    try:
        from kvfix import cures

        return cures.cures(finding)
    except Exception as error:  # noqa: BLE001
        notice.fault("kvfix.cures", error)
        return []


def _guarded(reason: str, watch: Watch, hook: str, finding: Finding | None, cures: list[Cure]) -> str:
    """Path of what was written; "" if that failed, which is said."""
    try:
        from kvfix.probes import dump

        return dump.write(reason, watch, hook, finding, cures)
    except OSError as error:
        cannot_write(error)
    except Exception as error:  # noqa: BLE001
        notice.fault("kvfix.probes.dump", error)
    return ""


def cannot_write(error: OSError) -> None:
    """Nothing can be written where dumps go."""
    notice.warn(f"no dump can be written ({error.strerror or error}): name another folder in KVFIX_DUMP_DIR")


def _is_due(kind: str) -> bool:
    global _count
    now = time.monotonic()
    if _count >= DUMPS or now - _written.get(kind, -PAUSE) < PAUSE:
        return False
    _written[kind] = now
    _count += 1
    return True


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9]+", "N", text)[:120]


def _is_suppressed(finding: Finding) -> bool:
    global _suppressed
    if _suppressed is None:
        _suppressed = _read(os.environ.get(SUPPRESS, ""))
    return any(code == finding.code and fnmatchcase(finding.message, words) for code, words in _suppressed)


def _read(path: str) -> list[tuple[str, str]]:
    """Lines `CODE [PATTERN]`; `#` begins a comment."""
    if not path:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].split(None, 1) for line in file]
    except (OSError, UnicodeDecodeError) as error:
        notice.warn(f"{SUPPRESS}={path} cannot be read ({error}): nothing is suppressed")
        return []
    return [(parts[0], parts[1].strip() if len(parts) > 1 else "*") for parts in lines if parts]
