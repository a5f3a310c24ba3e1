"""What the log tells, as far as it has been read: stories in the ledger, counts, releases, tracebacks, findings."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kvfix import redact
from kvfix.ledger import RULES, Ledger
from kvfix.ledger.events import Raised
from kvfix.ledger.wording import line as wording
from kvfix_tools.diagnose import events, scan, statements, tracebacks, usual
from kvfix_tools.diagnose.recorded import Recorders
from kvfix_tools.diagnose.releases import Releases
from kvfix_tools.diagnose.seen import Evidence, Found, Seen, Told

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfix.ledger import Finding as Verdict
    from kvfix_tools.diagnose.findings import Rule

#: Requests that are kept in mind; the oldest are forgotten: millions take no more memory.
REQUESTS = 10_000
#: Events kept of one request.
HISTORY = 24


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
        self.releases = Releases()
        self.unknowns: Counter[str] = Counter()
        self.debug = False
        #: Whether any lookup found anything.
        self.hit = False
        self.bytes = 0
        #: Rules of the ledger that this source shows nothing of.
        self.blind: set[str] = set()
        self.watched: list[Evidence] = []
        self.memory: dict[str, Any] = {}
        self.told: dict[str, list[tuple[str, int]]] = {}
        self.timeline = timeline
        self._watch = watch.encode()
        self._on_found = on_found
        self._rules = rules()
        self._notes = notes()
        self._tracebacks = tracebacks.Tracebacks()
        #: Requests that a crash is told of.
        self._crashed: set[str] = set()
        self._recorders = Recorders()
        self._placed: set[str] = set()
        #: Kinds of lines that are only counted, once it is known where they stand.
        self._silent: set[str] = set()
        self._verdicts: dict[str, list[Verdict]] = {}
        self._usual = usual.Usual()
        self._time: float | None = None

    def take(self, file: str, base: int, hits: list[scan.Hit]) -> None:
        """Hits of one block, whose first line is the line `base` of the file (the first is 1)."""
        self.releases.file = file
        counts = self.counts
        silent = self._silent
        noted = self.timeline is not None or bool(self._watch)
        for number, stamp, process, name, groups, body in hits:
            counts[name] += 1
            if noted:
                self._note(name, groups, stamp, Evidence(file, base + number, ""), body)
            if name in silent:
                continue
            if name in usual.NAMES:
                if name == "asked" and groups[3] not in (None, b"0"):
                    self.hit = True
                what = self._usual.take(name, groups, (file, base + number, stamp))
                if what == usual.KEPT:
                    if name not in self._placed:
                        self._place(self._seen(stamp, process, name, groups, file, base + number, body))
                    if self.timeline is not None:
                        self._tell(str(groups[0], "ascii"))  # type: ignore[arg-type]
                    continue
                # The same question with the same answer, on every step. A prime: requests that are asked about in
                # turns are all seen.
                if what == usual.AGAIN:
                    if counts[name] % 61 == 0:
                        self._look(self._seen(stamp, process, name, groups, file, base + number, body))
                    continue
            elif name == scan.DEBUG:
                self.debug = True
                del counts[name]  # it stands for lines, and is none
                continue
            self._event(self._seen(stamp, process, name, groups, file, base + number, body))

    def _tell(self, request: str) -> None:
        """The ledger hears what was kept of this request."""
        now = self._time
        for name, groups, (file, line, stamp) in self._usual.untold(request):
            seen = self._seen(stamp, "", name, groups, file, line, b"")
            for event in events.of(self, seen):
                self._feed(event, seen)
        self._time = now

    def _note(self, name: str, groups: scan.Groups, stamp: bytes, place: Evidence, body: bytes) -> None:
        """What a page, a trace or `--request` shows of a line, whatever it means."""
        if self.timeline is not None:
            self.timeline.hit(name, groups, scan.seconds(stamp) if stamp else None)
        if self._watch and self._watch in body and len(self.watched) < 5000:
            self.watched.append(place._replace(text=scan.text(body)))

    def _seen(
        self, stamp: bytes, process: str, name: str, groups: scan.Groups, file: str, line: int, body: bytes
    ) -> Seen:
        when = scan.seconds(stamp) if stamp else None
        if when is not None:
            self._time = when
        return Seen(name, scan.fields(name, groups), when, process, file, line, body, stamp)

    def _event(self, seen: Seen) -> None:
        name = seen.name
        if name == "recorded":
            self._recorders.take(self, seen)
            return
        if name in tracebacks.LINES:
            raised = self._tracebacks.take(seen)
            if raised is None:
                return
            seen = raised
        elif name not in self._placed:
            self._place(seen)
        self._tell(seen.request)
        verdicts = [verdict for event in events.of(self, seen) for verdict in self._feed(event, seen)]
        self._look(seen)
        for verdict in verdicts:
            self._judge(verdict, seen)

    def _feed(self, event: Any, seen: Seen) -> list[Verdict]:
        """What the event violates; what could not be judged is counted."""
        self._tell(event.request)
        verdicts = self.ledger.feed(event)
        told = self.told.get(event.request)
        if told is None:
            if len(self.told) > REQUESTS:
                self._forget()
            told = self.told[event.request] = []
        told.append((seen.file, seen.line))
        if len(told) > HISTORY:
            del told[0]
        if self.timeline is not None:
            self.timeline.take(event, self._time if seen.time is None else seen.time)
        if not verdicts:
            return verdicts
        violated = [each for each in verdicts if each.verdict != "unknown" and each.code not in self.blind]
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
            self._add(ledger_rule(verdict), Answer(verdict.message, verdict.request), seen)

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
        found = self.found[key] = Found(rule, redact.text(answer.sentence), seen, request, answer.verdict)
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
        shown = [found for own in self._recorders.cases.values() for found in own.findings]
        shown += [
            found
            for found in self.found.values()
            if not (found.rule.code.startswith("KVR") and found.request in self._crashed)
        ]
        return sorted(shown, key=lambda found: found.order)

    # What findings ask.

    def story(self, request: str) -> list[Told]:
        """The request's events so far, in words, each with its line."""
        self._tell(request)
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
        release = self.releases.one("lmcache") or (self.releases.candidates or ["0.5.6"])[-1]
        names = {rule.code: rule.name for rule in RULES}
        return [
            (f"{code} {names[code]}", what, "LMCACHE_LOG_LEVEL=DEBUG")
            for code, message, what in HIDDEN
            if statements.levels(message, release) == {"debug"}
        ]

    # Other sources.

    def another(self) -> Case:
        """A case with a ledger of its own, of the same releases; its findings go to the same place."""
        other = Case(self._on_found, timeline=self.timeline)
        other.releases = self.releases
        return other

    def told_in_engine(self, event: Any, seen: Seen) -> None:
        """An event that kvfix recorded in the engine. What left a hook there is looked at as it is in a log."""
        self._time = seen.time
        verdicts = self._feed(event, seen)
        if isinstance(event, Raised):
            kind, _, text = event.error.partition(": ")
            fields = tracebacks.raised(kind, text, [("", 0, event.where)])
            self._look(seen._replace(name="raised", fields={**fields, "request": event.request}))
        for verdict in verdicts:
            self._judge(verdict, seen)

    def _place(self, seen: Seen) -> None:
        """Once for each kind of line: which releases have this statement at this line."""
        if seen.name in ("version", "vllm_version"):
            for dist in ("lmcache", "vllm"):
                self.releases.name(dist, str(seen.fields.get(dist, "")), seen.file)
        elif self.releases.place(seen.name, seen.body):
            self._placed.add(seen.name)
            if not (events.tells(seen.name) or seen.name in self._rules or seen.name in self._notes):
                self._silent.add(seen.name)

    def _forget(self) -> None:
        for request in list(self.told)[: REQUESTS // 4]:
            self.told.pop(request, None)
            self.ledger.forget(request)
            self._verdicts.pop(request, None)
