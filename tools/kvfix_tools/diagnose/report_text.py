"""Write findings for people, on the terminal or as an HTML page."""

import io
from time import gmtime, strftime

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from kvfix_tools.diagnose import advice
from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.log_finding import LogFinding, by_kind

#: The HTML page contains its style sheet, and has no script.
_PAGE = (
    "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    "<meta name=color-scheme content='light dark'><title>kvfix-diagnose</title>"
    "<pre style='font: 13px/1.5 monospace; white-space: pre-wrap; overflow-wrap: anywhere'>{code}</pre></html>\n"
)
_STYLES = {"crash": "bold white on red", "wrong KV": "bold red", "hang": "bold red", "leak": "yellow", "slow": "yellow"}
#: Maximum number of findings to show in full without --all.
SHOWN = 4
#: Maximum number of characters of a cause without --all. kvfix shows the first sentences of a longer cause.
_LONGEST = 460
#: Kinds of log lines that report a lookup, a load or a store.
_COUNTED = ("asked", "retrieved", "stored", "mp_prefetched", "mp_retrieved", "mp_stored")
#: Kinds of lines that only the LMCache server logs.
_OF_SERVER = ("transfer_mode", "no_handler", "unregistered", "reaped", "good_bye")
#: Maximum numbers of history events and of evidence lines to show.
EVENTS, LINES = 6, 3
REQUESTS = 4


def print_finding(
    log: Diagnosis, found: LogFinding, console: Console, full: bool = False, others: list[LogFinding] | None = None
) -> None:
    """Print one finding: title, request history, log lines, cause and remedy. others: findings of the same rule."""
    rule = found.rule
    word = found.severity.word
    head = Text.assemble((f" {word} ", _STYLES.get(word, "bold")), " ", (rule.code, "bold"), f" {rule.name}")
    if found.request:
        head.append(f"  request {found.request}")
    if found.count > 1:
        head.append(f"  {found.count} times")
    if not found.is_certain:
        head.append("  not certain", "yellow")
    if found.follows is not None:
        head.append(f"  follows from {found.follows.rule.code}")
    if found.first is not None:
        head.append(f"  since {strftime('%Y-%m-%d %H:%M:%S', gmtime(found.first))}")
    console.print(head, soft_wrap=True)
    _print(console, rule.title, 2)
    _print(console, found.sentence, 2, "bold")
    for event in found.history if full else found.history[-EVENTS:]:
        _print(console, str(event), 4)
    for violated in found.violated[-2:]:
        _print(console, f"{violated.code} {violated.name}: {violated.message}", 4, "red")
    for line in found.evidence[: None if full else LINES]:
        _print(console, str(line), 4, "dim")
    if others:
        _print(console, _requests(others), 4)
    why = advice.cause(log, found)
    if why:
        _print(console, f"{advice.heading(found)}: {why if full else _short(why)}", 2)
    now, good = advice.remedy(log, found)
    if now:
        _print(console, f"Do now: {now}", 2, "green")
    if good:
        _print(console, f"For good: {good}", 2)
    console.print()


def _print(console: Console, text: str, indent: int, style: str = "") -> None:
    """Print a text, wrapped on a terminal. If the output is not a terminal, print a single line for grep."""
    shown = Text(text, style)
    if console.is_terminal:
        console.print(Padding(shown, (0, 0, 0, indent)))
    else:
        console.print(Text(" " * indent).append(shown), soft_wrap=True)


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    cut = text[:_LONGEST].rfind(". ")
    return text[: cut + 1] if cut > 80 else text[: _LONGEST - 3] + "..."


def print_all(log: Diagnosis, findings: list[LogFinding], console: Console, everything: bool) -> None:
    """Print the first finding of SHOWN rules in full, and a line for each further rule. everything: print all fully."""
    kinds = [[found] for found in findings] if everything else by_kind(findings)
    full = [kind for kind in kinds if everything or not (kind[0].follows or kind[0].is_note)]
    shown = full if everything else full[:SHOWN]
    for found, *others in shown:
        print_finding(log, found, console, everything, others)
        for kind in kinds:
            if kind[0].follows is found and kind not in shown:
                _print_line(console, f"  follows from {found.rule.code}", kind)
    for kind in kinds:
        if kind not in shown and not any(kind[0].follows is each[0] for each in shown):
            _print_line(console, "note:" if kind[0].is_note else "also", kind)
    print_summary(log, findings, console)


def _print_line(console: Console, what: str, kind: list[LogFinding]) -> None:
    found, times = kind[0], sum(each.count for each in kind)
    more = f", {times} times" if times > 1 else ""
    at = f" ({found.evidence[0].file}:{found.evidence[0].line})" if found.evidence else ""
    _print_whole(console, f"{what} {found.rule.code} {found.rule.name}: {found.sentence}{more}{at}")


def _requests(others: list[LogFinding]) -> str:
    """Return a line with the request ids of `others`, which are further findings of one rule."""
    names = [found.request for found in others if found.request]
    some = ", ".join(names[:REQUESTS]) + (", ..." if len(names) > REQUESTS else "")
    return f"{sum(found.count for found in others)} more: {some or 'no request named'} (--all shows each)"


def page(log: Diagnosis, findings: list[LogFinding]) -> str:
    """Return an HTML page with the first finding of each rule in full, and a line about the rule's other findings."""
    console = Console(record=True, file=io.StringIO(), highlight=False)
    for found, *others in by_kind(findings):
        print_finding(log, found, console, True, others)
    print_summary(log, findings, console)
    return console.export_html(inline_styles=True, code_format=_PAGE)


def print_summary(log: Diagnosis, findings: list[LogFinding], console: Console) -> None:
    """Print rules that kvfix could not check, notes, the size of the input, and a SUMMARY line for grep."""
    for rule, what, how in log.hidden():
        _print_whole(console, f"not checked: {rule} needs {what}, which this log level hides. Set {how}")
    for code, many in sorted(log.unknowns.items()):
        _print_whole(console, f"not checked: {code}, {many} times, because earlier events are not in the log")
    if log.releases.too_old:
        _print_whole(console, f"note: {log.releases.too_old}")
    if "LMCacheMPConnector" in log.who.connectors and not any(log.counts[name] for name in (*_COUNTED, *_OF_SERVER)):
        _print_whole(
            console,
            "note: with LMCacheMPConnector the log of `lmcache server` has the lookups, loads and stores. Give this "
            "log too: kvfix-diagnose ENGINE.log SERVER.log",
        )
    if log.recording and log.counts:
        _print_whole(console, f"note: {not_recognised(log)}")
    _print_whole(console, read_words(log))
    if log.interrupted:
        _print_whole(console, f"note: {log.interrupted}")
    _print_whole(console, f"SUMMARY: kvfix-diagnose: {_summary(log, findings)}")


def _print_whole(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False)


def _summary(log: Diagnosis, findings: list[LogFinding]) -> str:
    """Return the text of the SUMMARY line, with the number of requests for each kind of finding."""
    found = [each for each in findings if not each.is_note]
    words = []
    for kind in by_kind(found):
        rule, certain = kind[0].rule, any(each.is_certain for each in kind)
        marks = [f"{len(kind)} requests"] * (len(kind) > 1) + ["not certain"] * (not certain)
        words.append(f"{rule.code} {rule.name}" + (f" ({', '.join(marks)})" if marks else ""))
    notes = len(findings) - len(found)
    text = ", ".join(words) or nothing_found(log)
    return text + (f"; {notes} note{'s' if notes > 1 else ''}" if notes else "")


def nothing_found(log: Diagnosis) -> str:
    """Return a sentence about a log without findings."""
    if not log.counts and not log.debug:
        return not_recognised(log)
    requests, lookups, loads, stores = log.done
    seen = f"{requests} requests, {lookups} lookups, {loads} loads, {stores} stores"
    other = len(log.failures.lines)
    return f"nothing found: {seen}; {f'{other} errors that did not stop the engine' if other else 'no error'}"


def not_recognised(log: Diagnosis) -> str:
    """Return what the input is: a recording, a log without requests and failures, or a text without known lines."""
    if log.recording:
        return f"{log.recording} contains a kvfix recording. Run: kvfix replay {log.recording}"
    if log.is_own:
        return "the lines of vLLM and LMCache in the input show neither requests nor failures"
    return "no line of vLLM, LMCache or a KV connector was recognised"


def read_words(log: Diagnosis) -> str:
    _, lookups, loads, stores = log.done
    releases = named_versions(log)
    of = f" of {', '.join(releases)}" if releases else ""
    size = f"{log.bytes / 1e6:.1f} MB" if log.bytes > 1e5 else f"{log.bytes / 1e3:.1f} kB"
    return f"read {size}{of}: {lookups} lookups, {loads} loads, {stores} stores"


def versions(log: Diagnosis) -> dict[str, str]:
    """Return the releases of LMCache and vLLM as texts, with "" for an unknown release."""
    named = {"LMCache": ", ".join(log.releases.named("lmcache")), "vLLM": ", ".join(log.releases.named("vllm"))}
    for name, by_lines in (("LMCache", log.releases.candidates), ("vLLM", log.releases.placed())):
        if not named[name] and by_lines:
            first, last = by_lines[0], by_lines[-1]
            named[name] = f"{first if first == last else f'{first} to {last}'} (by line numbers in the log)"
    return named


def named_versions(log: Diagnosis) -> list[str]:
    return [f"{name} {release}" for name, release in versions(log).items() if release]


def print_request(log: Diagnosis, request: str, console: Console) -> None:
    """Print the whole history of one request, then every log line that names this request."""
    for event in log.requests.history(request):
        _print(console, str(event), 0)
    if log.request_lines:
        console.print()
    for line in log.request_lines:
        _print(console, str(line), 0, "dim")
    if not log.request_lines:
        console.print(f"no recognised line names request {request}", markup=False)
