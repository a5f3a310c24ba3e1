"""Findings as workflow commands of GitHub Actions: annotations at the lines of the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfix_tools.diagnose.log_finding import LogFinding


def text(findings: list[LogFinding]) -> str:
    return "".join(_annotation(found) for found in findings)


def _annotation(found: LogFinding) -> str:
    """Return an error for a certain finding, a warning for an uncertain one, a notice for a note."""
    kind = "notice" if found.is_note else "error" if found.is_certain else "warning"
    at = f"file={_property(found.evidence[0].file)},line={found.evidence[0].line}," if found.evidence else ""
    title = _property(f"{found.rule.code} {found.rule.name}")
    return f"::{kind} {at}title={title}::{_data(f'{found.rule.title} {found.sentence}')}\n"


def _data(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _data(value).replace(":", "%3A").replace(",", "%2C")
