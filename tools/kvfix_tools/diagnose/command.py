"""The command: read, judge, show."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

from kvfix_tools.diagnose import reader, report, work
from kvfix_tools.diagnose.case import Case

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfix_tools.diagnose.seen import Found


def main(
    paths: list[str],
    json: bool = False,
    request: str = "",
    html: str = "",
    perfetto: str = "",
    everything: bool = False,
    jobs: int = 0,
) -> int:
    """0 nothing found, 1 findings, 2 something could not be read, or written."""
    console = Console(highlight=False, soft_wrap=False)
    try:
        sources = reader.sources(paths)
    except reader.Unreadable as error:
        print(f"kvfix-diagnose: {error}", file=sys.stderr)
        return 2
    timeline = None
    if html or perfetto:
        from kvfix_tools.diagnose.timeline import Timeline

        timeline = Timeline()
    live = not json and not request and any(source.path == "-" for source in sources)
    told: set[int] = set()

    def as_it_comes(found: Found) -> None:
        told.add(id(found))
        report.print_found(case, found, console)

    case = Case(on_found=as_it_comes if live else None, watch=request, timeline=timeline)
    progress = work.bar(sum(source.size or 0 for source in sources))
    try:
        unreadable = work.read(case, sources, jobs or work.cores(), progress)
    except KeyboardInterrupt:  # a stream is ended so; what was read counts
        unreadable = []
    findings = case.end()
    unwritten = _write(case, findings, html, perfetto)
    for reason in unreadable + unwritten:
        print(f"kvfix-diagnose: {reason}", file=sys.stderr)
    if json:
        print(report.as_json(case, findings))
    elif request:
        report.print_request(case, request, console)
    elif live:
        report.print_summary(case, findings, console)
    else:
        report.print_all(case, findings, console, everything)
    return 2 if unreadable or unwritten else int(bool(findings))


def _write(case: Case, findings: list[Found], html: str, perfetto: str) -> list[str]:
    """The page and the trace, where they are asked for. What could not be written, each with its reason."""
    from kvfix_tools.diagnose import page, trace

    reasons = [_attempt(page.write, html, case, findings), _attempt(trace.write, perfetto, case, findings)]
    return [reason for reason in reasons if reason]


def _attempt(write: Callable[[str, Case, list[Found]], None], path: str, case: Case, findings: list[Found]) -> str:
    try:
        if path:
            write(path, case, findings)
    except OSError as error:
        return f"{path}: {error.strerror or error}; nothing was written there"
    return ""
