"""Reports a violation: one line in the log, a report and a dump; in `strict` an exception."""

from __future__ import annotations

import os
import re
import time
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from kvfix import engine_log, fix_status, metrics, redact
from kvfix.connector_events import dump
from kvfix.connector_events import report as text_report
from kvfix.session import session

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from kvfix.connector_events.watched import WatchedConnector
    from kvfix.ledger import Finding
    from kvfix.ledger.events import Raised

#: Environment variable: path of a file. Each line has a finding to suppress: `KVR009` or `KVR009 _requests_priority*`.
SUPPRESS = "KVFIX_SUPPRESS"
#: Maximum dumps of one process, and seconds between two of the same kind.
DUMPS, PAUSE = 16, 60.0


class Violation(Exception):
    """Raised in mode `strict`: a rule of the KV-cache accounting is violated. `finding` has rule and arithmetic."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"kvfix {finding}")
        self.finding = finding


def report(watched: WatchedConnector, hook: str, finding: Finding, error: Exception | None) -> None:
    """Report that `hook` violated a rule. Raises Violation in mode `strict`, unless the hook itself has raised."""
    if _is_suppressed(finding):
        return
    session.violations[finding.code] = session.violations.get(finding.code, 0) + 1
    metrics.violated(finding.code)
    kind = f"{finding.code} {_without_numbers(finding.message)}"
    if _is_due(kind):
        fixes = engine_log.guarded("kvfix.fix_status", fix_status.handling, finding) or []
        path = written(dump.write, "violation", finding)
        path = path and written(text_report.write, watched, hook, finding, fixes, path)
        handled = f" Fixed by {', '.join(f'{row.code} {row.slug}' for row in fixes)}." if fixes else ""
        where = f" Report: {path}" if path else ""
        engine_log.warning(f"{finding} (in {hook} of {watched.name}).{handled}{where}")
    elif session.violations[finding.code] == 1:
        engine_log.warning(
            f"{finding} (in {hook} of {watched.name}). No report: the limit of {DUMPS} per process is reached."
        )
    if session.mode == "strict" and error is None:
        raise Violation(finding)


def report_exception(watched: WatchedConnector, hook: str, event: Raised) -> None:
    """In mode `observe`: write a recorder file with the events before an exception of a hook."""
    if _is_due(f"exception {hook} {_without_numbers(event.error)}"):
        path = written(dump.write, "exception")
        if path:
            engine_log.warning(
                f"{event.where} of {watched.name} raises {event.error}. The events before the exception: {path}"
            )


def error_text(error: BaseException) -> str:
    """Return type and message of an exception, short, without secrets and without long lists of numbers (token ids)."""
    text = redact.text(re.sub(r"[\[(]\s*\d+(,\s*\d+){7,}[^\])]*[\])]?", "[...]", str(error)[:2000]))
    return f"{type(error).__name__}: {text[:300]}".rstrip(": ")


def written(write: Callable[..., Any], *arguments: Any) -> str:
    """Call a function that writes a file and returns its path. If it raises, log the error and return ""."""
    try:
        return str(write(*arguments))
    except OSError as error:
        reason = error.strerror or error
        engine_log.warning(f"no dump can be written ({reason}): name another folder in KVFIX_DUMP_DIR")
    except Exception as error:  # noqa: BLE001
        engine_log.fault("kvfix.connector_events.dump", error)
    return ""


def _is_due(kind: str) -> bool:
    now = time.monotonic()
    if session.reports >= DUMPS or now - session.report_times.get(kind, -PAUSE) < PAUSE:
        return False
    session.report_times[kind] = now
    session.reports += 1
    return True


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9]+", "N", text)[:120]


def _is_suppressed(finding: Finding) -> bool:
    if session.suppressed is None:
        session.suppressed = _read(os.environ.get(SUPPRESS, ""))
    return any(code == finding.code and fnmatchcase(finding.message, words) for code, words in session.suppressed)


def _read(path: str) -> list[tuple[str, str]]:
    """Read lines `CODE [PATTERN]`; `#` begins a comment."""
    if not path:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].split(None, 1) for line in file]
    except (OSError, UnicodeDecodeError) as error:
        engine_log.warning(f"{SUPPRESS}={path} cannot be read ({error}): nothing is suppressed")
        return []
    return [(parts[0], parts[1].strip() if len(parts) > 1 else "*") for parts in lines if parts]
