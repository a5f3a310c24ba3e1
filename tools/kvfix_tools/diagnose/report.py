"""Findings on the terminal, and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from kvfix_tools.diagnose import remedy

if TYPE_CHECKING:
    from kvfix_tools.diagnose.case import Case
    from kvfix_tools.diagnose.seen import Found

#: Of the JSON report. Raised when a name changes its meaning or goes.
SCHEMA = 1
_STYLES = {"crash": "bold white on red", "wrong KV": "bold red", "hang": "bold red", "leak": "yellow", "slow": "yellow"}
#: Findings that are told in full without --all.
SHOWN = 4
#: Events of a story and lines of evidence that are told of each.
STORY, LINES = 6, 3


def print_found(case: Case, found: Found, console: Console, full: bool = False) -> None:
    """One finding: what, the story with its arithmetic, where it stands, why, and what to do."""
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
    console.print(head)
    _say(console, rule.title, 2)
    _say(console, found.sentence, 2, "bold")
    story = found.story if full else found.story[-STORY:]
    for told in story:
        _say(console, f"{told.what}  ({told.file}:{told.line})", 4)
    for each in found.verdicts[-2:]:
        _say(console, f"{each.code} {each.name}: {each.message}", 4, "red")
    for line in found.evidence[: None if full else LINES]:
        _say(console, str(line), 4, "dim")
    why = remedy.cause(case, found)
    if why:
        _say(console, f"Why: {why if full else _short(why)}", 2)
    for number, step in enumerate(remedy.steps(case, found), 1):
        _say(console, f"{number}. {step.text}", 2, "green" if step.kind == "fix" else "")
    console.print()


def _say(console: Console, text: str, indent: int, style: str = "") -> None:
    """Wrapped for a person; one line for a program, to grep."""
    shown = Text(text, style)
    if console.is_terminal:
        console.print(Padding(shown, (0, 0, 0, indent)))
    else:
        console.print(Text(" " * indent).append(shown), soft_wrap=True)


def _short(text: str) -> str:
    """The first sentences, to about two lines."""
    if len(text) <= 260:
        return text
    cut = text[:260].rfind(". ")
    return text[: cut + 1] if cut > 80 else text[:257] + "..."


def print_all(case: Case, findings: list[Found], console: Console, everything: bool) -> None:
    shown = findings if everything else findings[:SHOWN]
    for found in shown:
        print_found(case, found, console, everything)
    for found in findings[len(shown) :]:
        times = f", {found.count} times" if found.count > 1 else ""
        console.print(
            f"also {found.rule.code} {found.rule.name}: {found.sentence}{times}", soft_wrap=True, markup=False
        )
    print_summary(case, findings, console)


def print_summary(case: Case, findings: list[Found], console: Console) -> None:
    """What was read, what the log cannot tell, and one line to grep."""
    for rule, what, how in case.hidden():
        console.print(
            f"unknown: {rule} ({what}) is hidden by the log's level; {how} shows it", soft_wrap=True, markup=False
        )
    for code, many in sorted(case.unknowns.items()):
        console.print(
            f"unknown: {code} {many} times: the log does not hold what came before", soft_wrap=True, markup=False
        )
    console.print(read_words(case), soft_wrap=True, markup=False)
    words = ", ".join(f"{found.rule.code} {found.rule.name}" for found in findings)
    console.print(f"SUMMARY: kvfix-diagnose: {words or 'nothing found'}", soft_wrap=True, markup=False)


def read_words(case: Case) -> str:
    counts = case.counts
    releases = [f"{name} {release}" for name, release in versions(case).items() if release]
    of = f" of {', '.join(releases)}" if releases else ""
    size = f"{case.bytes / 1e6:.1f} MB" if case.bytes > 1e5 else f"{case.bytes / 1e3:.1f} kB"
    return (
        f"read {size}{of}: {counts['asked'] + counts['mp_prefetched']} lookups, "
        f"{counts['retrieved'] + counts['mp_retrieved']} loads, {counts['stored'] + counts['mp_stored']} stores"
    )


def versions(case: Case) -> dict[str, str]:
    """{"LMCache": releases, "vLLM": releases}; "" where nothing tells."""
    named = {"LMCache": ", ".join(case.releases.named("lmcache")), "vLLM": ", ".join(case.releases.named("vllm"))}
    if not named["LMCache"] and case.releases.candidates:
        first, last = case.releases.candidates[0], case.releases.candidates[-1]
        named["LMCache"] = f"{first if first == last else f'{first} to {last}'} (by the lines of its statements)"
    return named


def as_json(case: Case, findings: list[Found]) -> str:
    """docs/diagnose.md has the schema."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "findings": [_as_dict(case, found) for found in findings],
            "hidden": [{"rule": rule, "what": what, "shown_by": how} for rule, what, how in case.hidden()],
            "unknown": dict(case.unknowns),
            "versions": versions(case),
            "counts": dict(sorted(case.counts.items())),
            "bytes": case.bytes,
        },
        indent=2,
    )


def _as_dict(case: Case, found: Found) -> dict[str, Any]:
    rule = found.rule
    return {
        "code": rule.code,
        "name": rule.name,
        "severity": rule.severity.name.lower(),
        "verdict": found.verdict,
        "title": rule.title,
        "sentence": found.sentence,
        "request": found.request or None,
        "count": found.count,
        "first": found.first,
        "last": found.last,
        "story": [told._asdict() for told in found.story],
        "ledger": [{"rule": each.code, "name": each.name, "message": each.message} for each in found.verdicts],
        "evidence": [line._asdict() for line in found.evidence],
        "cause": remedy.cause(case, found),
        "remedy": [step._asdict() for step in remedy.steps(case, found)],
    }


def print_request(case: Case, request: str, console: Console) -> None:
    """One request's story in full, then every line that names it."""
    for told in case.story(request):
        _say(console, f"{told.what}  ({told.file}:{told.line})", 0)
    if case.watched:
        console.print()
    for line in case.watched:
        _say(console, str(line), 0, "dim")
    if not case.watched:
        console.print(f"no line that is read names {request}", markup=False)
