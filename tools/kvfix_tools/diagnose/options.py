"""The options of `kvfix-diagnose`: format, selected findings, exit code, and output files."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Severity

if TYPE_CHECKING:
    from kvfix_tools.diagnose.log_finding import LogFinding

#: Every file that kvfix writes has one of these texts in its first lines.
_OURS = re.compile(rb"kvfix-diagnose|kvfix \d\S* read a log")
_CERTAIN = "certain"
_WORDS = {"wrong" if each is Severity.WRONG else each.word: each for each in Severity if each is not Severity.NOTE}
#: Values of --fail-on.
FAIL_ON = (_CERTAIN, *_WORDS)


class Format(enum.Enum):
    text = "text"
    json = "json"
    github = "github"


class Refused(Exception):
    """An option cannot be used. The text names the option, the reason, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options.

    brief: "-" or a file. select, ignore: codes or prefixes of codes. everything: show every finding in full.
    fail_on: `certain`, or the least severity for exit code 1. exit_zero: exit 0 even with findings.
    """

    format: Format = Format.text
    request: str = ""
    html: str = ""
    brief: str = ""
    issue: str = ""
    everything: bool = False
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str = _CERTAIN
    exit_zero: bool = False

    def chosen(self, findings: list[LogFinding]) -> list[LogFinding]:
        return [found for found in findings if self.is_chosen(found)]

    def is_chosen(self, found: LogFinding) -> bool:
        code = found.rule.code
        return (not self.select or code.startswith(self.select)) and not (self.ignore and code.startswith(self.ignore))

    def fails(self, findings: list[LogFinding]) -> bool:
        """Return True if the exit code is 1."""
        if self.exit_zero:
            return False
        if self.fail_on == _CERTAIN:
            return any(found.is_certain for found in findings)
        return any(found.severity.value <= _WORDS[self.fail_on].value for found in findings)

    def check(self, inputs: Iterable[str]) -> None:
        """Raise Refused for an unknown word, and for a file that must not be overwritten."""
        if self.fail_on not in FAIL_ON:
            raise Refused(f"--fail-on {self.fail_on}: give one of {', '.join(FAIL_ON)}")
        printed = [self.brief == "-", self.format is not Format.text, bool(self.request)]
        if sum(printed) > 1:
            raise Refused(
                "--brief -, --request and --format json or github print different outputs. Give only one of them"
            )
        named = [path for path in inputs if path != "-"]
        for path in (self.html, self.issue, self.brief):
            if not path or path == "-" or not os.path.isfile(path):
                continue
            if any(os.path.exists(each) and os.path.samefile(path, each) for each in named):
                raise Refused(f"{path} is an input. Nothing was read or written. Give another file for the output")
            if os.path.getsize(path) and not _is_ours(path):
                raise Refused(f"{path} exists, and kvfix did not write it. Remove it, or give another file")


def _is_ours(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return _OURS.search(file.read(400)) is not None
    except OSError:
        return False
