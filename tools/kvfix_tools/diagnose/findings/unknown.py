"""When a log ends, find failures that no other finding explains.

A failure is an unknown error, an engine that does not finish its start, or a server that answers with HTTP status 500.
"""

from kvfix_tools.diagnose import problems, statements
from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.failures import hook, is_cut, is_of_engine, owner
from kvfix_tools.diagnose.findings import Answer, Answers, Severity, decides, finding
from kvfix_tools.diagnose.findings.lookups import lookups_of
from kvfix_tools.diagnose.findings.server import Server
from kvfix_tools.diagnose.log_line import LogLine
from kvfix_tools.diagnose.problems import Problem

#: Kinds of lines that an engine logs only after it has started.
_STARTED = ("up", "engine_up", "stats", "asked", "stored", "moved", "answered_500", "closing", "recorded")
#: End of the sentence about an exception that has no message, and whose traceback kvfix could not read.
_CUT = ", without a message. The last lines of its traceback, before this line, show the cause"


@finding
def ended_at_its_buffer(log: Diagnosis, line: LogLine | None) -> Answer | None:
    if log.failures.first is not None or log.findings:
        return None
    last = [(process, at) for process, at in log.failures.last.items() if at.name in ("creating", "engine_configured")]
    goes_on = any(log.counts[name] for name in ("asked", "stored", "stats", "version"))
    if not last or (not log.failures.dead and (goes_on or len(last) < len(log.failures.last))):
        return None
    ranks = f"{len(last)} processes have" if len(last) > 1 else f"{last[0][0] or 'a process'} has"
    size = lookups_of(log).cpu_size
    if size and not float(size):
        return None  # LMCache is configured without a CPU buffer
    room = f"; {len(last)} times {size} GB are {len(last) * float(size):g} GB" if size else ""
    sentence = f"{ranks} no line after `Creating LMCacheEngine`{room}"
    return Answer(sentence, sure=False, evidence=tuple(at for _, at in last[:4]), note=not log.failures.dead)


@decides("answers-500-without-error", "start-without-an-end")
def no_error(log: Diagnosis, line: LogLine | None) -> Answers:
    if log.findings or log.failures.dead or log.failures.first is not None or not log.who.connectors:
        return
    answered, start = log.first.get("answered_500"), log.last.get("vllm_version")
    if answered is not None:
        sentence = f"{log.counts['answered_500']} requests were answered with 500"
        yield "answers-500-without-error", Answer(sentence, sure=False, evidence=(answered,))
    if start is not None and not any(log.counts[name] for name in _STARTED):
        sentence = "after `Initializing a V1 LLM engine`, no process has logged that its start is complete"
        yield "start-without-an-end", Answer(sentence, sure=False, evidence=(start,), note=True)


@finding
def unknown_failure(log: Diagnosis, line: LogLine | None) -> Answer | None:
    first = _unexplained(log)
    if first is not None and is_cut(first):
        return None
    known, answer = _of_error(log, first) if first is not None else _of_the_end(log)
    if known is None or answer is None:
        return answer
    log.add(known, answer, None)
    return None


def _of_error(log: Diagnosis, first: LogLine) -> tuple[Problem | None, Answer]:
    """Return (problem, answer) for the first error. problem: a known problem with `general = true`, or None."""
    heading = log.failures.heading if not first.fields.get("frames") else None
    general = problems.general(first) or (problems.general(heading) if heading is not None else None)
    return general, Answer(
        _sentence(log, first),
        request=str(first.fields.get("request", "")),
        sure=general is None or general.certain,
        evidence=_evidence(log, first),
        note=not _is_fatal(log, first),
    )


@finding
def traceback_is_cut(log: Diagnosis, line: LogLine | None) -> Answer | None:
    first = _unexplained(log)
    if first is None or not is_cut(first):
        return None
    return Answer(_sentence(log, first), "", sure=False, evidence=_evidence(log, first), note=True)


def _unexplained(log: Diagnosis) -> LogLine | None:
    """Return the first error of the log if no finding explains the error."""
    first = log.failures.first
    if first is None or first is log.state(Server).handler:
        return None
    known = [found for found in log.findings if not found.is_note]
    causes = [found for found in known if not found.rule.symptom]
    if any(found.severity is Severity.CRASH for found in known) or any(
        found.severity is Severity.HANG for found in causes
    ):
        return None
    # If the log lacks the exception of the first error, any finding except a symptom or a risk explains the error.
    said = first.name == "logged" or is_cut(first)
    return None if said and any(found.severity is not Severity.RISK for found in causes) else first


def _is_fatal(log: Diagnosis, first: LogLine) -> bool:
    """Return True if an engine died, or if an engine, a worker or a connector raised this exception."""
    if not log.who.engine:
        return False
    return log.failures.dead or (first.name == "raised" and is_of_engine(first))


def _of_the_end(log: Diagnosis) -> tuple[Problem | None, Answer | None]:
    """Return (problem, answer) if the log has no first error, but quotes a worker's exception or reports a death."""
    quoted, death = log.failures.quoted, log.failures.death
    if any(found.severity is Severity.CRASH for found in log.findings) or log.failures.first is not None:
        return None, None
    if quoted is not None:
        sentence = f"a worker raised an exception without a traceback in the log: {quoted.fields['text'][:200]}"
        known = next((each for each in problems.at(quoted) if each.concerns(log)), None) or problems.general(quoted)
        return known, Answer(sentence, "", sure=False, evidence=(quoted,))
    sentence = "the engine died, and the log does not show why"
    if not log.failures.dead or not log.who.engine:
        return None, None
    if death is None:
        return None, Answer(sentence, "")
    # The API server logs these texts in an orderly shutdown too, so a log with only these texts gives a note.
    echo = b"EngineDeadError" in death.body or b"output_handler failed" in death.body
    sentence = f"{sentence}: {death.evidence.text[:160]}"
    return problems.general(death), Answer(sentence, "", sure=False, evidence=(death,), note=echo)


def _sentence(log: Diagnosis, line: LogLine) -> str:
    """Return a sentence with the error, its package, the failed check, and the releases with this check."""
    return _what(log, line) + statements.said_of(line, log.releases.one)


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
    at = f":{number}" if number else ""  # kvfix's own record of an exception has no line number
    parts = [f"{what} at {'/'.join(file.split('/')[-2:])}{at} in {function}"]
    if fields["source"]:
        parts.append(f"`{fields['source']}`")
    parts.append(f"raised by {owner(fields['frames'])}")
    if hook(fields["frames"]):
        connectors = ", ".join(sorted(log.who.connectors))
        parts.append(f"in the hook {hook(fields['frames'])}{' of ' + connectors if connectors else ''}")
    return ", ".join(parts)


def _evidence(log: Diagnosis, first: LogLine) -> tuple[LogLine, ...]:
    return (first, *[line for line in log.failures.last.values() if line is not first][:4])
