"""Findings on the terminal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from kvfix_tools.diagnose import advice
from kvfix_tools.diagnose.log_finding import by_kind
from kvfix_tools.diagnose.texts import is_own

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_finding import LogFinding

_STYLES = {"crash": "bold white on red", "wrong KV": "bold red", "hang": "bold red", "leak": "yellow", "slow": "yellow"}
#: Kinds of findings of which one is shown in full without --all.
SHOWN = 4
#: Characters of a cause: those of every record.
_LONGEST = 460
#: Lines that count lookups, loads and stores.
_COUNTED = ("asked", "retrieved", "stored", "mp_prefetched", "mp_retrieved", "mp_stored")
#: Events of a history and lines of evidence that are shown of each.
EVENTS, LINES = 6, 3
#: Requests that are named, of those with the same finding.
REQUESTS = 4


def print_finding(
    log: Diagnosis, found: LogFinding, console: Console, full: bool = False, others: list[LogFinding] | None = None
) -> None:
    """One finding: what, the history with its arithmetic, where it stands, why, and what to do. others: of its kind."""
    rule = found.rule
    head = Text.assemble(
        (f" {rule.severity.word} ", _STYLES.get(rule.severity.word, "bold")), " ", (rule.code, "bold"), f" {rule.name}"
    )
    if found.request:
        head.append(f"  request {found.request}")
    if found.count > 1:
        head.append(f"  {found.count} times")
    if found.verdict == "unknown":
        head.append("  not certain", "yellow")
    console.print(head, soft_wrap=True)
    _print(console, rule.title, 2)
    _print(console, found.sentence, 2, "bold")
    history = found.history if full else found.history[-EVENTS:]
    for event in history:
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
    """Wrapped for a person; one line for a program, to grep."""
    shown = Text(text, style)
    if console.is_terminal:
        console.print(Padding(shown, (0, 0, 0, indent)))
    else:
        console.print(Text(" " * indent).append(shown), soft_wrap=True)


def _short(text: str) -> str:
    """The first sentences, to about four lines: what decides a cause often stands last."""
    if len(text) <= _LONGEST:
        return text
    cut = text[:_LONGEST].rfind(". ")
    return text[: cut + 1] if cut > 80 else text[: _LONGEST - 3] + "..."


def print_all(log: Diagnosis, findings: list[LogFinding], console: Console, everything: bool) -> None:
    """The worst of each kind in full, up to SHOWN; of the others one line for each kind."""
    kinds = [[found] for found in findings] if everything else by_kind(findings)
    shown = kinds if everything else kinds[:SHOWN]
    for found, *others in shown:
        print_finding(log, found, console, everything, others)
    for found, *others in kinds[len(shown) :]:
        times = sum(each.count for each in [found, *others])
        more = f", {times} times" if times > 1 else ""
        console.print(f"also {found.rule.code} {found.rule.name}: {found.sentence}{more}", soft_wrap=True, markup=False)
    print_summary(log, findings, console)


def _requests(others: list[LogFinding]) -> str:
    """Findings of the same kind, by their requests."""
    names = [found.request for found in others if found.request]
    some = ", ".join(names[:REQUESTS]) + (", ..." if len(names) > REQUESTS else "")
    times = sum(found.count for found in others)
    return f"the same {times} times more: {some or 'no request named'} (--all shows each)"


def print_summary(log: Diagnosis, findings: list[LogFinding], console: Console) -> None:
    """What was read, what the log does not show, and one line to grep."""
    for rule, what, how in log.hidden():
        console.print(
            f"unknown: {rule} ({what}) is hidden by the log's level; {how} shows it", soft_wrap=True, markup=False
        )
    for code, many in sorted(log.unknowns.items()):
        console.print(
            f"unknown: {code} {many} times: the log does not hold what came before", soft_wrap=True, markup=False
        )
    if log.releases.too_old:
        console.print(f"note: {log.releases.too_old}", soft_wrap=True, markup=False)
    if "LMCacheMPConnector" in log.who.connectors and not any(log.counts[name] for name in _COUNTED):
        console.print(
            "note: with LMCacheMPConnector lookups, loads and stores are in the log of `lmcache server`, not in an "
            "engine's: give that file too",
            soft_wrap=True,
            markup=False,
        )
    console.print(read_words(log), soft_wrap=True, markup=False)
    each = Counter(f"{found.rule.code} {found.rule.name}" for found in findings)  # a crash is one for each request
    words = ", ".join(f"{name} ({many} requests)" if many > 1 else name for name, many in each.items())
    console.print(f"SUMMARY: kvfix-diagnose: {words or nothing_found(log)}", soft_wrap=True, markup=False)


def nothing_found(log: Diagnosis) -> str:
    """What was looked at and shows no failure."""
    if not log.counts and not log.debug:
        return not_recognised(log)
    requests, lookups, loads, stores = log.done
    seen = f"{requests} requests, {lookups} lookups, {loads} loads, {stores} stores"
    other = len(log.failures.lines)
    return f"nothing found: {seen}; {f'{other} errors that did not stop it' if other else 'no error'}"


def not_recognised(log: Diagnosis) -> str:
    """Of an input that says nothing: whether it is of vLLM or LMCache at all, as far as it is short."""
    if any(is_own(text) for text in log.whole):
        return "the lines of vLLM or LMCache in it do not say what requests did, nor what failed"
    return "no line of vLLM, LMCache or a KV connector was recognised"


def read_words(log: Diagnosis) -> str:
    _, lookups, loads, stores = log.done
    releases = [f"{name} {release}" for name, release in versions(log).items() if release]
    of = f" of {', '.join(releases)}" if releases else ""
    size = f"{log.bytes / 1e6:.1f} MB" if log.bytes > 1e5 else f"{log.bytes / 1e3:.1f} kB"
    return f"read {size}{of}: {lookups} lookups, {loads} loads, {stores} stores"


def versions(log: Diagnosis) -> dict[str, str]:
    """{"LMCache": releases, "vLLM": releases}; "" where none is known."""
    named = {"LMCache": ", ".join(log.releases.named("lmcache")), "vLLM": ", ".join(log.releases.named("vllm"))}
    for name in named:
        if not named[name] and (said := log.releases.said(name.lower())):
            named[name] = f"{said} (as the text says)"
    for name, by_lines in (("LMCache", log.releases.candidates), ("vLLM", log.releases.placed())):
        if not named[name] and by_lines:
            first, last = by_lines[0], by_lines[-1]
            named[name] = f"{first if first == last else f'{first} to {last}'} (by the lines of its statements)"
    return named


def print_request(log: Diagnosis, request: str, console: Console) -> None:
    """One request's history in full, then every line that names it."""
    for event in log.requests.history(request):
        _print(console, str(event), 0)
    if log.request_lines:
        console.print()
    for line in log.request_lines:
        _print(console, str(line), 0, "dim")
    if not log.request_lines:
        console.print(f"no line that is read names {request}", markup=False)
