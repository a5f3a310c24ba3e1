"""Turn blocks of log text into LogLines. Parse only tracebacks and lines with a word of knowledge/words.toml."""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import count

from kvfix_tools.diagnose import grammar, log_formats, statements, texts
from kvfix_tools.diagnose.grammar import FRAME
from kvfix_tools.diagnose.log_line import Fields, LogLine
from kvfix_tools.diagnose.texts import LEVEL, LONGEST_BODY, STAMP, Headless, Other
from kvfix_tools.diagnose.tracebacks import Part, Stacks, Tracebacks, by_name

#: An input is an engine's log if its first _OWN bytes have a line of vLLM's or LMCache's logger.
_OWN = 1 << 20
#: kvfix parses at most this number of bytes of a line.
LONGEST_LINE = 1 << 16
_DEBUG = FRAME + b"DEBUG:"
#: Maximum bytes before the fixed text of LMCache's prefix: the process's name, a colour code and the time.
_HEAD = STAMP + 24
#: If more than _FEW lines are neither known messages nor in tracebacks, the input is not a paste of messages. Unless
#: the input is an engine's log, kvfix then parses almost no lines without a logger's prefix (Headless.NONE).
_FEW = 5
#: A Markdown heading, or a comment in a settings file. An input with one of these lines is not a paste of messages.
_HEADING = re.compile(rb"\s*#{1,6} \S")


class Scanner:
    """The scanner of one input. `scan` takes blocks of whole lines in order, and yields the lines that matter."""

    def __init__(self, file: str = "log") -> None:
        self._file = file
        self._number = 1
        self._scanned = 0
        self.debug = False
        self._tracebacks = Tracebacks()
        self._stacks = Stacks()
        #: For each process, the last source line with `assert` that is outside a traceback.
        self._source: dict[str, str] = {}
        #: (process, place of the logging statement, line number, body) of a traceback's last line.
        self._placed = ("", "", 0, b"")
        #: The year in LMCache's first line. kvfix uses this year for vLLM's lines, which have no year.
        self._year = b""
        #: Some lines have no logger's prefix. This value tells kvfix which of these lines to parse. The value is None
        #: before the first block.
        self._headless: Headless | None = None
        #: True if the first _OWN bytes have a line of vLLM's or LMCache's logger.
        self.is_own = False

    def scan(self, block: bytes) -> Iterator[LogLine]:
        text, at = log_formats.plain(block)
        if not self.is_own and self._scanned < _OWN:
            self.is_own = texts.is_own(text)
        self._scanned += len(block)
        lines = text.split(b"\n")
        newlines = len(lines) - 1 if at is None else block.count(b"\n")
        if not lines[-1]:
            lines.pop()
        self._decide(lines)
        self.debug = self.debug or _DEBUG in text
        first, file, headless = self._number, self._file, self._headless or Headless.ALL
        traces, stacks = self._tracebacks.open, self._stacks
        behind_frame, parsed, clock = texts.behind_frame, texts.parsed, texts.clock
        looked_at = headless is Headless.WHOLE
        numbers = count(first) if at is None else (first + number for number in at)
        for line, number in zip(lines, numbers, strict=False):
            place = line.find(FRAME)
            if place >= 0:
                framed = behind_frame(line[place : place + LONGEST_BODY])
                second, process, is_prefix = _before_frame(line[: place - 4] if place > 4 else b"")
                if (
                    framed is None
                    or not is_prefix
                    or (traces and framed.name == "logged")
                    or (place > _HEAD and (traces or stacks.open))
                ):
                    yield from self._read(line[:LONGEST_LINE], number)
                elif framed.name:
                    yield _log_line(framed, second, line[place - 3 : place], process, file, number)
                if place >= STAMP and not self._year.isdigit():
                    self._year = line[place - STAMP :][:4]
            elif looked_at or traces or stacks.open or grammar.in_line(line):
                other, stamp = parsed(line[:LONGEST_LINE], headless)
                if traces or stacks.open or not other.is_alone:
                    yield from self._unframed(other, number, line, stamp)
                elif other.found is not None:
                    name, fields = other.found
                    time = clock(line, self._year, stamp)
                    yield LogLine(name, fields, time, other.process, file, number, other.body[:LONGEST_BODY])
        self._number += newlines

    def _decide(self, lines: list[bytes]) -> None:
        """Decide again for each block whether kvfix parses lines without a logger's prefix (`Headless`)."""
        now = Headless.ALL if self.is_own else Headless.WHOLE if _are_few_others(lines) else Headless.NONE
        if self._headless is None or (now is not Headless.WHOLE and self._headless is not Headless.ALL):
            self._headless = now

    def end(self) -> Iterator[LogLine]:
        """Yield the tracebacks and the stack that the end of the input cuts off."""
        for process, raised in self._tracebacks.cut():
            _, place, number, body = self._placed if self._placed[0] == process else ("", "", self._number, b"")
            yield self._raised({**raised, "level": "", "place": place}, process, number, body, None)
        stack = self._stacks.end()
        if stack is not None:
            yield self._stack(stack, self._number)

    def _read(self, text: bytes, number: int) -> Iterator[LogLine]:
        """Yield all messages in a line. Two processes may have written messages without a newline between them."""
        while True:
            start = text.find(FRAME)
            level = LEVEL.match(text, start) if start >= 0 else None
            if level is None:
                yield from self._unframed(Other(text, self._headless or Headless.ALL), number, text)
                return
            at = level.end()
            framed = texts.framed(level[1], text[at:])
            if framed.name == "logged":
                self._tracebacks.take(texts.process(text[:start]), Part(text[at:]))
            if start > _HEAD:
                yield from self._unframed(Other(text[:start]), number, text[:start])
            if framed.name:
                second, process, _ = _before_frame(text[: max(0, start - 4)])
                yield _log_line(framed, second, text[max(0, start - 3) : start], process, self._file, number)
            again = text.find(FRAME, at)
            if again < 0 or not LEVEL.match(text, again):
                return
            text = text[at:]

    def _unframed(self, other: Other, number: int, line: bytes, stamp: bytes = b"") -> list[LogLine]:
        found: list[LogLine] = []
        may_join = other.may_join or self._tracebacks.open or self._stacks.open
        if other.of_stack or self._stacks.open:
            inside, stack = self._stacks.take(other.body)
            if stack is not None:
                found.append(self._stack(stack, number))
            if inside:
                return found
        inside, raised = self._tracebacks.take(other.process, other.part) if may_join else (False, None)
        if inside:
            self._placed = (other.process, other.place, number, other.body)
        if raised is not None:
            fields = {**raised, "level": other.level, "place": other.place}
            found.append(self._raised(fields, other.process, number, other.body, texts.clock(line, self._year, stamp)))
        if may_join and not inside and other.body.lstrip().startswith(b"assert "):
            self._source[other.process] = other.body.strip().decode("utf-8", "replace")
        if not inside and other.found is not None:
            name, fields = other.found
            if name == "raised":
                source = self._source.pop(other.process, "")  # the exception has no traceback in the log
                fields = {**fields, "source": source} if fields["type"] == "AssertionError" else fields
            time = texts.clock(line, self._year, stamp)
            found.append(LogLine(name, fields, time, other.process, self._file, number, other.body[:LONGEST_BODY]))
        return found

    def _raised(self, fields: Fields, process: str, number: int, body: bytes, time: float | None) -> LogLine:
        return LogLine("raised", fields, time, process, self._file, number, body[: texts.LONGEST_BODY])

    def _stack(self, stack: Fields, number: int) -> LogLine:
        where = f"{stack['thread'] or 'a thread'} ({stack['state']}) in {stack['frames'][-1][2]}".encode()
        return LogLine("stack", stack, None, stack["process"], self._file, number, where[: texts.LONGEST_BODY])


def _are_few_others(lines: list[bytes]) -> bool:
    """Return True if at most _FEW lines are neither in a traceback nor messages of a known logging statement."""
    others, in_traceback = 0, False
    for line in lines:
        if _HEADING.match(line):
            return False
        part = Part(log_formats.without_prefix(line))
        in_traceback = part.sure or (in_traceback and part.indented)
        is_message = by_name(part.text, anywhere=False) or statements.whole_statement(part.text)
        others += bool(part.text and not in_traceback and not is_message)
        if others > _FEW:
            return False
    return True


#: The cache helps because an engine writes many lines within the same second.
@lru_cache(maxsize=1024)
def _before_frame(text: bytes) -> tuple[float | None, str, bool]:
    """Return (time, process, is_prefix). is_prefix: False if the text contains another message."""
    return *texts.second_and_process(text), len(text) <= _HEAD - 4 or _is_prefix(log_formats.shape(text))


@lru_cache(maxsize=1024)
def _is_prefix(shape: bytes) -> bool:
    """Return True if the text before LMCache's prefix is a container's prefix, and False if the text is a message."""
    if len(log_formats.without_prefix(shape)) > _HEAD - 4:
        return False
    other = Other(shape)
    return not (other.of_stack or other.part.sure or b"assert " in other.body or other.found is not None)


def _log_line(framed: LogLine, second: float | None, milli: bytes, process: str, file: str, number: int) -> LogLine:
    if framed.name == "closing":  # time and process of a message about a shutdown do not matter
        return LogLine(framed.name, framed.fields, None, "", file, number, framed.body)
    time = None if second is None else second + texts.MILLISECONDS.get(milli, 0.0)
    return LogLine(framed.name, framed.fields, time, process, file, number, framed.body)
