"""Read the records of known problems (`knowledge/*.toml`), and find the problems that a log line shows.

A record lists signs, which are patterns. A line that fits one of the signs shows the problem. A record without signs
lists kinds of lines (`on`), and a function of the package `findings` may decide if a line shows the problem.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from ahocorasick_rs import BytesAhoCorasick
from msgspec.structs import replace

from kvfix import catalogue as known_fixes
from kvfix_tools.diagnose import findings
from kvfix_tools.diagnose.findings import Answer, Severity
from kvfix_tools.diagnose.grammar import FILE
from kvfix_tools.diagnose.log_line import LogLine
from kvfix_tools.diagnose.signs import Sign, fits, implied, longest, parse
from kvfix_tools.diagnose.statements import NAMES
from kvfix_tools.ledger import RULES

if TYPE_CHECKING:
    from kvfix.ledger import Finding
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.tracebacks import Frame

#: The kinds of lines that signs can match.
LINES = ("logged", "raised", "died", "stack")
#: {vLLM release that was examined for the records: next older examined release}
_BEFORE = {"0.15": "0.11.2.post2", "0.20": "0.15.1", "0.26": "0.20.2", "0.32": "0.26.0"}


class Problem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of a known problem. docs/knowledge.md describes the fields, and how to add a record.

    message: in the record of a violated rule, the violation's text. The property `fixes` compares this text with the
        `evidence` of each fix of kvfix.
    """

    code: str
    name: str
    title: str
    effect: Literal["crash", "wrong", "hang", "leak", "slow", "risk", "note"]
    signs: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    times: int = 1
    why: str = ""
    first: str = ""
    do: str = ""
    for_good: str = ""
    normal: str = ""
    case: str | dict[str, str] = ""
    connectors: tuple[str, ...] = ()
    named: bool = False
    releases: dict[str, str] = {}
    fixed_in: dict[str, str] = {}
    certain: bool = True
    general: bool = False
    symptom: bool = False
    replaces: tuple[str, ...] = ()
    announces: bool = False
    quotes: bool = False
    seen: tuple[str, ...] = ()
    said_by: str = ""
    unanchored: str = ""
    message: str | None = None

    @property
    def severity(self) -> Severity:
        return Severity[self.effect.upper()]

    @property
    def shows(self) -> tuple[Sign, ...]:
        return tuple(each for sign in self.signs for each in parse(sign))

    @property
    def threads(self) -> tuple[str, ...]:
        """The addresses of the GitHub issues about this problem. For a pull request, GitHub redirects the address."""
        return tuple(f"https://github.com/{each.replace('#', '/issues/')}" for each in self.seen)

    @property
    def fixes(self) -> tuple[str, ...]:
        """Codes of the fixes that kvfix has for the problem."""
        return tuple(fix.code for fix in known_fixes.handling(self.code, self.message))

    @property
    def permanent(self) -> str:
        """The permanent remedy: `for_good`, or else an upgrade to the releases in `fixed_in`, or else ""."""
        upgrade = " and ".join(f"{NAMES.get(dist, dist)} {release}" for dist, release in self.fixed_in.items())
        return self.for_good or (f"upgrade to {upgrade}" if upgrade else "")

    def values(self, log: Diagnosis, line: LogLine) -> dict[str, Any] | None:
        """Return the values for the finding's sentence, or None if the line does not fit the record."""
        if self.on:
            times = log.counts[line.name]
            return {**line.fields, "times": times} if times >= self.times else None
        return next((found for sign in self.shows if (found := fits(sign, line)) is not None), None)

    def look(self, log: Diagnosis, line: LogLine | None, nearly: bool = False) -> Answer | None:
        """Return an answer if this line shows the problem, else None. `concerns` explains the parameter `nearly`."""
        decides = findings.FUNCTIONS.get(self.name)  # Diagnosis imported all modules that register functions
        if decides is not None:
            return decides(log, line)
        if line is None:
            return None
        values = self.values(log, line)
        if values is None or not self.concerns(log, nearly):
            return None
        case = self.case if isinstance(self.case, str) else self.case[line.fields.get("meaning") or line.name]
        sentence = case.format_map(defaultdict(lambda: "?", values)) if case else _sentence_of(line)
        return Answer(sentence, line.request, sure=self.certain and not nearly)

    def gives_way(self, records: list[Problem], line: LogLine) -> bool:
        """Return True if a record in `records` is more specific than this record.

        Also return True if this record has `quotes` (docs/knowledge.md), and a record in `records` has no `quotes`.
        """
        if self.quotes and any(not each.quotes for each in records):
            return True
        own = [each for each in self.shows if fits(each, line) is not None]
        others = [each for record in records for each in record.shows if fits(each, line) is not None]
        return bool(own) and any(all(implied(each, by) and not implied(by, each) for each in own) for by in others)

    def concerns(self, log: Diagnosis, nearly: bool = True) -> bool:
        """Return True if this problem can happen with the connectors and releases that the log names.

        nearly: also accept the unexamined vLLM releases just below the oldest examined release with the problem.
        """
        ran = log.who.connectors
        if self.connectors and (ran or self.named) and not ran & set(self.connectors):
            return False
        if any(log.releases.within(dist, f">={right}") is True for dist, right in self.fixed_in.items()):
            return False
        return all(
            log.releases.within(dist, _widened(broken) if nearly and dist == "vllm" else broken) is not False
            for dist, broken in self.releases.items()
        )


def _widened(specifier: str) -> str:
    """Lower the bound in a specifier to just above the next older examined release, so `>=0.32` becomes `>0.26.0`."""
    return re.sub(
        r">=(0\.\d+)(?:\.0)?(?=,|$)",
        lambda found: f">{_BEFORE[found[1]]}" if found[1] in _BEFORE else found[0],
        specifier,
    )


def _sentence_of(line: LogLine) -> str:
    if line.name == "stack":
        return f"a thread ({line.fields['state']}) is in {line.fields['frames'][-1][2]}"
    if line.name == "raised":
        return f"{line.fields['class'] or 'died'}: {line.fields['text']}"[:240].rstrip(": ")
    return line.evidence.text[:240]


class Knowledge(msgspec.Struct, frozen=True):
    """All records. kvfix tries `problems` in order. `retired` maps each retired code to the reason."""

    problems: tuple[Problem, ...]
    retired: dict[str, str]


@lru_cache(maxsize=1)
def knowledge() -> Knowledge:
    """Read `knowledge.json`, which `make knowledge` compiles from `knowledge/*.toml`."""
    return msgspec.json.decode(FILE.read_bytes(), type=Knowledge)


def catalogue() -> tuple[Problem, ...]:
    return knowledge().problems


@lru_cache(maxsize=1)
def rules() -> dict[str, tuple[Problem, ...]]:
    """Return, for each kind of line, the records that kvfix tries at a line of this kind."""
    by_kind: dict[str, tuple[Problem, ...]] = {}
    for record in catalogue():
        for kind in record.on:
            by_kind[kind] = (*by_kind.get(kind, ()), record)
    return by_kind


def of_ledger(violated: Finding) -> Problem:
    """Make a record for a violated rule of the ledger, with the name and the text `doc` of the rule."""
    rule = next(each for each in RULES if each.code == violated.code)
    title = f"{rule.name.replace('-', ' ').capitalize()}."
    cause = " ".join(rule.doc.strip().partition("\n\n")[0].split())
    return Problem(code=rule.code, name=rule.name, title=title, effect="wrong", why=cause, message=violated.message)


#: Pairs of a record's number in the catalogue and one of the record's signs.
_Numbered = list[tuple[int, Sign]]


@lru_cache(maxsize=1)
def _index() -> tuple[BytesAhoCorasick, list[_Numbered], dict[str, _Numbered]]:
    """Return an index (search, signs, others) of the signs of all records that are not general.

    The key of a sign is the longest fixed part of its text, or else its field `source`. `search` finds the keys in a
    line. `signs` has the signs for each key. `others` has the signs without a key, by exception class ("": any).
    """
    by_part: dict[bytes, _Numbered] = {}
    others: dict[str, _Numbered] = {}
    for number, record in enumerate(catalogue()):
        for sign in () if record.general else record.shows:
            part = (longest(sign.text) or sign.source).encode()
            (by_part.setdefault(part, []) if part else others.setdefault(sign.kind, [])).append((number, sign))
    return BytesAhoCorasick(list(by_part)), list(by_part.values()), others


def at(line: LogLine) -> tuple[Problem, ...]:
    """Return the records with a sign that fits the line, except general records. Do not check the log's releases."""
    if line.name == "logged":
        return _at("logged", line.body, "", "", "", (), False)
    get = line.fields.get
    kind, text, source, frames = get("type", ""), get("text", ""), get("source", ""), tuple(get("frames", ()))
    return _at(line.name, line.body, kind, text, source, frames, bool(get("fault")))


#: The cache helps because logs repeat lines. The arguments are all values that `fits` reads from a line.
@lru_cache(maxsize=1024)
def _at(
    name: str, body: bytes, kind: str, text: str, source: str, frames: tuple[Frame, ...], fault: bool
) -> tuple[Problem, ...]:
    search, by_part, others = _index()
    searched = f"{text}\n{source}".encode() if name == "raised" else body
    parts = {number for number, _, _ in search.find_matches_as_indexes(searched, overlapping=True)}
    signs = [each for part in parts for each in by_part[part]]
    signs += [each for of in {"", kind} for each in others.get(of, ())]
    fields = {"type": kind, "text": text, "source": source, "frames": frames, "fault": fault}
    line = LogLine(name, fields, None, "", "", 0, body)
    fitting = {number for number, sign in signs if fits(sign, line) is not None}
    return tuple(catalogue()[number] for number in sorted(fitting))


def general(line: LogLine) -> Problem | None:
    """Return the general record that fits this line. If several fit, return the record with the longest sign."""
    every = ((record, sign) for record in catalogue() if record.general for sign in record.shows)
    fitting = [(len(longest(sign.text)), record) for record, sign in every if fits(sign, line) is not None]
    return max(fitting, key=itemgetter(0), default=(0, None))[1]


def quoted(record: Problem, log: Diagnosis, line: LogLine) -> Problem | None:
    """Return the record of the error that this line quotes, or None if the line quotes no known error."""
    if not record.quotes:
        return None
    error = str((record.values(log, line) or {}).get("error", ""))
    kind, colon, text = error.partition(": ")
    named = colon and kind.isidentifier() and kind.endswith(("Error", "Exception"))
    fields = {"type": kind if named else "", "class": "", "text": text if named else error, "source": "", "frames": []}
    raised = replace(line, name="raised", fields=fields, body=error.encode())
    known = next(iter(at(raised)), None) or general(raised) or general(replace(line, body=error.encode()))
    return known if known is not None and known.concerns(log) else None
