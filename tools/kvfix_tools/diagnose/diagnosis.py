"""The state of a diagnosis while kvfix reads the log: request histories, counts, releases and findings."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from kvfix.ledger import Finding, Ledger
from kvfix.ledger.events import Event
from kvfix_tools import redact
from kvfix_tools.diagnose import findings, ledger_events, problems, statements
from kvfix_tools.diagnose.failures import Failures
from kvfix_tools.diagnose.findings import Answer
from kvfix_tools.diagnose.ledger_events import HISTORY, REQUESTS, VIOLATED, Requests
from kvfix_tools.diagnose.line_scanner import Scanner
from kvfix_tools.diagnose.log_finding import LogFinding, in_order
from kvfix_tools.diagnose.log_line import Evidence, Fields, LogLine
from kvfix_tools.diagnose.releases import Releases, WhoRan
from kvfix_tools.diagnose.texts import WHO
from kvfix_tools.ledger import RULES

State = TypeVar("State")
#: Maximum number of separate findings. Above this number, a rule reports all further crashes in one finding.
FINDINGS = 1000
#: Every traceback violates this rule of the ledger. kvfix ignores the rule, because other findings report tracebacks.
_EXCEPTION = "exception-left-hook"
#: The ledger's rules that need DEBUG lines: (rule, kind of the DEBUG line, values in the line).
_HIDDEN = (("KVR004", "due", "granted and loaded tokens"), ("KVR007", "storing", "stored and skipped tokens"))


class Diagnosis:
    """A diagnosis of one log. The caller passes each line to `take`, in order, and can read `findings` at any time.

    kvfix calls `on_found` with each new finding, and keeps the log lines that contain the request id `request`.
    """

    def __init__(self, on_found: Callable[[LogFinding], None] | None = None, request: str = "") -> None:
        self.ledger = Ledger(HISTORY)
        #: For each kind of line: the number of lines, the first line and the last line.
        self.counts: Counter[str] = Counter()
        self.first: dict[str, LogLine] = {}
        self.last: dict[str, LogLine] = {}
        self.releases = Releases()
        self.who = WhoRan()
        self.failures = Failures()
        #: True if the input has a line that vLLM's or LMCache's logger wrote.
        self.is_own = False
        #: For each rule of the ledger, the number of events that the rule could not check.
        self.unknowns: Counter[str] = Counter()
        self.debug = False
        self.requests = Requests(self.ledger)
        self.bytes = 0
        self.request_lines: list[Evidence] = []
        #: True if kvfix read every input completely. `interrupted`: what ended the reading early, or "".
        self.is_complete = False
        self.interrupted = ""
        self._taken = 0
        self._states: dict[type, Any] = {}
        self._request = request.encode()
        self._on_found = on_found
        self._rules = problems.rules()
        self._notes = findings.notes()
        self._found: dict[tuple[str, str], LogFinding] = {}
        self._crashed: set[str] = set()
        #: Name of the last input that has lines of kvfix's own recorder.
        self.recording = ""
        self._time: float | None = None
        #: The fields of the last lookup, and how often in a row the log has repeated these fields.
        self._asked: Fields = {}
        self._repeats = 0

    def state(self, kind: type[State]) -> State:
        """Return this diagnosis's object of the class `kind`. A rule keeps its state between lines in the object."""
        kept = self._states.get(kind)
        if kept is None:
            kept = self._states[kind] = kind()
        return cast("State", kept)

    def take(self, line: LogLine) -> None:
        name = line.name
        self._taken += 1
        self.releases.file = line.file
        if name == WHO:
            self.who.take(line)
            return
        if name == "recorded":
            self.recording = line.file
            return
        self.counts[name] += 1
        self.first.setdefault(name, line)
        self.last[name] = line
        if self._request and self._request in line.body and len(self.request_lines) < 5000:
            self.request_lines.append(line.evidence)
        if line.time is not None:
            self._time = line.time
        if name == "asked":
            # vLLM looks up a waiting request in every step. If a lookup repeats, run the rules only every 16th time.
            self._repeats = self._repeats + 1 if line.fields is self._asked else 0
            is_repeated = self._repeats > 0
            if not is_repeated:
                known = self.requests[line.request]
                is_repeated = known.asked == line.fields
                known.asked = self._asked = line.fields
            if is_repeated:
                self.failures.take(line)
                if self._repeats % 16 == 0:
                    self._run(name, line)
                return
        self.who.take(line)
        self.failures.take(line)
        if name in self.releases.awaited:
            self.releases.take(line)
        make = ledger_events.MAKERS.get(name)
        violated: list[Finding] = []
        for event in make(self.ledger, line.fields) if make is not None else ():
            violated += self._feed(event, line)
        for note in self._notes.get(name, ()):
            note(self, line)
        self._answers(line)
        if violated:
            self._judge(violated, line)

    def end(self) -> list[LogFinding]:
        """Run the rules for the end of the log. Return the findings, causes first."""
        self._run("", None)
        return self.findings

    def _run(self, kind: str, line: LogLine | None) -> None:
        """Apply each rule that looks at this kind of line. Most rules call a function of the package `findings`."""
        for rule in self._rules.get(kind, ()):
            if (answer := rule.look(self, line)) is not None:
                self.add(rule, answer, line)

    @property
    def findings(self) -> list[LogFinding]:
        """The findings, causes first.

        Omit findings that another finding replaces or explains, and rule violations of crashed requests.
        """
        replaced = {code for found in self._found.values() for code in found.rule.replaces}
        shown = [
            found
            for found in self._found.values()
            if found.rule.code not in replaced
            and not (found.rule.announces and found.is_explained(self._found.values()))
            and not (found.rule.message is not None and found.request in self._crashed)
        ]
        for found in shown:
            if found.is_foreign and not self.who.engine:
                found.severity = findings.Severity.NOTE
        return in_order(shown)

    @property
    def done(self) -> tuple[int, int, int, int]:
        """The numbers of requests, lookups, loads and stores in the log."""
        counts = self.counts
        return (
            self.requests.named,
            counts["asked"] + counts["mp_prefetched"],
            counts["retrieved"] + counts["mp_retrieved"],
            counts["stored"] + counts["mp_stored"],
        )

    def hidden(self) -> list[tuple[str, str, str]]:
        """Return (rule, needed values, setting that logs the values) for each rule whose lines the log lacks."""
        if self.debug or not self.counts["asked"]:
            return []
        release = self.releases.one("lmcache") or (self.releases.candidates or ["0.5.6"])[-1]
        names = {rule.code: rule.name for rule in RULES}
        return [
            (f"{code} {names[code]}", what, "LMCACHE_LOG_LEVEL=DEBUG")
            for code, message, what in _HIDDEN
            if statements.levels(message, release) == {"debug"}
        ]

    def _feed(self, event: Event, line: LogLine) -> list[Finding]:
        """Feed an event to the ledger. Return the violated rules, and count the rules that could not be checked."""
        judged = self.ledger.feed(event)
        known = self.requests[event.request]
        known.places.append((line.file, line.number))
        if not judged:
            return judged
        self.unknowns.update(each.code for each in judged if each.verdict == "unknown")
        violated = [each for each in judged if each.verdict != "unknown"]
        known.violated += violated[: VIOLATED - len(known.violated)]
        return violated

    def _answers(self, line: LogLine) -> None:
        rules = self._rules.get(line.name, ())
        if meaning := line.fields.get("meaning"):
            rules += tuple(each for each in self._rules.get(meaning, ()) if each not in rules)
        is_error = line.name in problems.LINES
        if is_error and self.failures.is_ending(line):
            return
        is_degraded = line.name == "degraded"
        if is_degraded:  # search the known problems as if this line were an error
            logged = {"level": "error", "logger": "lmcache", "place": ""}
            line, is_error = replace(line, name="logged", fields={**line.fields, **logged}), True
        if is_error:
            rules += (at := problems.at(line))
        answered = [(rule, answer) for rule in rules if (answer := rule.look(self, line)) is not None]
        if is_error and not answered:
            answered = [(each, answer) for each in at if (answer := each.look(self, line, True)) is not None]
        if not answered:
            if is_error:
                self.failures.unknown(line)
            return
        shown = [rule for rule, _ in answered if rule.signs]
        if is_degraded and shown:  # a known problem explains the error, so drop the general finding KVD207
            answered = [each for each in answered if each[0].signs]
        for rule, answer in answered:
            if rule.signs and rule.gives_way(shown, line):
                continue
            # If the line quotes an error that is a known problem, report the known problem instead of `rule`.
            quoted = problems.quoted(rule, self, line)
            if quoted is not None:
                rule, answer = quoted, answer._replace(sure=quoted.certain)
            self.add(rule, answer, line)

    def _judge(self, violated: list[Finding], line: LogLine) -> None:
        """Report violated rules of the ledger. Skip requests that already have a finding about a crash."""
        for each in violated:
            if each.name != _EXCEPTION and each.request not in self._crashed:
                self.add(problems.of_ledger(each), findings.Answer(each.message, each.request), line)

    def add(self, rule: problems.Problem, answer: Answer, line: LogLine | None) -> None:
        """Add a finding of this rule at this line, or at the end of the log if `line` is None."""
        request = answer.request if answer.request is not None else (line.request if line else "")
        crash = rule.severity is findings.Severity.CRASH
        if crash and len(self._crashed) < REQUESTS:
            self._crashed.add(request)
        # A rule about crashes gives one finding for each request. Any other rule gives one finding for all requests.
        key = (rule.code, request if crash else "")
        found = self._found.get(key)
        if found is None and len(self._found) >= FINDINGS:
            key = (rule.code, "")
            found = self._found.get(key)
        if found is not None:
            found.again(line)
            return
        found = self._found[key] = LogFinding(rule, answer, redact.text(answer.sentence), request, line)
        found.ran = self.releases.running() if line is not None else {}
        found.is_foreign = line is not None and (
            line.name == "died" or (line.name == "logged" and not line.fields["logger"])
        )
        found.began = self._taken if line is not None else self._began(found)
        if found.first is None:
            found.first = found.last = self._time
        found.history = self.requests.history(request)
        if (known := self.requests.get(request)) is not None:
            found.violated = list(known.violated)
        if self._on_found is not None:
            self._on_found(found)

    def _began(self, found: LogFinding) -> float:
        """Return the sort key `began` of a finding made at the log's end. Findings at earlier lines get lower keys."""
        if not found.evidence:
            return math.inf
        file, number, _ = found.evidence[0]
        before = [
            each.began
            for each in self._found.values()
            if each is not found and each.file == file and each.evidence[0].line <= number
        ]
        return max(before, default=0.0) + 0.5


def diagnosed(log: bytes, file: str = "log") -> Diagnosis:
    """Return the diagnosis of a log that is in memory."""
    found = Diagnosis()
    found.bytes, found.is_complete = len(log), True
    scanner = Scanner(file)
    for line in chain(scanner.scan(log), scanner.end()):
        found.take(line)
    found.is_own, found.debug = scanner.is_own, scanner.debug
    found.end()
    return found
