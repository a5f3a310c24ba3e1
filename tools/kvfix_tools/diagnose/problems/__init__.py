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
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix import catalogue as known_fixes
from kvfix_tools.diagnose.findings import Answer, Severity
from kvfix_tools.diagnose.log_line import without_place

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: {dist: its name for people}
NAMES = {"lmcache": "LMCache", "vllm": "vLLM"}
#: Kinds of lines in which problems show.
LINES = ("logged", "raised", "died", "stack")
_PLACE = re.compile(r"<(\w+)>")
_EMPTY: Mapping[str, str] = {}


class Logged(NamedTuple):
    """A line of a logger.

    text: of its statement, with `<name>` where a value comes; a part of it is enough.
    at: the file of the statement, below its package: `lmcache/v1/cache_engine.py`. "": of no release that is here.
    """

    text: str
    at: str = ""


class Failed(NamedTuple):
    """An exception with its traceback. All that is given must fit.

    kind: its class, without the module. text: as in `Logged`. within: a function among the last frames, `file.py:name`
    or `name`, or a folder: `lmcache/`. source: the assertion that failed, without a text of its own. at: as in
    `Logged`, of the assertion or of the text.
    """

    kind: str = ""
    text: str = ""
    within: str = ""
    source: str = ""
    at: str = ""


class Died(NamedTuple):
    """A process that died of no exception. text: in the line. within: a function in faulthandler's stack."""

    text: str = ""
    within: str = ""


class Stuck(NamedTuple):
    """A thread of a process that hangs, in a stack of py-spy's. within: a function among its innermost frames."""

    within: str
    #: As other signs have it: a stack has no text.
    text: str = ""


Sign = Logged | Failed | Died | Stuck


def either(*texts: str) -> tuple[Sign, ...]:
    """Signs of these texts, as an exception or in the line of a logger."""
    return (*(Failed(text=text) for text in texts), *(Logged(text) for text in texts))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem.

    shows: any of these is the problem. sentence: this case, with `{name}` for the values of `shows`; empty: the line.
    connectors: it concerns these only, where the log says which one ran ("LMCacheConnectorV1", ...). named: the log
    has to say it: the same line comes from others.
    releases: {dist: specifier}: the releases whose code is so. fixed: {dist: the first release that is right}.
    now: what to do tonight, settings as they are typed. good: what ends it; empty where `fixed` says it.
    sure: False: the line may have another cause; then `cause` says what would decide it.
    general: it may come of any code. Asked only of a failure that no finding and no other record knows.
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
    sure: bool = True
    general: bool = False
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

    def look(self, log: Diagnosis, line: LogLine) -> Answer | None:
        """This problem in this line; None: it is not."""
        for sign in self.shows:
            found = _fits(sign, line)
            if found is not None and self._concerns(log):
                sentence = self.sentence.format_map(_Values(found)) if self.sentence else _sentence_of(line)
                return Answer(sentence, verdict="violated" if self.sure else "unknown", request=line.request)
        return None

    def _concerns(self, log: Diagnosis) -> bool:
        """Whether its connector ran and its releases did, as far as the log says."""
        ran = log.who.connectors
        if self.connectors and (ran or self.named) and not ran & set(self.connectors):
            return False
        return all(log.releases.within(dist, broken) is not False for dist, broken in self.releases.items())


class _Values(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return "?"


def in_words(sign: Sign) -> str:
    """How the sign looks in a log, with an ellipsis for values."""
    text = _PLACE.sub("...", sign.text)
    within = sign.within if not isinstance(sign, Logged) else ""
    source = sign.source if isinstance(sign, Failed) else ""
    kind = sign.kind if isinstance(sign, Failed) else ""
    native = {Died: "a native crash", Stuck: "a thread"}.get(type(sign), "")
    what = ": ".join(part for part in (kind, text) if part) or native
    return ", ".join(part for part in (what, f"`{source}`" if source else "", f"in {within}" if within else "") if part)


@lru_cache(maxsize=1)
def catalogue() -> tuple[Problem, ...]:
    """Every record, in the order of its code."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return tuple(sorted((each for module in modules for each in module.PROBLEMS), key=lambda each: each.code))


@lru_cache(maxsize=1)
def _particular() -> tuple[Problem, ...]:
    return tuple(each for each in catalogue() if not each.general)


def find(name: str) -> Problem | None:
    """The record of this code or name; None if there is none."""
    return next((each for each in catalogue() if name.upper() == each.code or name.lower() == each.name), None)


def general(line: LogLine) -> Problem | None:
    """The first record of a general failure that fits this one."""
    return next(
        (each for each in catalogue() if each.general and any(_fits(sign, line) is not None for sign in each.shows)),
        None,
    )


def at(line: LogLine) -> tuple[Problem, ...]:
    """Records whose signs fit the line, whatever ran, but general ones. Floods of a line cost one search."""
    if line.name == "logged":
        return _logged(line.body[:2000])
    fields = line.fields
    frames = fields.get("frames", ())[-_FRAMES:]
    key = (line.name, fields.get("type"), _NUMBER.sub(_alike, line.body[:400]), fields.get("source"), *frames)
    if key not in _RAISED:
        if len(_RAISED) >= _MOST:
            _RAISED.clear()
        text = fields.get("text", "")
        fits = {
            each.code: each
            for each, sign, part in _may_show(line.name, fields.get("type", ""))
            if (line.name != "raised" or part in text) and _fits(sign, line) is not None
        }
        _RAISED[key] = tuple(fits.values())
    return _RAISED[key]


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
        (each, sign, _longest(sign.text))
        for each in _particular()
        for sign in each.shows
        if isinstance(sign, _SIGNS[name]) and getattr(sign, "kind", "") in ("", kind)
    ]


#: {an exception with its innermost frames: its records}; the same one comes again and again.
_RAISED: dict[tuple[Any, ...], tuple[Problem, ...]] = {}
#: Innermost frames in which a sign is looked for; exceptions that are kept in mind.
_FRAMES, _MOST = 8, 4096
_DIGITS, _NUMBER = re.compile(rb"\d+"), re.compile(rb"\d[0-9a-f]*")
_SIGNS: dict[str, tuple[type, ...]] = {"raised": (Failed, Died), "died": (Died,), "stack": (Stuck,)}


@lru_cache(maxsize=4096)
def _logged(body: bytes) -> tuple[Problem, ...]:
    return _logged_alike(_DIGITS.sub(b"7", body))


@lru_cache(maxsize=4096)
def _logged_alike(body: bytes) -> tuple[Problem, ...]:
    """By the body with its numbers made equal. A sign that goes on where another one ends is the better one."""
    text = body.decode("utf-8", "replace")
    fits = [(each, sign) for each, sign, part in _signs() if part in text and _pattern(sign).search(text)]
    every = {sign for _, sign in fits}
    found = {each.code: each for each, sign in fits if not _goes_on(sign, every)}
    return tuple(found.values())


def _goes_on(sign: str, others: set[str]) -> bool:
    return any(other.startswith(sign) and other != sign for other in others)


@lru_cache(maxsize=1)
def _signs() -> tuple[tuple[Problem, str, str], ...]:
    """(problem, text that it logs with its numbers made equal, the longest part of that without a value)"""
    texts = [
        (each, re.sub(r"\d+", "7", sign.text))
        for each in _particular()
        for sign in each.shows
        if isinstance(sign, Logged)
    ]
    return tuple((each, text, _longest(text)) for each, text in texts)


@lru_cache(maxsize=4096)
def _longest(text: str) -> str:
    """The longest part of a template without a value."""
    return max(_PLACE.split(text)[::2], key=len)


def _search(template: str, text: str) -> re.Match[str] | None:
    return _pattern(template).search(text) if _longest(template) in text else None


@lru_cache(maxsize=4096)
def _pattern(text: str) -> re.Pattern[str]:
    """Of a template: `<name>` takes a value."""
    parts = _PLACE.split(text)
    # A value in between may be a whole CacheEngineKey(...).
    made = [re.escape(part) if number % 2 == 0 else f"(?P<{part}>.{{1,600}}?)" for number, part in enumerate(parts)]
    if len(parts) > 1 and not parts[-1]:
        made[-2] = f"(?P<{parts[-2]}>[^\\n]{{1,200}})"
    return re.compile("".join(made))


def _fits(sign: Sign, line: LogLine) -> dict[str, Any] | None:
    """The values of the sign's text in this line; None: it does not show."""
    fields = line.fields
    if isinstance(sign, Logged):
        found = _search(sign.text, without_place(line.body)) if line.name == "logged" else None
        return found.groupdict() if found is not None else None
    if isinstance(sign, Stuck):
        return {} if line.name == "stack" and _within(sign.within, fields["frames"][-4:]) else None
    if isinstance(sign, Died):
        if line.name == "died":
            return {} if not sign.within and sign.text in line.body.decode("utf-8", "replace") else None
        if line.name != "raised" or not fields.get("fault"):
            return None
        return (
            {} if sign.text in fields["text"] and (not sign.within or _within(sign.within, fields["frames"])) else None
        )
    if line.name != "raised" or fields.get("fault"):
        return None
    if sign.kind and sign.kind != fields["type"]:
        return None
    if sign.source and sign.source not in fields["source"]:
        return None
    if sign.within and not _within(sign.within, fields["frames"][-_FRAMES:]):
        return None
    found = _search(sign.text, fields["text"]) if sign.text else None
    if sign.text and found is None:
        return None
    return found.groupdict() if found is not None else {}


def _within(place: str, frames: list[tuple[str, int, str]]) -> bool:
    if place.endswith("/"):
        return any(f"/{place}" in f"/{frame[0]}" for frame in frames)
    file, _, function = ("", "", place) if "::" in place else place.rpartition(":")
    return any(frame[2] == function and (not file or frame[0].endswith(file)) for frame in frames)


def _sentence_of(line: LogLine) -> str:
    if line.name == "stack":
        return f"a thread ({line.fields['state']}) stands in {line.fields['frames'][-1][2]}"
    if line.name == "raised":
        return f"{line.fields['class'] or 'died'}: {line.fields['text']}"[:240].rstrip(": ")
    return line.evidence.text[:240]
