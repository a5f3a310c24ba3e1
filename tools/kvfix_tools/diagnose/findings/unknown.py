"""Findings about a failure that no other rule and no specific record explains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose import checks, problems
from kvfix_tools.diagnose.failures import hook, is_cut, is_of_engine, owner
from kvfix_tools.diagnose.findings import Answer, Severity, finding
from kvfix_tools.diagnose.findings.server import Server

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: Added to an exception without a text and a traceback.
_CUT = ", without a message. The last lines of its traceback, before this line, show the cause"


@finding
def unknown_failure(log: Diagnosis, line: LogLine | None) -> Answer | None:
    first = _unexplained(log)
    if first is None or is_cut(first):
        return _only_the_end(log) if first is None else None
    heading = log.failures.heading if not first.fields.get("frames") else None
    general = problems.general(first) or (problems.general(heading) if heading is not None else None)
    answer = Answer(
        _sentence(log, first),
        request=str(first.fields.get("request", "")),
        verdict="violated" if general is None or general.sure else "unknown",
        evidence=_evidence(log, first),
        note=not _is_fatal(log, first),
    )
    if general is None:
        return answer
    log.add(general, answer, None)
    return None


@finding
def traceback_is_cut(log: Diagnosis, line: LogLine | None) -> Answer | None:
    first = _unexplained(log)
    if first is None or not is_cut(first):
        return None
    return Answer(_sentence(log, first), "", "unknown", _evidence(log, first), note=True)


def _unexplained(log: Diagnosis) -> LogLine | None:
    """Return the first error, if no finding explains it."""
    first = log.failures.first
    if first is None or first is log.state(Server).handler:
        return None
    known = [found for found in log.findings if not found.is_note]
    causes = [found for found in known if not found.rule.symptom]
    if any(found.severity is Severity.CRASH for found in known) or any(
        found.severity is Severity.HANG for found in causes
    ):
        return None
    # A finding that is more than a risk also explains an error that was only logged.
    said = first.name == "logged" or is_cut(first)
    return None if said and any(found.severity is not Severity.RISK for found in causes) else first


def _is_fatal(log: Diagnosis, first: LogLine) -> bool:
    """Return True if this error ended an engine, or if it happened in the connector."""
    if not log.who.engine:
        return False
    return log.failures.dead or (first.name == "raised" and is_of_engine(first))


def _only_the_end(log: Diagnosis) -> Answer | None:
    """Return an answer for a log without an error, from a quoted worker error or from the engine's death."""
    quoted, death = log.failures.quoted, log.failures.death
    if any(found.severity is Severity.CRASH for found in log.findings) or log.failures.first is not None:
        return None
    if quoted is not None:
        sentence = f"a worker raised an exception without a traceback in the log: {quoted.fields['text'][:200]}"
        answer = Answer(sentence, "", "unknown", (quoted.evidence,))
        known = [each for each in problems.at(quoted) if each.concerns(log)][:1] or problems.general(quoted)
    elif log.failures.dead and log.who.engine:
        sentence = "the engine died, and the log does not show why"
        answer = Answer(sentence, "")
        if death is not None:
            # This may be an orderly shutdown: if the log lacks its beginning, it has only this line of the API server.
            echo = b"EngineDeadError" in death.body or b"output_handler failed" in death.body
            shown = f"{sentence}: {death.evidence.text[:160]}"
            answer = Answer(shown, "", "unknown", (death.evidence,), note=echo)
        known = problems.general(death) if death is not None else None
    else:
        return None
    record = known[0] if isinstance(known, list) else known
    if record is None:
        return answer
    log.add(record, answer, None)
    return None


def _sentence(log: Diagnosis, line: LogLine) -> str:
    """Return a sentence with the error, the package of its code, and a note from the releases' code."""
    return _what(log, line) + checks.said_of(line, log.releases)


def _what(log: Diagnosis, line: LogLine) -> str:
    fields = line.fields
    if line.name == "died":
        return f"a process died: {line.evidence.text[:200]}"
    if line.name == "logged":
        return f"{fields['level']}: {line.evidence.text[:200]}"
    what = f"{fields['class'] or 'fatal error'}{': ' + fields['text'][:200] if fields['text'] else ''}"
    if not fields["frames"]:
        bare = f", `{fields['source']}`" if fields["source"] else "" if fields["text"] else _CUT
        return f"{what}{bare}"
    file, number, function = fields["frames"][-1]
    at = f":{number}" if number else ""  # a recorded exception has no line number
    parts = [f"{what} at {'/'.join(file.split('/')[-2:])}{at} in {function}"]
    if fields["source"]:
        parts.append(f"`{fields['source']}`")
    parts.append(f"raised by {owner(fields['frames'])}")
    if hook(fields["frames"]):
        connectors = ", ".join(sorted(log.who.connectors))
        parts.append(f"in the hook {hook(fields['frames'])}{' of ' + connectors if connectors else ''}")
    return ", ".join(parts)


def _evidence(log: Diagnosis, first: LogLine) -> tuple[object, ...]:
    """Return the error, then the last line of each process."""
    last = [line.evidence for line in log.failures.last.values() if line is not first]
    return (first.evidence, *last[:4])
