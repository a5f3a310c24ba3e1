"""Write findings for programs as JSON (see the schema in docs/diagnose.md) or as annotations of GitHub Actions."""

import json
from typing import Any

from kvfix_tools.diagnose import advice
from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.log_finding import LogFinding
from kvfix_tools.diagnose.report_text import versions

SCHEMA = 1


def text(log: Diagnosis, findings: list[LogFinding]) -> str:
    return json.dumps(
        {
            "schema": SCHEMA,
            "complete": log.is_complete,
            "findings": [_as_dict(log, found) for found in findings],
            "hidden": [{"rule": rule, "what": what, "shown_by": how} for rule, what, how in log.hidden()],
            "unknown": dict(log.unknowns),
            "versions": versions(log),
            "counts": dict(sorted(log.counts.items())),
            "bytes": log.bytes,
        },
        indent=2,
    )


def _as_dict(log: Diagnosis, found: LogFinding) -> dict[str, Any]:
    rule = found.rule
    now, good = advice.remedy(log, found)
    return {
        "code": rule.code,
        "name": rule.name,
        "severity": found.severity.name.lower(),
        "verdict": found.verdict,
        "follows": found.follows.rule.code if found.follows is not None else None,
        "general": found.rule.general,
        "title": rule.title,
        "sentence": found.sentence,
        "request": found.request or None,
        "count": found.count,
        "first": found.first,
        "last": found.last,
        "story": [event._asdict() for event in found.history],
        "ledger": [{"rule": each.code, "name": each.name, "message": each.message} for each in found.violated],
        "evidence": [line._asdict() for line in found.evidence],
        "cause": advice.cause(log, found),
        "remedy": [each._asdict() for each in advice.advice(log, found)],
        "do_now": now,
        "for_good": good,
    }


def github(findings: list[LogFinding]) -> str:
    """Return GitHub Actions workflow commands, which annotate lines of the log."""
    return "".join(_annotation(found) for found in findings)


def _annotation(found: LogFinding) -> str:
    kind = "notice" if found.is_note else "error" if found.is_certain else "warning"
    at = f"file={_property(found.evidence[0].file)},line={found.evidence[0].line}," if found.evidence else ""
    title = _property(f"{found.rule.code} {found.rule.name}")
    return f"::{kind} {at}title={title}::{_data(f'{found.rule.title} {found.sentence}')}\n"


def _data(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _data(value).replace(":", "%3A").replace(",", "%2C")
