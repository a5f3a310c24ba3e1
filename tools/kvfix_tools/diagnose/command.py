"""The command `kvfix-diagnose`: check the options, read the inputs, find problems and print the findings."""

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from kvfix_tools.diagnose import log_files, report_brief, report_json, report_text
from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.log_finding import LogFinding

#: Matches the first 400 bytes of each file that kvfix-diagnose wrote. kvfix overwrites only empty or matching files.
_OURS = re.compile(rb"kvfix-diagnose|kvfix \d\S* read a log")
FORMATS = ("text", "json", "github")
_CERTAIN = "certain"
_WORDS = {"wrong" if each is Severity.WRONG else each.word: each for each in Severity if each is not Severity.NOTE}
FAIL_ON = (_CERTAIN, *_WORDS)
_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command.

    brief: a file, or "-" for standard output. select, ignore: finding codes or prefixes of codes. everything: --all.
    fail_on: the mildest severity that causes exit code 1, or `certain` for certain findings. exit_zero: no exit code 1.
    """

    format: str = "text"
    request: str = ""
    html: str = ""
    brief: str = ""
    issue: str = ""
    everything: bool = False
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str = _CERTAIN
    exit_zero: bool = False

    def is_chosen(self, found: LogFinding) -> bool:
        code = found.rule.code
        return (not self.select or code.startswith(self.select)) and not (self.ignore and code.startswith(self.ignore))

    def fails(self, findings: list[LogFinding]) -> bool:
        """Return True if these findings cause exit code 1."""
        if self.exit_zero:
            return False
        if self.fail_on == _CERTAIN:
            return any(found.is_certain for found in findings)
        return any(found.severity.value <= _WORDS[self.fail_on].value for found in findings)

    def check(self, inputs: Iterable[str]) -> None:
        """Raise log_files.Refused for a wrong value, a wrong combination, or a file that kvfix must not overwrite."""
        if self.fail_on not in FAIL_ON:
            raise log_files.Refused(f"--fail-on {self.fail_on}: give one of {', '.join(FAIL_ON)}")
        printed = [self.brief == "-", self.format != "text", bool(self.request)]
        if sum(printed) > 1:
            raise log_files.Refused("give only one of `--brief -`, `--request`, `--format json`, `--format github`")
        named = [path for path in inputs if path != "-"]
        for path in (self.html, self.issue, self.brief):
            if not path or path == "-" or not os.path.isfile(path):
                continue
            if any(os.path.exists(each) and os.path.samefile(path, each) for each in named):
                raise log_files.Refused(f"{path} is an input. Nothing was read or written. Name another output file")
            if os.path.getsize(path) and not _is_ours(path):
                raise log_files.Refused(f"{path} exists, and kvfix did not write it. Remove it, or give another file")


def main(paths: list[str], options: Options = Options()) -> int:
    """Return exit code 1 for findings (--fail-on), 2 for a bad option, input or output, 130 if interrupted, else 0."""
    try:
        sources = log_files.sources(paths)
        options.check([*paths, *(source.path for source in sources)])
    except log_files.Refused as error:
        _say(str(error))
        return 2
    console = Console(highlight=False, soft_wrap=False)
    live = options.format == "text" and not options.request and any(source.path == "-" for source in sources)

    def on_found(found: LogFinding) -> None:
        if options.is_chosen(found):
            report_text.print_finding(log, found, console)

    log = Diagnosis(on_found if live else None, options.request)
    try:
        unreadable = _read(log, sources)
        findings = [found for found in log.end() if options.is_chosen(found)]
        unwritten = _write(log, findings, options)
        for reason in unreadable:
            _say(reason)
        if log.interrupted:
            _say(log.interrupted)
        _show(log, findings, console, options, live)
        sys.stdout.flush()
    except OSError as error:  # kvfix cannot write to standard output: the disk is full, or the reader has exited
        _give_up_stdout()
        if not isinstance(error, BrokenPipeError):
            _say(f"the report could not be written: {error.strerror or error}")
        return 2
    is_foreign = not findings and not log.counts and not log.debug
    if is_foreign and not log.interrupted:
        give = ". Give the engine's log (kubectl logs, docker logs, journalctl). To search, run: kvfix search TEXT"
        _say(report_text.not_recognised(log) + ("" if log.recording else give))
    if log.interrupted:
        return _INTERRUPTED
    return 2 if unreadable or unwritten or is_foreign else int(options.fails(findings))


def _say(text: str) -> None:
    print(f"kvfix-diagnose: {text}", file=sys.stderr)


def _give_up_stdout() -> None:
    """Discard the buffered output, because Python would try to write the output at exit, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show(log: Diagnosis, findings: list[LogFinding], console: Console, options: Options, live: bool) -> None:
    if options.brief == "-":
        print(report_brief.brief(log, findings), end="")
    elif options.format == "json":
        print(report_json.text(log, findings))
    elif options.format == "github":
        print(report_json.github(findings), end="")
    elif options.request:
        report_text.print_request(log, options.request, console)
    elif live:
        report_text.print_summary(log, findings, console)
    else:
        report_text.print_all(log, findings, console, options.everything)


def _read(log: Diagnosis, sources: list[log_files.Source]) -> list[str]:
    """Read the inputs. Return an error for each unreadable input. On a terminal, show the progress of large inputs."""
    total = 0 if any(source.size is None for source in sources) else sum(source.size or 0 for source in sources)
    # The unpacked size of a compressed file is unknown until kvfix has read the file.
    packed = any(source.packed for source in sources)
    shown = sys.stderr.isatty() and total >= 32 << 20  # bytes
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as progress:
        task = progress.add_task("", total=None if packed else total)
        try:
            return log_files.read(log, sources, lambda size: progress.advance(task, size))
        except KeyboardInterrupt:
            of = f" of {total / 1e6:.0f}" if total and not packed else ""
            log.interrupted = f"interrupted after {log.bytes / 1e6:.0f}{of} MB of input; findings cover only this part"
            return []


def _write(log: Diagnosis, findings: list[LogFinding], options: Options) -> bool:
    """Write the output files. Return True if kvfix could not write one of the files."""
    texts: dict[str, str] = {}
    if options.html:
        texts[options.html] = report_text.page(log, findings)
    if options.brief not in ("", "-"):
        texts[options.brief] = report_brief.brief(log, findings)
    if options.issue:
        texts[options.issue] = report_brief.issue(log, findings)
    written = [_is_written(path, text) for path, text in texts.items()]
    return not all(written)


def _is_written(path: str, text: str) -> bool:
    """Write all of the text, or leave the file unchanged. A `path` to a link, pipe or device may get only a part."""
    in_place = os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path))  # /dev/stdout is a link
    whole = Path(path) if in_place else Path(f"{path}.part")
    try:
        whole.write_text(text, encoding="utf-8")
        if not in_place:
            whole.replace(path)
    except OSError as error:
        if not in_place:
            whole.unlink(missing_ok=True)
        _say(f"{path}: {error.strerror or error}; kvfix {'may have written a part' if in_place else 'wrote nothing'}")
        return False
    _say(f"wrote {path}")
    return True


def _is_ours(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return _OURS.search(file.read(400)) is not None
    except OSError:
        return False
