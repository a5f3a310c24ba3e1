"""Report a violation: log a line, and write a report and a recorder file. In mode `strict`, also raise an exception."""

import os
import re
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from kvfix import catalogue, engine_log, metrics, redact
from kvfix.catalogue import FixRow
from kvfix.connector_events import recorder
from kvfix.connector_events.recorder import Entry
from kvfix.ledger import Finding
from kvfix.ledger.events import Event, Raised
from kvfix.ledger.rules import RULES
from kvfix.session import session

if TYPE_CHECKING:
    from kvfix.connector_events.watched import WatchedConnector

#: Environment variable: path of a file of findings to suppress. Example lines: `KVR009`, `KVR009 _requests_prio*`.
SUPPRESS = "KVFIX_SUPPRESS"
#: A process writes at most DUMPS files for violations and exceptions, and at most one per kind in PAUSE seconds.
DUMPS, PAUSE = 16, 60.0
RULE = "=" * 80
#: A report shows at most this many events of the history.
LONGEST = 40


class Violation(Exception):
    """Raised in mode `strict` when a rule is violated. `finding` names the rule, the request and the events."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"kvfix {finding}")
        self.finding = finding


def report(watched: "WatchedConnector", hook: str, finding: Finding, error: Exception | None) -> None:
    """Report a violation in `watched`'s method `hook`. In mode `strict`, raise Violation, unless `hook` raised."""
    if _is_suppressed(finding):
        return
    session.violations[finding.code] = session.violations.get(finding.code, 0) + 1
    metrics.violated(finding.code)
    kind = f"{finding.code} {_without_numbers(finding.message)}"
    what = f"{finding} (in {hook} of {watched.name})."
    if _is_due(kind):
        fixes = engine_log.guarded("kvfix.catalogue", catalogue.rows_handling, finding) or []
        path = written(recorder.write, "violation", finding)
        path = path and written(_write, watched, hook, finding, fixes, path)
        handled = f" Fixed by {', '.join(f'{row.code} {row.slug}' for row in fixes)}." if fixes else ""
        engine_log.warning(what + handled + (f" Report: {path}" if path else ""))
    elif session.violations[finding.code] == 1:
        engine_log.warning(f"{what} No report: the limit of {DUMPS} per process is reached.")
    if session.mode == "strict" and error is None:
        raise Violation(finding)


def report_exception(watched: "WatchedConnector", hook: str, event: Raised) -> None:
    """Write a recorder file with the events before an exception. In mode `observe`, no rule checks the exception."""
    if _is_due(f"exception {hook} {_without_numbers(event.error)}"):
        path = written(recorder.write, "exception")
        if path:
            engine_log.warning(
                f"{event.where} of {watched.name} raises {event.error}. The events before the exception: {path}"
            )


def error_text(error: BaseException) -> str:
    """Return the type and the message of an exception. Shorten the message, and remove secrets and token ids."""
    text = redact.text(re.sub(r"[\[(]\s*\d+(,\s*\d+){7,}[^\])]*[\])]?", "[...]", str(error)[:2000]))
    return f"{type(error).__name__}: {text[:300]}".rstrip(": ")


def written(write: Callable[..., Any], *arguments: Any) -> str:
    """Call a function that writes a file and returns its path. If the function raises, log the error and return ""."""
    try:
        return str(write(*arguments))
    except OSError as error:
        engine_log.warning(f"no dump can be written ({error.strerror or error}): name another folder in KVFIX_DUMP_DIR")
    except Exception as error:  # noqa: BLE001
        engine_log.fault("kvfix.connector_events.recorder", error)
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
    """Read the findings to suppress. A line of the file is `CODE [PATTERN]`. A `#` begins a comment."""
    if not path:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].split(None, 1) for line in file]
    except (OSError, UnicodeDecodeError) as error:
        engine_log.warning(f"{SUPPRESS}={path} cannot be read ({error}): nothing is suppressed")
        return []
    return [(parts[0], parts[1].strip() if len(parts) > 1 else "*") for parts in lines if parts]


def _write(watched: "WatchedConnector", hook: str, finding: Finding, fixes: Sequence[FixRow], recording: str) -> str:
    """Write the report next to the recorder file. Return the report's path. Raises OSError."""
    entries = [entry for entry in recorder.snapshot() if entry.event.request == finding.request]
    text = compose(
        finding,
        [entry for entry in entries if entry.connector == watched.number],
        where=f"{hook} of {watched.name}{f' ({watched.role})' if watched.role else ''}, pid {os.getpid()}",
        holds=_holds(recorder.scheduler_state(), recorder.kept(watched)),
        fixes=[_fix(row) for row in fixes],
        recording=recording,
    )
    with recorder.folder() as folder:
        return recorder.write_file(folder, f"{os.path.basename(recording).removesuffix('.jsonl')}.txt", text.encode())


def compose(
    finding: Finding,
    history: list[Entry],
    where: str,
    holds: list[str],
    fixes: list[str],
    recording: str,
    who: Sequence[str] = (),
) -> str:
    """Return the report of a finding. who: the process of each history entry, if several processes wrote entries."""
    doc = next((rule.doc for rule in RULES if rule.code == finding.code), "").strip()
    whose = f"request {finding.request}" if finding.request else "the engine"
    parts = [
        RULE,
        f"kvfix: {finding.code} {finding.name}: {whose}",
        f"  {finding.message}",
        f"  in {where}",
        "",
        "The rule: " + doc.partition("\n")[0],
        "",
        "This event:",
        f"  {_at(history, finding.event)}{finding.event.text()}",
    ]
    if (earlier := finding.earlier) is not None:
        parts += ["", "The event contradicts this earlier event:", f"  {_at(history, earlier)}{earlier.text()}"]
    parts += ["", f"The history of {whose}, in seconds before its last event:", *_history(history, who)]
    parts += ["", *holds] if holds else []
    parts += ["", *(fixes or ["This installation of kvfix has no fix for this violation."])]
    parts += ["", f"Recorder: {recording}", f"  kvfix replay {recording}", summary(finding), RULE, ""]
    return "\n".join(parts)


def summary(finding: Finding) -> str:
    whose = f" request {finding.request}" if finding.request else ""
    return f"SUMMARY: kvfix {finding.code} {finding.name}{whose}: {finding.message}"


def _history(history: list[Entry], who: Sequence[str]) -> list[str]:
    if not history:
        return ["  (the recorder has no events of this request)"]
    shown, end = history[-LONGEST:], history[-1].mono
    left_out = [f"  ... {len(history) - len(shown)} before"] if len(history) > len(shown) else []
    lines = [f"  {(entry.mono - end) / 1e9:+9.3f}  {entry.event.text()}" for entry in shown]
    labels = [f"  [{label}]" for label in who[-LONGEST:]] or [""] * len(lines)
    return [*left_out, *map("".join, zip(lines, labels, strict=True))]


def _at(history: list[Entry], event: Event) -> str:
    found = next((entry for entry in reversed(history) if entry.event == event), None)
    return f"{(found.mono - history[-1].mono) / 1e9:+.3f} s, {found.hook}: " if found else ""


def _holds(scheduler: dict[str, int], kept: dict[str, int]) -> list[str]:
    lines = []
    if scheduler:
        free = f"{scheduler['free_blocks']} of {scheduler['blocks']} blocks free"
        lines.append(f"Scheduler: {scheduler['running']} running, {scheduler['waiting']} waiting, {free}")
    if kept:
        lines.append("Connector: " + ", ".join(f"{where} {count}" for where, count in kept.items()))
    return lines


def _fix(row: FixRow) -> str:
    why = row.reason
    texts = {
        "applied": "is applied in this process, but the rule was violated: please report this",
        "applicable": f"fixes this, but is not applied in this process ({why}). Use kvfix.apply() or kvfix run -- CMD",
        "opt-in": f"fixes this, but is opt-in. Run kvfix explain {row.code}, then kvfix run --plus {row.code} -- CMD",
    }
    return f"{row.code} {row.slug} {texts.get(row.verdict, f'may fix this; {row.verdict}: {why}')}"
