"""The sentence and the evidence for an error that no finding explains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose import checks
from kvfix_tools.diagnose.failures import hook, owner

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: Added to an exception without a text and a traceback.
_CUT = ", without a message. The last lines of its traceback, before this line, show the cause"


def sentence(log: Diagnosis, line: LogLine) -> str:
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
    at = f":{number}" if number else ""  # shortened frames in bug reports have no line number
    parts = [f"{what} at {'/'.join(file.split('/')[-2:])}{at} in {function}"]
    if fields["source"]:
        parts.append(f"`{fields['source']}`")
    parts.append(f"raised by {owner(fields['frames'])}")
    if hook(fields["frames"]):
        connectors = ", ".join(sorted(log.who.connectors))
        parts.append(f"in the hook {hook(fields['frames'])}{' of ' + connectors if connectors else ''}")
    return ", ".join(parts)


def evidence(log: Diagnosis, first: LogLine) -> tuple[object, ...]:
    """Return the error, then the last line of each process."""
    last = [line.evidence for line in log.failures.last.values() if line is not first]
    return (first.evidence, *last[:4])
