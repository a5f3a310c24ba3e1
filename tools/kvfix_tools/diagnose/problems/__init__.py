"""Known problems, one record each. A record is data: how the problem shows in a log, its cause, and what to do.

A file of this folder is a class of problems. `PROBLEMS` in it lists the records; nothing else lists them. To add one,
answer a report: copy the statement from the release (`Logged`) or the exception from the traceback (`Failed`), and
name the file in which it stands (`at`). Tests make the line of the release's own statement and look for the record.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvfix import catalogue as known_fixes
from kvfix_tools.diagnose.findings import Answer, Severity
from kvfix_tools.diagnose.signs import (
    Died,
    Failed,
    Logged,
    Sign,
    Stuck,
    either,
    ended_by,
    fits,
    implied,
    in_words,
    longest,
    pattern,
)

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: Also what a record is written with.
__all__ = ["Died", "Failed", "Logged", "Problem", "Sign", "Stuck", "at", "catalogue", "either", "ended_by", "find",
           "general", "in_words"]  # fmt: skip
#: {dist: its name for people}
NAMES = {"lmcache": "LMCache", "vllm": "vLLM"}
#: Kinds of lines in which problems show.
LINES = ("logged", "raised", "died", "stack")
_EMPTY: Mapping[str, str] = {}
#: Of the releases of vLLM that were looked at, the one before; those in between are not known.
_BEFORE = {"0.15": "0.11.2.post2", "0.20": "0.15.1", "0.26": "0.20.2", "0.32": "0.26.0"}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem.

    shows: any of these is the problem. sentence: this case, with `{name}` for the values of `shows`; empty: the line.
    connectors: it concerns these only, where the log says which one ran ("LMCacheConnectorV1", ...). named: the log
    has to say it: the same line comes from others.
    releases: {dist: specifier}: the releases whose code is so. fixed: {dist: the first release that is right}.
    now: what to do tonight, settings as they are typed. good: what ends it; empty where `fixed` says it.
    said: what a description has where no line shows it: all of these patterns. Asked only where nothing is known.
    sure: False: the line may have another cause; then `cause` says what would decide it.
    general: it may come of any code. Asked only of a failure that no finding and no other record knows.
    replaces: codes of findings that say less of the same failure; they are left out where this one is found.
    announces: its line only heads a traceback: it is left out where another finding explains that.
    quotes: `<error>`, at the end of its signs, is the text of any exception: what knows that is the finding.
    threads: addresses of the reports.
    """

    code: str
    name: str
    severity: Severity
    title: str
    shows: tuple[Sign, ...]
    cause: str
    now: str
    good: str = ""
    sentence: str = ""
    connectors: tuple[str, ...] = ()
    named: bool = False
    releases: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    fixed: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    said: tuple[str, ...] = ()
    sure: bool = True
    general: bool = False
    replaces: tuple[str, ...] = ()
    announces: bool = False
    quotes: bool = False
    threads: tuple[str, ...] = ()
    #: As a rule of the log has them (findings.LogRule).
    message: str | None = None

    @property
    def fixes(self) -> tuple[str, ...]:
        """Codes of kvfix's fixes for it."""
        return tuple(fix.code for fix in known_fixes.handling(self.code, None))

    @property
    def for_good(self) -> str:
        """`good`, or the releases that are right."""
        upgrade = " and ".join(f"{NAMES.get(dist, dist)} {release}" for dist, release in self.fixed.items())
        return self.good or f"upgrade to {upgrade}"

    def section(self, name: str) -> str:
        return self.cause if name == "Cause" else ""

    def look(self, log: Diagnosis, line: LogLine, nearly: bool = False) -> Answer | None:
        """This problem in this line; None: it is not. nearly: also in a release below the first one that was looked at,
        where the one before was not such."""
        for sign in self.shows:
            found = fits(sign, line)
            if found is not None and self.concerns(log, nearly):
                sentence = self.sentence.format_map(_Values(found)) if self.sentence else _sentence_of(line)
                verdict = "violated" if self.sure and not nearly else "unknown"
                return Answer(sentence, verdict=verdict, request=line.request)
        return None

    def quoted(self, log: Diagnosis, line: LogLine) -> Problem | None:
        """Return the record that knows the error whose text this statement quotes."""
        values = next((found for sign in self.shows if (found := fits(sign, line)) is not None), {})
        known = _quoted(str(values.get("error", "")), line)
        return known if known is not None and known.concerns(log) else None

    def gives_way(self, records: list[Problem], line: LogLine) -> bool:
        """Whether another of the line's records is the finding: one that says more, or that knows what this quotes."""
        return (self.quotes and any(not each.quotes for each in records)) or any(
            self.yields_to(each, line) for each in records
        )

    def yields_to(self, other: Problem, line: LogLine) -> bool:
        """Whether the other record says more exactly what this line is."""
        own, theirs = ([each for each in one.shows if fits(each, line) is not None] for one in (self, other))
        return bool(own) and any(all(implied(each, by) and not implied(by, each) for each in own) for by in theirs)

    def concerns(self, log: Diagnosis, nearly: bool = True) -> bool:
        """Whether its connector ran and its releases did, as far as the log says."""
        ran = log.who.connectors
        if self.connectors and (ran or self.named) and not ran & set(self.connectors):
            return False
        if any(log.releases.within(dist, f">={right}") is True for dist, right in self.fixed.items()):
            return False
        releases = {
            dist: _widened(broken) if nearly and dist == "vllm" else broken for dist, broken in self.releases.items()
        }
        return all(log.releases.within(dist, broken) is not False for dist, broken in releases.items())


def _widened(specifier: str) -> str:
    """`>=0.32`, where 0.32 is the first that has it of the releases that were looked at: from the one before on."""
    return re.sub(
        r">=(0\.\d+)(?:\.0)?(?=,|$)",
        lambda found: f">{_BEFORE[found[1]]}" if found[1] in _BEFORE else found[0],
        specifier,
    )


class _Values(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return "?"


@lru_cache(maxsize=1)
def catalogue() -> tuple[Problem, ...]:
    """Every record, in the order of the files."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return tuple(each for module in modules for each in module.PROBLEMS)


@lru_cache(maxsize=1)
def _particular() -> tuple[Problem, ...]:
    return tuple(each for each in catalogue() if not each.general)


@lru_cache(maxsize=1)
def _general() -> tuple[Problem, ...]:
    return tuple(each for each in catalogue() if each.general)


def find(name: str) -> Problem | None:
    """The record of this code or name; None if there is none."""
    return next((each for each in catalogue() if name.upper() == each.code or name.lower() == each.name), None)


def general(line: LogLine) -> Problem | None:
    """The record of a general failure that fits this one: of several the one whose sign has the longest text."""
    best, length = None, -1
    for each in _general():
        text = max((len(longest(sign.text)) for sign in each.shows if fits(sign, line) is not None), default=-1)
        if text > length:
            best, length = each, text
    return best


def at(line: LogLine) -> tuple[Problem, ...]:
    """Records whose signs fit the line, whatever ran, but general ones. Floods of a line cost one search."""
    if line.name == "logged":
        return _logged(line.body[:2000])
    fields = line.fields
    # The outer frames count too: they say whose code called it.
    frames = fields.get("frames", ())
    key = (line.name, fields.get("type"), _NUMBER.sub(_alike, line.body[:400]), fields.get("source"), *frames)
    if key not in _RAISED:
        if len(_RAISED) >= _MOST:
            _RAISED.clear()
        text = fields.get("text", "")
        found = {
            each.code: each
            for each, sign, part in _may_show(line.name, fields.get("type", ""))
            if (line.name != "raised" or part in text) and fits(sign, line) is not None
        }
        _RAISED[key] = tuple(found.values())
    return _RAISED[key]


def _quoted(error: str, line: LogLine) -> Problem | None:
    """The record that knows the error whose text a statement quotes."""
    kind, colon, text = error.partition(": ")
    named = colon and kind.isidentifier() and kind.endswith(("Error", "Exception"))
    fields = {"type": kind if named else "", "class": "", "text": text if named else error, "source": "", "frames": []}
    raised = replace(line, name="raised", fields=fields, body=error.encode())
    return next(iter(at(raised)), None) or general(raised) or general(replace(line, body=error.encode()))


def _alike(number: re.Match[bytes]) -> bytes:
    """All numbers and ids are one, but those that a sign asks for."""
    return number[0] if number[0] in _asked_for() else b"7"


@lru_cache(maxsize=1)
def _asked_for() -> frozenset[bytes]:
    signs = (sign for each in _particular() for sign in each.shows if not isinstance(sign, Logged))
    return frozenset(number for sign in signs for number in _NUMBER.findall(sign.text.encode()))


@lru_cache(maxsize=256)
def _may_show(name: str, kind: str) -> list[tuple[Problem, Sign, str]]:
    """(record, sign, the longest part of its text without a value) for lines of errors of this class."""
    return [
        (each, sign, longest(sign.text))
        for each in _particular()
        for sign in each.shows
        if isinstance(sign, _SIGNS[name]) and getattr(sign, "kind", "") in ("", kind)
    ]


#: {an exception with its frames: its records}; the same one comes again and again.
_RAISED: dict[tuple[Any, ...], tuple[Problem, ...]] = {}
#: Exceptions that are kept in mind.
_MOST = 4096
_DIGITS, _NUMBER = re.compile(rb"\d+"), re.compile(rb"\d[0-9a-f]*")
_SIGNS: dict[str, tuple[type, ...]] = {"raised": (Failed, Died), "died": (Died,), "stack": (Stuck,)}


@lru_cache(maxsize=4096)
def _logged(body: bytes) -> tuple[Problem, ...]:
    return _logged_alike(_DIGITS.sub(b"7", body))


@lru_cache(maxsize=4096)
def _logged_alike(body: bytes) -> tuple[Problem, ...]:
    """By the body with its numbers made equal."""
    text = body.decode("utf-8", "replace")
    found = {each.code: each for each, sign, part in _signs() if part in text and pattern(sign).search(text)}
    return tuple(found.values())


@lru_cache(maxsize=1)
def _signs() -> tuple[tuple[Problem, str, str], ...]:
    """(problem, text that it logs with its numbers made equal, the longest part of that without a value)"""
    texts = [
        (each, re.sub(r"\d+", "7", sign.text))
        for each in _particular()
        for sign in each.shows
        if isinstance(sign, Logged)
    ]
    return tuple((each, text, longest(text)) for each, text in texts)


def _sentence_of(line: LogLine) -> str:
    if line.name == "stack":
        return f"a thread ({line.fields['state']}) stands in {line.fields['frames'][-1][2]}"
    if line.name == "raised":
        return f"{line.fields['class'] or 'died'}: {line.fields['text']}"[:240].rstrip(": ")
    return line.evidence.text[:240]
