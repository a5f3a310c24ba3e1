"""The command: read, judge, show."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from kvfix_tools.diagnose import log_files, report_brief, report_html, report_json, report_perfetto, report_text
from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.timeline import Timeline

if TYPE_CHECKING:
    from kvfix_tools.diagnose.log_finding import LogFinding

#: Bytes of input from which on progress is shown.
_LONG = 32 << 20


def main(
    paths: list[str],
    json: bool = False,
    request: str = "",
    html: str = "",
    perfetto: str = "",
    everything: bool = False,
    brief: str = "",
    issue: str = "",
) -> int:
    """0 nothing found, 1 findings, 2 something could not be read, or written."""
    console = Console(highlight=False, soft_wrap=False)
    try:
        sources = log_files.sources(paths)
    except log_files.Unreadable as error:
        print(f"kvfix-diagnose: {error}", file=sys.stderr)
        return 2
    timeline = Timeline() if html or perfetto else None
    live = not json and not request and any(source.path == "-" for source in sources)

    def on_found(found: LogFinding) -> None:
        report_text.print_finding(log, found, console)

    log = Diagnosis(on_found if live else None, request, timeline)
    unreadable = _read(log, sources)
    findings = log.end()
    unwritten = _write(log, timeline, findings, html, perfetto)
    if brief not in ("", "-"):
        unwritten += _written(brief, report_brief.brief(log, findings))
    if issue:
        unwritten += _written(issue, report_brief.issue(log, findings))
    for reason in unreadable + unwritten:
        print(f"kvfix-diagnose: {reason}", file=sys.stderr)
    if brief == "-":
        print(report_brief.brief(log, findings), end="")
    elif json:
        print(report_json.text(log, findings))
    elif request:
        report_text.print_request(log, request, console)
    elif live:
        report_text.print_summary(log, findings, console)
    else:
        report_text.print_all(log, findings, console, everything)
    foreign = not findings and not log.counts and not log.debug
    if foreign:
        print(
            f"kvfix-diagnose: {report_text.not_recognised(log)}; "
            "give the engine's log (kubectl logs, docker logs, journalctl), or the excerpt with the error",
            file=sys.stderr,
        )
    return 2 if unreadable or unwritten or foreign else int(bool(findings))


def _read(log: Diagnosis, sources: list[log_files.Source]) -> list[str]:
    """What could not be read. Progress goes to stderr, for a person and long work only."""
    sizes = [source.size or 0 for source in sources]
    shown = sys.stderr.isatty() and sum(sizes) >= _LONG and not any(source.size is None for source in sources)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as progress:
        # How much comes out of what is packed is not known before.
        packed = any(source.packed for source in sources)
        task = progress.add_task("", total=None if packed else sum(sizes))
        try:
            return log_files.read(log, sources, lambda size: progress.advance(task, size))
        except KeyboardInterrupt:  # a stream is ended so; what was read counts
            return []


def _write(
    log: Diagnosis, timeline: Timeline | None, findings: list[LogFinding], html: str, perfetto: str
) -> list[str]:
    """The page and the trace, where they are asked for. What could not be written, each with its reason."""
    unwritten = []
    if html and timeline is not None:
        unwritten += _written(html, report_html.page(log, timeline, findings))
    if perfetto and timeline is not None:
        unwritten += _written(perfetto, report_perfetto.trace(log, timeline, findings))
    return unwritten


def _written(path: str, text: str) -> list[str]:
    """Write this text there; the reason if it cannot be."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        return [f"{path}: {error.strerror or error}; nothing was written there"]
    return []
