"""What the log tells, as far as it has been read: stories in the ledger, counts, releases, tracebacks, findings."""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix.ledger import RULES, Ledger
from kvfix.ledger.wording import line as wording
from kvfix_tools.diagnose import events, scan, statements

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfix.ledger import Finding as Verdict
    from kvfix_tools.diagnose.findings import Rule

#: Requests that are kept in mind; the oldest are forgotten: millions take no more memory.
REQUESTS = 10_000
#: Events kept of one request.
HISTORY = 24


class Evidence(NamedTuple):
    """A line of the input."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class Seen(NamedTuple):
    """A hit, where it is, and in what traceback if it is an exception (`raised` in its fields)."""

    name: str
    fields: dict[str, Any]
    #: Seconds since 1970, as the log's clock has it.
    time: float | None
    process: str
    file: str
    line: int
    body: bytes
    stamp: bytes

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.file, self.line, scan.text(self.body))

    @property
    def request(self) -> str:
        return str(self.fields.get("request", ""))


class Told(NamedTuple):
    """A ledger event in a story, with the line that told it."""

    what: str
    file: str
    line: int


class Found:
    """A finding: its rule, and where and how it shows in this input."""

    def __init__(self, rule: Rule, sentence: str, seen: Seen | None, request: str, verdict: str) -> None:
        self.rule = rule
        self.sentence = sentence
        self.request = request
        self.verdict = verdict
        self.count = 1
        self.evidence: list[Evidence] = [seen.evidence] if seen else []
        self.first = self.last = seen.time if seen else None
        self.story: list[Told] = []
        self.verdicts: list[Verdict] = []

    @property
    def file(self) -> str | None:
        """Where it was found first; None: in no one line."""
        return self.evidence[0].file if self.evidence else None

    @property
    def order(self) -> tuple[int, str]:
        return (self.rule.severity.value, self.rule.code)


class _Traceback:
    """Frames since the last exception of one process."""

    def __init__(self) -> None:
        self.frames: deque[tuple[str, int, str]] = deque(maxlen=48)
        self.source = ""


class Case:
    """Feed it hits in the order of the log; look at `findings` any time.

    on_found: called with each new finding, for streams. watch: a request whose lines are all kept.
    timeline: gets every event too, for pages and traces.
    """

    def __init__(
        self,
        on_found: Callable[[Found], None] | None = None,
        watch: str = "",
        timeline: Any = None,
    ) -> None:
        from kvfix_tools.diagnose.findings import notes, rules

        self.ledger = Ledger(HISTORY)
        self.counts: Counter[str] = Counter()
        self.found: dict[tuple[str, str], Found] = {}
        #: {(dist, file): the releases that it names}
        self.releases: dict[tuple[str, str], Counter[str]] = {}
        self.unknowns: Counter[str] = Counter()
        self.debug = False
        #: Whether any lookup found anything.
        self.hit = False
        self.bytes = 0
        #: The one being read.
        self.file = ""
        self.watched: list[Evidence] = []
        self.memory: dict[str, Any] = {}
        self.told: dict[str, list[tuple[str, int]]] = {}
        self.timeline = timeline
        self._watch = watch
        self._on_found = on_found
        self._rules = rules()
        self._notes = notes()
        self._candidates: set[str] | None = None
        self._tracebacks: dict[str, _Traceback] = {}
        #: Requests that a crash is told of.
        self._crashed: set[str] = set()
        self._placed: set[str] = set()
        #: Kinds of lines that are only counted, once it is known where they stand.
        self._silent: set[str] = set()
        self._verdicts: dict[str, list[Verdict]] = {}
        self._asked: dict[bytes | None, scan.Groups] = {}
        self._time: float | None = None

    def take(self, file: str, base: int, hits: list[scan.Hit]) -> None:
        """Hits of one block, whose first line is the line `base` of the file (the first is 1)."""
        self.file = file
        counts = self.counts
        watch = self._watch.encode()
        silent = self._silent
        for number, stamp, process, name, groups, body in hits:
            if name == scan.DEBUG:
                self.debug = True
                continue
            counts[name] += 1
            if self.timeline is not None:
                self.timeline.hit(name, groups, scan.seconds(stamp) if stamp else None)
            if watch and watch in body:
                self._keep(Evidence(file, base + number, scan.text(body)))
            if name in silent:
                continue
            if name == "asked":
                # The same question with the same answer, on every step: nothing new for the ledger.
                request = groups[0]
                if self._asked.get(request) == groups:
                    # A prime: requests that are asked about in turns are all seen.
                    if counts[name] % 61 == 0:
                        self._look(self._seen(stamp, process, name, groups, file, base + number, body))
                    continue
                if len(self._asked) > REQUESTS:
                    self._asked.clear()
                self._asked[request] = groups
                self.hit = self.hit or groups[3] not in (None, b"0")
            usual = events.USUAL.get(name)
            event = usual(groups) if usual is not None and name in self._placed else None
            if event is None:
                self._event(self._seen(stamp, process, name, groups, file, base + number, body))
                continue
            for verdict in self._feed(event, file, base + number, stamp):
                self._judge(verdict, self._seen(stamp, process, name, groups, file, base + number, body))

    def _seen(
        self, stamp: bytes, process: str, name: str, groups: scan.Groups, file: str, line: int, body: bytes
    ) -> Seen:
        when = scan.seconds(stamp) if stamp else None
        if when is not None:
            self._time = when
        return Seen(name, scan.fields(name, groups), when, process, file, line, body, stamp)

    def _event(self, seen: Seen) -> None:
        name = seen.name
        if name in ("frame", "assertion", "exception"):
            raised = self._traced(seen)
            if raised is None:
                return
            seen = raised
        elif name not in self._placed:
            self._place(seen)
        verdicts = [
            verdict
            for event in events.of(self, seen)
            for verdict in self._feed(event, seen.file, seen.line, seen.stamp)
        ]
        self._look(seen)
        for verdict in verdicts:
            self._judge(verdict, seen)

    def _feed(self, event: Any, file: str, line: int, stamp: bytes) -> list[Verdict]:
        """What the event violates; what could not be judged is counted."""
        verdicts = self.ledger.feed(event)
        told = self.told.get(event.request)
        if told is None:
            if len(self.told) > REQUESTS:
                self._forget()
            told = self.told[event.request] = []
        told.append((file, line))
        if len(told) > HISTORY:
            del told[0]
        if self.timeline is not None:
            time = scan.seconds(stamp) if stamp else None
            self.timeline.take(event, self._time if time is None else time)
        if not verdicts:
            return verdicts
        violated = [verdict for verdict in verdicts if verdict.verdict != "unknown"]
        if len(violated) < len(verdicts):
            self.unknowns.update(verdict.code for verdict in verdicts if verdict.verdict == "unknown")
        if violated and len(self._verdicts) < 1000:
            kept = self._verdicts.setdefault(event.request, [])
            kept += violated[: 8 - len(kept)]
        return violated

    def _look(self, seen: Seen) -> None:
        for keep in self._notes.get(seen.name, ()):
            keep(self, seen)
        for rule in self._rules.get(seen.name, ()):
            answer = rule.look(self, seen)
            if answer is not None:
                self._add(rule, answer, seen)

    def _judge(self, verdict: Verdict, seen: Seen) -> None:
        """A rule of the ledger that is violated is a finding of its own, unless a crash tells the same."""
        from kvfix_tools.diagnose.findings import Answer, ledger_rule

        if verdict.code != "KVR011" and verdict.request not in self._crashed:
            self._add(ledger_rule(verdict.code), Answer(verdict.message, verdict.request), seen)

    def _add(self, rule: Rule, answer: Any, seen: Seen | None) -> None:
        request = answer.request if answer.request is not None else (seen.request if seen else "")
        # One finding of a kind for a crash of a request, one for all requests of what repeats.
        key = (rule.code, request if rule.severity.name == "CRASH" else "")
        found = self.found.get(key)
        if found is not None:
            found.count += 1
            if seen is not None:
                found.last = seen.time if seen.time is not None else found.last
                if len(found.evidence) < 5 and seen.evidence not in found.evidence:
                    found.evidence.append(seen.evidence)
            return
        found = self.found[key] = Found(rule, answer.sentence, seen, request, answer.verdict)
        found.evidence += [each for each in answer.evidence if each not in found.evidence]
        if rule.severity.name == "CRASH":
            self._crashed.add(request)
        if found.first is None:
            found.first = found.last = self._time
        found.story = self.story(request)
        found.verdicts = list(self._verdicts.get(request, ()))
        if self._on_found is not None:
            self._on_found(found)

    def end(self) -> list[Found]:
        """All is read. The findings, the worst first."""
        for rule in self._rules.get("", ()):
            answer = rule.look(self, None)
            if answer is not None:
                self._add(rule, answer, None)
        return self.findings

    @property
    def findings(self) -> list[Found]:
        """The worst first. What a crash's own arithmetic says already is not said again."""
        shown = [
            found
            for found in self.found.values()
            if not (found.rule.code.startswith("KVR") and found.request in self._crashed)
        ]
        return sorted(shown, key=lambda found: found.order)

    # What findings ask.

    def release(self, dist: str, file: str | None = None) -> str | None:
        """The release that this file names (the one being read), else all others do if they agree.

        Else the one that the line numbers of the statements give away.
        """
        named = self.releases.get((dist, self.file if file is None else file))
        if named:
            return named.most_common(1)[0][0]
        others = self.named(dist)
        if others:
            return others[0] if len(others) == 1 else None
        if dist == "lmcache" and self._candidates and len(self._candidates) == 1:
            return next(iter(self._candidates))
        return None

    def named(self, dist: str) -> list[str]:
        """All releases that the files name."""
        return sorted({release for (of, _), many in self.releases.items() if of == dist for release in many})

    @property
    def candidates(self) -> list[str]:
        """LMCache releases that the line numbers of the statements allow; empty: they tell nothing."""
        from packaging.version import Version

        return sorted(self._candidates or (), key=Version)

    def within(self, dist: str, specifier: str, file: str | None = None) -> bool | None:
        """Whether the release of the file (the one being read) is among these; None: it is not known."""
        from packaging.specifiers import SpecifierSet

        wanted = SpecifierSet(specifier, prereleases=True)
        release = self.release(dist, file)
        if release is not None:
            return release in wanted
        if self.named(dist) or dist != "lmcache":
            return None
        inside = {each in wanted for each in self.candidates}
        return inside.pop() if len(inside) == 1 else None

    def story(self, request: str) -> list[Told]:
        """The request's events so far, in words, each with its line."""
        book = self.ledger.stories.get(request)
        places = list(self.told.get(request, ()))
        if book is None or not request:
            return []
        happened = list(book.events)[-len(places) :]
        return [Told(wording(event), *place) for event, place in zip(happened, places[-len(happened) :], strict=False)]

    def hidden(self) -> list[tuple[str, str, str]]:
        """(rule, what it would have to see, what shows it): what this log's level leaves out."""
        from kvfix_tools.diagnose.findings import HIDDEN

        if self.debug or not self.counts["asked"]:
            return []
        release = self.release("lmcache") or (self.candidates or ["0.5.6"])[-1]
        names = {rule.code: rule.name for rule in RULES}
        return [
            (f"{code} {names[code]}", what, "LMCACHE_LOG_LEVEL=DEBUG")
            for code, message, what in HIDDEN
            if statements.levels(message, release) == {"debug"}
        ]

    # Reading.

    def _traced(self, seen: Seen) -> Seen | None:
        trace = self._tracebacks.get(seen.process)
        if trace is None:
            if len(self._tracebacks) > 256:
                self._tracebacks.clear()
            trace = self._tracebacks[seen.process] = _Traceback()
        if seen.name == "frame":
            trace.frames.append((seen.fields["file"], seen.fields["line"], seen.fields["function"]))
            trace.source = ""
            return None
        if seen.name == "assertion":
            trace.source = seen.fields["source"]
            return None
        del self._tracebacks[seen.process]
        text = seen.fields.get("text", "")
        meaning = scan.raised(text)
        fields = {
            **(meaning[1] if meaning else {}),
            "type": seen.fields["type"].rpartition(".")[2],
            "text": text,
            "meaning": meaning[0] if meaning else "",
            "source": trace.source,
            "frames": list(trace.frames),
        }
        return seen._replace(name="raised", fields=fields)

    def _place(self, seen: Seen) -> None:
        """Once for each kind of line: which releases have this statement at this line."""
        if seen.name == "version":
            self._name("lmcache", seen)
        if seen.name in ("version", "vllm_version"):
            self._name("vllm", seen)
            return
        at = scan.trailer(seen.body)
        if at is None:
            return
        self._placed.add(seen.name)
        if not (events.tells(seen.name) or seen.name in self._rules or seen.name in self._notes):
            self._silent.add(seen.name)
        releases = statements.releases_at(seen.name, at[0], at[1])
        if releases:
            both = releases if self._candidates is None else self._candidates & releases
            self._candidates = set(both) or self._candidates

    def _name(self, dist: str, seen: Seen) -> None:
        from packaging.version import VERSION_PATTERN, Version

        # 0.5.6-g3e11e108 is the release 0.5.6, as a checkout says it.
        plain = str(seen.fields[dist]).partition("-g")[0]
        if re.fullmatch(VERSION_PATTERN, plain, re.VERBOSE | re.IGNORECASE):
            self.releases.setdefault((dist, seen.file), Counter())[Version(plain).public] += 1

    def _keep(self, evidence: Evidence) -> None:
        if len(self.watched) < 5000:
            self.watched.append(evidence)

    def _forget(self) -> None:
        for request in list(self.told)[: REQUESTS // 4]:
            self.told.pop(request, None)
            self.ledger.forget(request)
            self._verdicts.pop(request, None)
