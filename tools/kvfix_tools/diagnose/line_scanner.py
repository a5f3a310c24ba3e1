"""Turn blocks of log text into lines that matter. Only lines with a needle and lines of a traceback are parsed.

The scanner caches the result of each text, because logs repeat: vLLM asks about a waiting request in every step, and
warnings and tracebacks repeat with another time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from msgspec.structs import replace

from kvfix_tools.diagnose import bare_lines, log_formats, needles, texts
from kvfix_tools.diagnose.bare_lines import Headless
from kvfix_tools.diagnose.log_line import Fields, LogLine
from kvfix_tools.diagnose.needles import FRAME
from kvfix_tools.diagnose.stacks import Stack, Stacks
from kvfix_tools.diagnose.texts import LEVEL, STAMP, Framed, Other
from kvfix_tools.diagnose.tracebacks import Part, Raised, Tracebacks

#: Name of the one line that stands for all DEBUG lines of an input.
DEBUG = "debug"
#: A log of an engine has a line of vLLM's or LMCache's logger within these first bytes.
_OWN = 1 << 20
#: Maximum number of bytes of a line to parse.
LONGEST_LINE = 1 << 16
#: Maximum bytes of all cached texts and of one text; maximum number of cached prefixes.
_REMEMBERED, _LONGEST, _PREFIXES = 2 << 20, 1 << 14, 1024
#: Maximum bytes before LMCache's frame: a process, a colour, the time.
_HEAD = STAMP + 24
_DIGITS = b"0123456789"


class Scanner:
    """The scanner of one input. It takes blocks of whole lines in order, and yields every line that matters."""

    def __init__(self, file: str = "log") -> None:
        self._file = file
        self._number = 1
        #: Bytes of all earlier blocks.
        self._scanned = 0
        self._debug = False
        self._tracebacks = Tracebacks()
        self._stacks = Stacks()
        #: {process: the source of an assertion without a traceback}
        self._source: dict[str, str] = {}
        #: The last line of a traceback: its process, the place of the logging statement, its number and body.
        self._placed = ("", "", 0, b"")
        #: {text from LMCache's frame to the end of the line: its parse}
        self._framed: dict[bytes, Framed] = {}
        #: {line of another logger: its parse}
        self._others: dict[bytes, Other] = {}
        #: {prefix of a vLLM line with its time: {body: its parse}}. Prefixes that differ in the time share one dict.
        self._heads: dict[bytes, dict[bytes, Other]] = {}
        self._kinds: dict[tuple[bytes, ...], dict[bytes, Other]] = {}
        self._remembered = 0
        #: The year of LMCache's first line, because vLLM's lines have no year.
        self._year = b""
        #: The lines without a logger's prefix that count; None if not decided yet.
        self._headless: Headless | None = None
        #: True if a line has the prefix of vLLM's or LMCache's logger.
        self.is_own = False
        #: {prefix that a container adds to a line, without digits: True if it has no message}
        self._prefixes: dict[bytes, bool] = {}

    def scan(self, block: bytes) -> Iterator[LogLine]:
        text, at = log_formats.plain(block)
        if not self.is_own and self._scanned < _OWN:
            self.is_own = texts.is_own(text)
        self._scanned += len(block)
        lines = text.split(b"\n")
        if not lines[-1]:
            lines.pop()
        self._decide(lines)
        first, file, known = self._number, self._file, self._framed
        traces, stacks, heads = self._tracebacks.open, self._stacks, self._heads
        looked_at = self._headless is Headless.WHOLE
        numbers = count(first) if at is None else (first + number for number in at)
        for line, number in zip(lines, numbers, strict=False):
            place = line.find(FRAME)
            if place >= 0:
                tail = line[place:]
                framed = known.get(tail) or self._behind_frame(tail)
                if (
                    not framed.is_alone
                    or (traces and framed.name == "logged")
                    or (place > _HEAD and not self._is_prefix(line[:place]))
                ):
                    yield from self._read(line[:LONGEST_LINE], number)
                elif framed.name:
                    yield _log_line(framed, line, place, file, number)
            elif looked_at or traces or stacks.open or needles.in_line(line):
                head, bracket, body = line.partition(b"] ")
                alike = heads.get(head)
                other = (alike and alike.get(body)) or self._other(line[:LONGEST_LINE], head + bracket, body)
                if stacks.open or not other.is_alone or other.process in traces:
                    yield from self._unframed(other, number, line)
                elif other.found is not None:
                    name, fields = other.found
                    time = texts.clock(line, self._year)
                    yield LogLine(name, fields, time, other.process, file, number, other.evidence)
            if place >= STAMP and not self._year.isdigit():
                self._year = line[place - STAMP :][:4]
        self._number += block.count(b"\n")

    def _decide(self, lines: list[bytes]) -> None:
        """Decide which lines without a prefix count. A later block of a stream may change the decision."""
        now = bare_lines.headless(lines, self.is_own)
        if self._headless is None or (now is not Headless.WHOLE and self._headless is not Headless.ALL):
            if self._headless not in (None, now):
                self._forget()
            self._headless = now

    def end(self) -> Iterator[LogLine]:
        """Yield the tracebacks that are cut off by the end of the input."""
        for process, raised in self._tracebacks.cut():
            last, place, number, body = self._placed
            if process != last:
                place, number, body = "", self._number, b""
            yield self._raised(raised, "", process, number, body, place)
        stack = self._stacks.end()
        if stack is not None:
            yield self._stack(stack, self._number)

    def _behind_frame(self, tail: bytes) -> Framed:
        level = LEVEL.match(tail)
        if level is None or len(tail) > _LONGEST or (level[1] == b"DEBUG" and not self._debug):
            return texts.IN_ITS_LINE
        body = tail[level.end() :]
        framed = texts.framed(level[1], body) if body.find(FRAME) < 0 else texts.IN_ITS_LINE
        if framed.name == "logged" and Part(body).sure:
            framed = texts.IN_ITS_LINE
        self._remember(len(tail))
        self._framed[tail] = framed
        return framed

    def _other(self, line: bytes, head: bytes, body: bytes) -> Other:
        other = self._others.get(line)
        if other is None:
            other = Other(line, self._headless or Headless.ALL)
            if len(line) <= _LONGEST:
                self._remember(len(line) + len(head))
                kind = other.kind(head, body)
                if kind is None:
                    self._others[line] = other
                else:
                    alike = self._heads.setdefault(head[:-2], self._kinds.setdefault(kind, {}))
                    other = alike.setdefault(body, other)  # parsed before, with another time
        return other

    def _remember(self, size: int) -> None:
        """Count a cached text of this size, and clear the caches if they are full."""
        self._remembered += size
        if self._remembered > _REMEMBERED:
            self._forget()
            self._remembered = size

    def _forget(self) -> None:
        for kept in (self._framed, self._others, self._heads, self._kinds):
            kept.clear()
        self._remembered = 0

    def _is_prefix(self, text: bytes) -> bool:
        """Return True if the text before LMCache's frame is a container's prefix, not the end of another line."""
        if self._tracebacks.open or self._stacks.open:
            return False
        key = text.translate(None, _DIGITS)
        known = self._prefixes.get(key)
        if known is None:
            if len(self._prefixes) >= _PREFIXES:
                self._prefixes.clear()
            known = len(log_formats.without_prefix(text)) <= _HEAD
            if known:
                other = Other(text)
                known = other.is_alone and other.found is None
            self._prefixes[key] = known
        return known

    def _read(self, text: bytes, number: int) -> Iterator[LogLine]:
        """Yield all messages of a line. Two lines may be glued together."""
        while True:
            start = text.find(FRAME)
            level = LEVEL.match(text, start) if start >= 0 else None
            if level is None:
                yield from self._unframed(Other(text, self._headless or Headless.ALL), number, text)
                return
            if level[1] == b"DEBUG" and not self._debug:
                self._debug = True
                yield LogLine(DEBUG, {}, None, "", self._file, number, b"")
            at = level.end()
            framed = texts.framed(level[1], text[at:])
            if framed.name == "logged":
                self._tracebacks.take(texts.process(text[:start]), Part(text[at:]))
            if start > _HEAD:
                yield from self._unframed(Other(text[:start]), number, text[:start])
            if framed.name:
                yield _log_line(framed, text, start, self._file, number)
            again = text.find(FRAME, at)
            if again < 0 or not LEVEL.match(text, again):
                return
            text = text[at:]

    def _unframed(self, other: Other, number: int, line: bytes) -> list[LogLine]:
        found: list[LogLine] = []
        if other.of_stack or self._stacks.open:
            inside, stack = self._stacks.take(other.body)
            if stack is not None:
                found.append(self._stack(stack, number))
            if inside:
                return found
        inside, raised = self._tracebacks.take(other.process, other.part)
        if inside:
            self._placed = (other.process, other.place, number, other.body)
        if raised is not None:
            made = self._raised(raised, other.level, other.process, number, other.body, other.place)
            found.append(replace(made, time=texts.clock(line, self._year)))
        if not inside and other.body.lstrip().startswith(b"assert "):
            self._source[other.process] = other.body.strip().decode("utf-8", "replace")
        if not inside and other.found is not None:
            name, fields = other.found
            if name == "raised":
                follows = fields["follows"] and self._tracebacks.follows(other.process)
                fields = {**fields, "follows": follows, "source": self._asserted(fields, other.process)}
            time = texts.clock(line, self._year)
            found.append(LogLine(name, fields, time, other.process, self._file, number, other.evidence))
        return found

    def _asserted(self, fields: Fields, process: str) -> str:
        """Return the line of code before an AssertionError whose traceback is cut off."""
        source = self._source.pop(process, "")
        return source if fields["type"] == "AssertionError" else str(fields["source"])

    def _raised(self, raised: Raised, level: str, process: str, number: int, body: bytes, place: str = "") -> LogLine:
        fields = {**texts.with_meaning(raised), "level": level, "place": place}
        return LogLine("raised", fields, None, process, self._file, number, body[: texts.LONGEST_BODY])

    def _stack(self, stack: Stack, number: int) -> LogLine:
        where = f"{stack.thread or 'a thread'} ({stack.state}) in {stack.frames[-1][2]}".encode()
        fields = stack._asdict()
        return LogLine("stack", fields, None, stack.process, self._file, number, where[: texts.LONGEST_BODY])


def _log_line(framed: Framed, line: bytes, place: int, file: str, number: int) -> LogLine:
    """Return the LogLine of a line with LMCache's frame at `place`."""
    if not framed.placed:
        return LogLine(framed.name, framed.fields, None, "", file, number, framed.body)
    time, process = texts.second_and_process(line[: max(0, place - 4)])
    if time is not None:
        time += texts.MILLISECONDS.get(line[place - 3 : place], 0.0)
    return LogLine(framed.name, framed.fields, time, process, file, number, framed.body)
