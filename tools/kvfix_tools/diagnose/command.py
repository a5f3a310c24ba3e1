"""The command `kvfix-diagnose`: read the inputs, find problems, print them."""

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

#: Minimum size of the input in bytes for a progress bar.
_LONG = 32 << 20
#: Exit code after Ctrl-C, as in shells.
_INTERRUPTED = 130


def main(paths: list[str], options: Options = Options()) -> int:  # noqa: B008  (Options is frozen)
    """Return 0 without findings, 1 with findings (--fail-on), 2 for a file error, 130 if interrupted."""
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
    except OSError as error:  # of standard output: the disk is full, or the reader has exited
        _give_up_stdout()
        if not isinstance(error, BrokenPipeError):
            _say(f"the report could not be written: {error.strerror or error}")
        return 2
    is_foreign = not findings and not log.counts and not log.debug
    if is_foreign and not log.interrupted:
        _say(
            f"{report_text.not_recognised(log)}. Give the engine's log (kubectl logs, docker logs, journalctl). "
            "For a description in words, run: kvfix search TEXT"
        )
    if log.interrupted:
        return _INTERRUPTED
    return 2 if unreadable or unwritten or is_foreign else int(options.fails(findings))


def _say(text: str) -> None:
    print(f"kvfix-diagnose: {text}", file=sys.stderr)


def _give_up_stdout() -> None:
    """Discard buffered output, because Python would write it at exit and fail again."""
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
    """Return the inputs that could not be read. A terminal shows progress for large inputs, on stderr."""
    total = 0 if any(source.size is None for source in sources) else sum(source.size or 0 for source in sources)
    # The unpacked size of a compressed file is not known in advance.
    packed = any(source.packed for source in sources)
    shown = sys.stderr.isatty() and total >= _LONG
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as progress:
        task = progress.add_task("", total=None if packed else total)
        try:
            return log_files.read(log, sources, lambda size: progress.advance(task, size))
        except KeyboardInterrupt:
            of = f" of {total / 1e6:.0f}" if total and not packed else ""
            log.interrupted = f"interrupted after {log.bytes / 1e6:.0f}{of} MB: the findings are about this part only"
            return []


def _write(log: Diagnosis, timeline: Timeline | None, findings: list[LogFinding], options: Options) -> bool:
    """Write the output files. Return True if one could not be written."""
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
    """Write a file whole or not at all. Write directly to a pipe or to /dev/stdout."""
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
