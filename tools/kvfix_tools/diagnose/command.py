"""The command: read, judge, show."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from kvfix_tools.diagnose import (
    log_files,
    report_brief,
    report_github,
    report_html,
    report_json,
    report_text,
)
from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.options import Format, Options, Refused
from kvfix_tools.diagnose.timeline import Timeline

if TYPE_CHECKING:
    from kvfix_tools.diagnose.log_finding import LogFinding

#: Bytes of input from which on progress is shown.
_LONG = 32 << 20
#: Exit code after Ctrl-C, as shells have it.
_INTERRUPTED = 130


def main(paths: list[str], options: Options = Options()) -> int:  # noqa: B008  (it is frozen)
    """Return 0: nothing found, 1: findings (--fail-on), 2: something could not be read or written, 130: interrupted."""
    try:
        sources = log_files.sources(paths)
        options.check([*paths, *(source.path for source in sources)])
    except (log_files.Unreadable, Refused) as error:
        _say(str(error))
        return 2
    console = Console(highlight=False, soft_wrap=False)
    timeline = Timeline() if options.html else None
    live = options.format is Format.text and not options.request and any(source.path == "-" for source in sources)

    def on_found(found: LogFinding) -> None:
        if options.is_chosen(found):
            report_text.print_finding(log, found, console)

    log = Diagnosis(on_found if live else None, options.request, timeline)
    try:
        unreadable = _read(log, sources)
        findings = options.chosen(log.end())
        unwritten = _write(log, timeline, findings, options)
        for reason in unreadable:
            _say(reason)
        if log.interrupted:
            _say(log.interrupted)
        _show(log, findings, console, options, live)
        sys.stdout.flush()
    except OSError as error:  # of standard output: a full disk, or a reader that has gone
        _give_up_stdout()
        if not isinstance(error, BrokenPipeError):
            _say(f"the report could not be written: {error.strerror or error}")
        return 2
    is_foreign = not findings and not log.counts and not log.debug
    if is_foreign and not log.interrupted:
        _say(
            f"{report_text.not_recognised(log)}; give the engine's log (kubectl logs, docker logs, journalctl). "
            "For a description in words: kvfix search"
        )
    if log.interrupted:
        return _INTERRUPTED
    return 2 if unreadable or unwritten or is_foreign else int(options.fails(findings))


def _say(text: str) -> None:
    print(f"kvfix-diagnose: {text}", file=sys.stderr)


def _give_up_stdout() -> None:
    """Python writes what is left when it ends, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show(log: Diagnosis, findings: list[LogFinding], console: Console, options: Options, live: bool) -> None:
    if options.brief == "-":
        print(report_brief.brief(log, findings), end="")
    elif options.format is Format.json:
        print(report_json.text(log, findings))
    elif options.format is Format.github:
        print(report_github.text(findings), end="")
    elif options.request:
        report_text.print_request(log, options.request, console)
    elif live:
        report_text.print_summary(log, findings, console)
    else:
        report_text.print_all(log, findings, console, options.everything)


def _read(log: Diagnosis, sources: list[log_files.Source]) -> list[str]:
    """Return what could not be read. Progress goes to stderr, for a person and long work only."""
    total = 0 if any(source.size is None for source in sources) else sum(source.size or 0 for source in sources)
    # How much comes out of what is packed is not known before.
    packed = any(source.packed for source in sources)
    shown = sys.stderr.isatty() and total >= _LONG
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as progress:
        task = progress.add_task("", total=None if packed else total)
        try:
            return log_files.read(log, sources, lambda size: progress.advance(task, size))
        except KeyboardInterrupt:
            of = f" of {total / 1e6:.0f}" if total and not packed else ""
            log.interrupted = f"interrupted after {log.bytes / 1e6:.0f}{of} MB: the findings are of this part"
            return []


def _write(log: Diagnosis, timeline: Timeline | None, findings: list[LogFinding], options: Options) -> bool:
    """Write the files that are asked for. Return True if one could not be written."""
    texts: dict[str, str] = {}
    if options.html and timeline is not None:
        texts[options.html] = report_html.page(log, timeline, findings)
    if options.brief not in ("", "-"):
        texts[options.brief] = report_brief.brief(log, findings)
    if options.issue:
        texts[options.issue] = report_brief.issue(log, findings)
    written = [_is_written(path, text) for path, text in texts.items()]
    return not all(written)


def _is_written(path: str, text: str) -> bool:
    """Write a file whole or not at all. What is no file (a pipe, /dev/stdout) is written as it is."""
    whole = Path(path) if os.path.exists(path) and not os.path.isfile(path) else Path(f"{path}.part")
    try:
        whole.write_text(text, encoding="utf-8")
        if whole != Path(path):
            whole.replace(path)
    except OSError as error:
        if whole != Path(path):
            whole.unlink(missing_ok=True)
        _say(f"{path}: {error.strerror or error}; nothing was written there")
        return False
    _say(f"wrote {path}")
    return True
