"""The command: read, judge, show."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

from kvfix_tools.diagnose import reader, report, work
from kvfix_tools.diagnose.case import Case

if TYPE_CHECKING:
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
    """0 nothing found, 1 findings, 2 something could not be read."""
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
    for reason in unreadable:
        print(f"kvfix-diagnose: {reason}", file=sys.stderr)
    if html:
        from kvfix_tools.diagnose import page

        page.write(html, case, findings)
    if perfetto:
        from kvfix_tools.diagnose import trace

        trace.write(perfetto, case, findings)
    if json:
        print(report.as_json(case, findings))
    elif request:
        report.print_request(case, request, console)
    elif live:
        report.print_summary(case, findings, console)
    else:
        report.print_all(case, findings, console, everything)
    return 2 if unreadable else int(bool(findings))
