"""Assemble tracebacks from the lines of one process. A chain of exceptions gives one result for each exception.

This module also reads the stacks that faulthandler prints when a signal kills a process, and the output of
`py-spy dump`. Both outputs begin with the innermost frame.
"""

import re
from collections import deque
from collections.abc import Sequence
from functools import cached_property

from kvfix_tools.diagnose import grammar
from kvfix_tools.diagnose.log_formats import shape
from kvfix_tools.diagnose.log_line import Fields

Frame = tuple[str, int, str]

_FRAME = re.compile(rb'File "(?P<file>[^"\n]{1,400})", (?:line )?(?P<line>\d{1,9}),? in (?P<function>[^\s(]+)')
#: The last line of a traceback names an exception of any class, such as `zmq.error.Again: ...` or `StopIteration`.
_EXCEPTION = re.compile(rb"(?P<type>[A-Za-z_][\w.]*[A-Za-z_0-9])(?:: ?(?P<text>.*))?$")
#: Finds an exception in a line outside a traceback, by a class name that is usual for exceptions.
_BY_NAME = re.compile(
    rb"(?:^|\] |\) |\s\s|: |with exception )(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*"
    rb"(?:Error|Exception|Interrupt|Exit|Timeout|Empty|Full|StopIteration))"
    rb"(?: ?: (?P<text>.*))?\s*$"
)
_BARE = tuple((kind, re.compile(pattern.encode())) for kind, pattern in grammar.TABLES.bare)
_HEADER = re.compile(rb"Traceback \(most recent call last\):?")
_GROUP = re.compile(rb"^\s*(?:\| |\+-\+?|\+ )(?:-+ [\d.]+ -+)? ?")
_LINKS = (b"The above exception was the direct cause", b"During handling of the above exception")
_FAULT = re.compile(rb"Fatal Python error: (?P<text>[^\n]*)|!!! (?P<native>Segfault encountered)")
_NATIVE_STACK = b"most recent call first"
_CARETS = frozenset(b" ~^")
#: Classes of exception groups. kvfix reports the exceptions inside a group, because these exceptions are the cause.
_GROUPS = ("ExceptionGroup", "BaseExceptionGroup")
#: A traceback ends after _GOES_ON unrelated lines of its process. At most _OPEN tracebacks can be open.
_GOES_ON, _OPEN = 40, 256
#: kvfix keeps the _FRAMES innermost frames of a traceback, and _SOURCE characters of the last frame's source line.
_FRAMES, _SOURCE = 48, 400


def raised(kind: str, text: str, frames: Sequence[Frame] = (), source: str = "", fault: bool = False) -> Fields:
    """Return the fields of a LogLine for an exception, including the values in its text.

    kind: the class, as logged. frames: outermost first. source: source line of the last frame. fault: True if a signal
    killed the process. The field `meaning` is the name of the message in `grammar` that matches the text, or "".
    """
    fields = {
        "type": kind.rpartition(".")[2], "class": kind, "text": text, "source": source, "frames": frames,
        "fault": fault, "meaning": "",
    }  # fmt: skip
    line = text.encode()
    for message in grammar.containing(line):
        match = message.pattern.search(line) if message.source == "raised" else None
        if match is not None:
            return {**message.values(match), **fields, "meaning": message.name}
    return fields


class Part:
    """A line, parsed as a part of a traceback. Only earlier lines show if this line really belongs to a traceback."""

    def __init__(self, body: bytes) -> None:
        text = self.text = body.rstrip()
        found = _FRAME.search(text) if b'File "' in text else None
        self.frame: Frame | None = None
        if found is not None:
            self.frame = (_decoded(found["file"]), int(found["line"]), _decoded(found["function"]))
        self.begins = b"Traceback (" in text and _HEADER.search(text) is not None
        fault = _FAULT.search(text) if b"Fatal Python error" in text or b"!!! Segfault" in text else None
        #: Text of Python's message about a fatal error, or None. The stack follows in later lines.
        self.fault = _decoded(fault["text"] or fault["native"]) if fault is not None else None
        links = any(link in text for link in _LINKS)
        #: True if the line is certainly part of a traceback.
        self.sure = self.frame is not None or self.begins or self.fault is not None or links
        self.in_group = text.lstrip()[:1] in b"|+"
        self.indented = text[:1].isspace()

    @cached_property
    def exception(self) -> tuple[str, str] | None:
        found = _EXCEPTION.match(self.text)
        if found is None or self.text.startswith((b"INFO", b"WARNING", b"ERROR", b"DEBUG")):
            return None
        plain = found["type"].islower() and b"." not in found["type"]
        if plain and (found["text"] is None or b"_" in found["type"]):
            return None  # a wrapped line or a setting, because class names have capital letters
        return _decoded(found["type"]), _decoded(found["text"] or b"")

    @cached_property
    def source(self) -> str:
        """The source line that this line shows, or "" if the line has only carets."""
        return "" if set(self.text) <= _CARETS else _decoded(self.text)


class _Traceback:
    def __init__(self) -> None:
        self.frames: deque[Frame] = deque(maxlen=_FRAMES)
        self.source = ""
        self.missed = 0
        self.fault: str | None = None
        #: A launcher's prefix of each line (`node01: `, `[2026-11-21 01:41:27] `), with every digit replaced by 0.
        self.prefix = b""


class Tracebacks:
    """The parser of tracebacks in one input. The caller removes the logger's prefix from each line."""

    def __init__(self) -> None:
        #: For each process, the open traceback that the process's next lines may continue.
        self.open: dict[str, _Traceback] = {}
        #: For each process, its open exception group, and True if kvfix has read an exception of the group.
        self._groups: dict[str, tuple[Fields, bool]] = {}

    def take(self, process: str, part: Part) -> tuple[bool, Fields | None]:
        """Return (True if the line is part of a traceback, the exception if its traceback has ended, else None)."""
        known = self.open.get(process)
        if known is None and not part.sure:
            return False, None
        if known is not None and known.prefix and shape(part.text[: len(known.prefix)]) == known.prefix:
            part = Part(part.text[len(known.prefix) :])
        in_group = part.in_group
        if known is not None and in_group:
            part = Part(_GROUP.sub(b"", part.text))
        if known is not None and not part.sure:
            return self._go_on(process, known, part)
        if part.frame is not None:
            trace = known or self._begin(process, in_group, part.text.partition(b'File "')[0].removesuffix(b"  "))
            if trace.fault is None or len(trace.frames) < _FRAMES:
                trace.frames.append(part.frame)
            trace.source, trace.missed = "", 0
        elif part.begins:
            self._begin(process, in_group, part.text.partition(b"Traceback (")[0])
        elif part.fault is not None:
            self._begin(process).fault = part.fault
        return True, None

    def cut(self) -> list[tuple[str, Fields]]:
        """Return (process, incomplete traceback) for each traceback that is open at the end of the input."""
        left = [(process, trace) for process, trace in self.open.items() if trace.frames or trace.fault is not None]
        self.open.clear()
        groups = [(process, group) for process, (group, has_member) in self._groups.items() if not has_member]
        return [*groups, *((process, _raised(trace)) for process, trace in left)]

    def _begin(self, process: str, in_group: bool = False, before: bytes = b"") -> _Traceback:
        if len(self.open) >= _OPEN:
            self.open.clear()
        trace = self.open[process] = _Traceback()
        trace.prefix = shape(before) if before.strip() and not in_group else b""
        if in_group and process in self._groups:
            group, _ = self._groups[process]
            trace.frames.extend(group["frames"])  # a frame of the group may be a connector hook
            self._groups[process] = group, True
        return trace

    def _ended(self, process: str, trace: _Traceback, kind: str, text: str) -> tuple[bool, Fields | None]:
        del self.open[process]
        exception = _raised(trace, kind, text)
        if kind.rpartition(".")[2] not in _GROUPS:
            return True, exception
        if len(self._groups) >= _OPEN:
            self._groups.clear()
        self._groups[process] = exception, False
        return True, None

    def _go_on(self, process: str, trace: _Traceback, part: Part) -> tuple[bool, Fields | None]:
        text, indented = part.text, part.indented
        if trace.fault is not None:
            if _NATIVE_STACK in text or not text or (indented and not trace.frames):
                return True, None
            del self.open[process]
            return False, _raised(trace)
        if indented or not text or (trace.frames and text.startswith(b"assert ")):  # a paste may lose the indentation
            if trace.frames and part.source:  # Python 3.13 prints all source lines of a statement
                trace.source = f"{trace.source} {part.source}".strip()[:_SOURCE]
            return True, None
        if trace.frames and part.exception is not None:
            return self._ended(process, trace, *part.exception)
        trace.missed += 1
        if trace.missed > _GOES_ON:
            del self.open[process]
        return False, None


def by_name(body: bytes, anywhere: bool) -> Fields | None:
    """Return the exception in a line outside a traceback. anywhere: also accept an unknown prefix before the class."""
    for kind, pattern in _BARE:
        bare = pattern.match(body)
        if bare is not None:
            return raised(kind, _decoded(bare[1]))
    found = _BY_NAME.search(body)
    if found is None or not (anywhere or found.start("type") == 0):
        return None
    return raised(_decoded(found["type"]), _decoded(found["text"] or b""))


def _raised(trace: _Traceback, kind: str = "", text: str = "") -> Fields:
    """Return the exception of a traceback. If the traceback is cut (kind ""), the source line may show the class."""
    frames = list(trace.frames)
    if trace.fault is not None:  # faulthandler names the innermost frame first
        return raised("", trace.fault, frames[::-1], fault=True)
    asserts = not kind and trace.source.startswith("assert ")
    return raised("AssertionError" if asserts else kind, text, frames, trace.source)


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace").strip()


_STACK_PROCESS = re.compile(rb"^\s*Process (?P<pid>\d+): ?(?P<name>[^\n]{0,200})")
_THREAD = re.compile(
    rb'^\s*Thread (?:0x)?[0-9A-Fa-f]+ \((?P<state>idle|active|active\+gil)\)(?:: "(?P<name>[^"\n]*)")?'
)
_STACK_FRAME = re.compile(rb"^\s+(?P<function>[^\s(]+) +\((?P<file>[^()\n]+?)(?::(?P<line>\d{1,9}))?\)\s*$")


class Stacks:
    """The parser of the output of `py-spy dump` in one input."""

    def __init__(self) -> None:
        self._process = ""
        #: Name and state of the thread whose frames are being read, or None.
        self.open: tuple[str, str] | None = None
        self._frames: list[Frame] = []

    def take(self, text: bytes) -> tuple[bool, Fields | None]:
        """Return (True if the line is part of a dump, the thread if its stack has ended, else None)."""
        thread, process = _THREAD.match(text), _STACK_PROCESS.match(text)
        if thread is None and process is None:
            frame = _STACK_FRAME.match(text) if self.open is not None else None
            if frame is None:
                return False, self.end()
            if len(self._frames) < 64:  # the innermost frames come first
                self._frames.append((_decoded(frame["file"]), int(frame["line"] or 0), _decoded(frame["function"])))
            return True, None
        ended = self.end()
        if process is not None:
            self._process = f"{_decoded(process['name']).split(' ')[0] or 'process'} pid={_decoded(process['pid'])}"
        elif thread is not None:
            self.open = _decoded(thread["name"] or b""), _decoded(thread["state"])
        return True, ended

    def end(self) -> Fields | None:
        """Close the open thread, and return the fields of a LogLine. Return None if the thread has no frame.

        The field `process` is like `VLLM::EngineCore pid=7`, or "". In `frames`, the innermost frame is last.
        """
        thread, frames = self.open, self._frames[::-1]
        self.open, self._frames = None, []
        if thread is None or not frames:
            return None
        return {"process": self._process, "thread": thread[0], "state": thread[1], "frames": frames}
