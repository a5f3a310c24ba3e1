"""Parse the text of one line. The result does not depend on other lines, so kvfix can cache the result."""

import calendar
import enum
import re
from functools import cached_property, lru_cache

from kvfix_tools.diagnose import grammar, log_formats, statements
from kvfix_tools.diagnose.grammar import FRAME
from kvfix_tools.diagnose.log_line import ANSI, Fields, LogLine, without_colours
from kvfix_tools.diagnose.tracebacks import Part, by_name

#: Every line that kvfix's own recorder writes contains this text.
RECORDED = b'{"kind":"'
#: Value of the field `logger` for warnings and errors of glog, UCX, argparse, Docker or Helm.
NATIVE = "native"
#: `LogLine.name` of a line that only names a connector.
WHO = "who"
#: Maximum number of bytes of a message that kvfix keeps as evidence.
LONGEST_BODY = 1 << 14
LEVEL = re.compile(rb"\] LMCache ([A-Z]{4,8}):(?:" + ANSI + rb")? ?")
#: A cut line keeps one of these parts of LMCache's log format: the level without the time, or the file and line.
_CUT = re.compile(rb"(?m)^LMCache [A-Z]{4,8}: |\(\w+\.py:\d+:lmcache\.")
#: _NO_TIME replaces the time in vLLM's prefix, so that equal messages give equal lines.
_NO_TIME, _DIGITS = b"00-00 00:00:00", b"0123456789"
_SECOND, STAMP = len(b"2026-11-21 01:41:27"), len(b"2026-11-21 01:41:27,007")
#: vLLM's prefix is `ERROR 12-03 01:24:36 [core.py:844] `. Some dates have a year. A process may precede the prefix:
#: `(EngineCore_DP0 pid=7703) `, `(VllmWorker rank=0 pid=31) `, or Ray's `(RayWorkerWrapper pid=7, ip=10.0.0.5) `. torch
#: and torchrun add `[rank0]: `.
_VLLM = re.compile(
    rb"(DEBUG|INFO|WARNING|ERROR|CRITICAL) +(?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? "
    rb"\[([^\[\]\s]*:\d+)\] ?"
)
_CLOCK = re.compile(rb"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) +(?:(\d{4})-)?(\d\d-\d\d \d\d:\d\d:\d\d)")
_PROCESS = re.compile(rb"\((\w+)(?: rank=(\d+))?[^()\n]{0,40}? ?pid=(\d+)(?:, ip=[\w.:]{1,40})?\)")
_RANK = re.compile(rb"\[((?:rank|default)\d{1,5})\]: ?")
#: Find levels of Python's default format, uvicorn, glog (Mooncake, NIXL), UCX, and errors of argparse, Docker, Helm.
_OTHER = re.compile(
    rb"(?:^|[\s\]\[|])(?:(?P<level>WARNING|WARN|ERROR|CRITICAL|FATAL)\b[\s:\]-]"
    rb"|(?P<glog>[WEF])(?:\d{4}){1,2} \d\d:\d\d:\d\d(?!\S* +\d+ \S+\.go:)"
    rb"|[\w.]+\.c:\d+ +(?:UCX +DIAG +)?(?P<ucx>Fatal: |Transport retry count exceeded)"
    rb"|(?P<usage>error): (?:argument|unrecognized|the following) "
    rb"|(?P<container>docker|Error response from daemon|nvidia-container-cli|Error: INSTALLATION FAILED): ."
    rb"|exec format (?P<format>error))"
)
#: Other prefixes may precede a rank or a level, so kvfix searches the first 128 bytes for a rank and the first 320 for
#: a level. After these bytes, a word such as ERROR may be part of a sentence.
_RANKED, _LEVELLED = 128, 320
_LEVELS = {b"W": "warning", b"E": "error", b"F": "critical", b"WARN": "warning", b"FATAL": "critical"}
MILLISECONDS = {b"%03d" % number: number / 1000 for number in range(1000)}
#: Messages about a process that died without an exception.
_DIED = re.compile(f"(?P<what>{'|'.join(grammar.TABLES.died)})".encode())
_DEATHS = tuple(word.encode() for word in grammar.TABLES.deaths)
#: With these messages, KVBM and the master process of Mooncake log failures at level INFO.
_BAD_AT_INFO = (b"Ping timed out", b"action=client_expired", b"action=unmount_expired_segment")
#: An engine or a server logs these messages while it shuts down. Later errors are consequences of the shutdown.
_CLOSING = (b"Unregistered ", b"Shutting down LMCache", b"Gracefully shutting down")
#: Kinds of lines that come from uvicorn, from lists of packages or from kvfix, not from vLLM's or LMCache's logger.
_NO_STATEMENTS = ("up", "answered_500", "recorded", *grammar.RELEASE_IN)


class Headless(enum.IntEnum):
    """Selects the lines that kvfix parses although these lines lack a logger's prefix.

    ALL: all lines, for an engine's log. WHOLE: lines that are whole messages, for a paste that is mostly messages.
    NONE: only recorder lines and NATIVE errors, for documentation or another program's log.
    """

    NONE = 1
    WHOLE = 2
    ALL = 3


def is_own(text: bytes) -> bool:
    """Return True if the text has the prefix of vLLM's or LMCache's logger, or a process such as `(Worker pid=7)`."""
    return any(pattern.search(text) is not None for pattern in (LEVEL, _VLLM, _PROCESS, _CUT))


#: The cache helps, because a waiting request causes an equal log line in every engine step.
@lru_cache(maxsize=2048)
def behind_frame(tail: bytes) -> LogLine | None:
    """Parse the end of a line, from `] LMCache LEVEL:` on. Return None if kvfix must parse the whole line."""
    level = LEVEL.match(tail)
    if level is None or len(tail) == LONGEST_BODY or tail.find(FRAME, level.end()) >= 0:
        return None
    body = tail[level.end() :]
    found = framed(level[1], body)
    return None if found.name == "logged" and Part(body).sure else found


def framed(level: bytes, body: bytes) -> LogLine:
    """Parse the message after LMCache's prefix. The LogLine has no time, and its name is "" if kvfix skips the line."""
    name, fields = "logged", {"level": level.decode().lower(), "logger": "lmcache", "place": ""}
    if level in (b"INFO", b"DEBUG"):
        name, fields = "closing" if body.startswith(_CLOSING) else "", {}
    for message in grammar.containing(body):
        match = message.pattern.match(body) if message.source == "lmcache" else None
        if match is not None:
            name, fields = message.name, message.values(match)
            break
    return LogLine(name, fields, None, "", "", 0, body[:LONGEST_BODY])


class Other:
    """A line without LMCache's prefix. The line is from vLLM, another logger or a traceback, or lacks its beginning."""

    def __init__(self, line: bytes, headless: Headless = Headless.ALL) -> None:
        self._headless = headless
        text = self._text = without_colours(line) if b"\x1b" in line or b"[0" in line else line
        self.process = process(text)
        self._head = _VLLM.search(text)
        if self._head is not None:
            self.body = text[self._head.end() :]
        elif self.process:
            self.body = text[text.find(b"pid=") :].partition(b") ")[2] or text
        elif (rank := _RANK.search(text[:_RANKED]) if b"]:" in text[:_RANKED] else None) is not None:
            self.process, self.body = rank[1].decode(), text[rank.end() :]
        else:
            self.body = log_formats.without_prefix(text)
        #: True if the line has vLLM's prefix, or names the process that wrote the line.
        self.has_head = self._head is not None or bool(self.process)
        #: True if the line may belong to the output of `py-spy dump`.
        self.of_stack = b"Thread " in self.body or b"Process " in self.body

    @cached_property
    def part(self) -> Part:
        """The line as a part of a traceback."""
        return Part(self.body)

    @cached_property
    def may_join(self) -> bool:
        """True if the line may begin a stack or a traceback, or is the source line of an assertion."""
        return self.of_stack or self.part.sure or self.body.lstrip().startswith(b"assert ")

    @cached_property
    def is_alone(self) -> bool:
        """True if kvfix can parse this line without earlier lines, as long as no stack and no traceback is open."""
        return not self.may_join and (self.found is None or self.found[0] != "raised")

    @cached_property
    def level(self) -> str:
        """The level in vLLM's or another logger's prefix, or "" if the line has no level."""
        if self._head is not None:
            return self._head[1].decode().lower()
        other = _OTHER.search(self._text[:_LEVELLED])
        if other is None or (other["level"] and self._headless is Headless.NONE and not self.has_head):
            return ""
        name = other["level"] or other["glog"] or other["usage"] or b"error"
        return _LEVELS.get(name, name.decode().lower())

    @cached_property
    def place(self) -> str:
        """File and line of the vLLM statement that the prefix names, or "" for other loggers."""
        return self._head[2].decode("utf-8", "replace") if self._head is not None else ""

    @cached_property
    def found(self) -> tuple[str, Fields] | None:
        """(name, fields) of the LogLine if the line is outside a traceback, or None if kvfix skips the line."""
        text, body, head = self._text, self.body, self._head
        whole = not self.has_head and self._headless is Headless.WHOLE
        if not self.has_head and self._headless is Headless.NONE and RECORDED not in text:
            level = self.level
            return ("logged", {"level": level, "logger": NATIVE, "place": ""}) if level else None
        # The line may lack its beginning, or a launcher may have added a prefix.
        cut = head is None and (b"lmcache" in text or b"LMCache" in text)
        skipped = ("raised",) if cut or whole else ("raised", "lmcache")
        for message in grammar.containing(text):
            if message.source not in skipped and (not whole or self._is_whole(message)):
                match = message.pattern.search(body) or message.pattern.search(text)
                if match is not None:
                    fields = message.values(match)
                    return message.name, {**fields, "place": self.place} if message.name == "fatal" else fields
        if b"non-default args" in text:
            return "settings", {}
        if b"[shutdown]" in text and b"exited unexpectedly" not in text:
            return "closing", {}
        died = _DIED.search(body) if any(word in body for word in _DEATHS) else None
        if died is not None:
            return "died", {"text": died["what"].strip().decode("utf-8", "replace")}
        raised = by_name(body, anywhere=head is None)
        if raised is not None:
            return "raised", {**raised, "level": self.level, "place": self.place}
        if self.level in ("", "info") and (b"kv_connector" in body or b"connector with name" in body):
            return WHO, {}
        if any(words in text for words in _BAD_AT_INFO):
            return "logged", {"level": "warning", "logger": "", "place": ""}
        if self.level in ("warning", "error", "critical"):
            native = _OTHER.search(self._text[:_LEVELLED])
            logger = "vllm" if head else "" if native is None or native["level"] else NATIVE
            return "logged", {"level": self.level, "logger": logger, "place": self.place}
        if whole and statements.whole_statement(body) == "logged":
            return "logged", {"level": "error", "logger": "bare", "place": ""}
        return None

    def _is_whole(self, message: grammar.Message) -> bool:
        """Return True if the line is exactly this message, or if the message is not from vLLM's or LMCache's logger."""
        return message.name in _NO_STATEMENTS or statements.whole_statement(self.body) == message.name


def parsed(line: bytes, headless: Headless) -> tuple[Other, bytes]:
    """Return (parsed line, time in vLLM's prefix or b""). Lines that differ only in time share a cache entry."""
    if len(line) > LONGEST_BODY:
        return Other(line, headless), b""
    at = line.find(b" [")
    if at > 14 and line[at - 15 : at].translate(None, _DIGITS) == b" - ::":
        other = _parsed(line[: at - 14], line[at:], headless)
        if other.place:
            return other, line[at - 14 : at]
    return _parsed(line, b"", headless), b""


@lru_cache(maxsize=2048)
def _parsed(head: bytes, tail: bytes, headless: Headless) -> Other:
    """Parse a line. head, tail: the text before and after the time. If `tail` is empty, `head` is the whole line."""
    return Other(head + _NO_TIME + tail if tail else head, headless)


@lru_cache(maxsize=256)
def process(prefix: bytes) -> str:
    """Return the process that wrote the line, that is, the last process that the prefix names."""
    if prefix.find(b"pid=") < 0:  # `in` takes three times as long: Python first tries to read b"pid=" as a number
        return ""
    named = _PROCESS.findall(prefix)
    if not named:
        return ""
    name, rank, pid = (part.decode("ascii", "replace") for part in named[-1])
    return f"{name}{'_' if rank else ''}{rank} pid={pid}"


def second_and_process(prefix: bytes) -> tuple[float | None, str]:
    """Return the time and the last process. prefix: the text before the milliseconds of LMCache's time stamp."""
    if len(prefix) < _SECOND:
        return None, process(prefix)
    return _second(prefix[-_SECOND:][:4], prefix[5 - _SECOND :]), process(prefix[:-_SECOND])


def clock(line: bytes, year: bytes, stamp: bytes = b"") -> float | None:
    """Return the time of vLLM's line in seconds since 1970, or None without a time or a year. stamp: see `parsed`."""
    if stamp:
        return _second(year, stamp)
    found = _CLOCK.search(line[:_LEVELLED])
    return _second(found[1] or year, found[2]) if found is not None else None


@lru_cache(maxsize=256)
def _second(year: bytes, stamp: bytes) -> float | None:
    """Convert a year and a text like `11-21 01:41:27`, read as UTC, to seconds since 1970. Return None if invalid."""
    try:
        month, day, hour, minute, second = map(int, re.split(rb"[- :]", stamp))
        return float(calendar.timegm((int(year), month, day, hour, minute, second, 0, 0, 0)))
    except (ValueError, OverflowError):
        return None
