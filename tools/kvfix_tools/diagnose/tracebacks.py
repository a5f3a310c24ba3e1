"""Tracebacks, put together from the lines of one process: frames, what was asserted, and each exception of a chain.

Also the stacks that faulthandler prints when a process dies of a signal.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvfix_tools.diagnose.log_line import Fields

Frame = tuple[str, int, str]

_FRAME = re.compile(rb'File "(?P<file>[^"\n]{1,400})", line (?P<line>\d{1,9}),? in (?P<function>[^\s(]+)')
#: An exception that ends a traceback, of any class: `zmq.error.Again: ...`, `StopIteration`.
_EXCEPTION = re.compile(rb"(?P<type>[A-Za-z_][\w.]*[A-Za-z_0-9])(?:: ?(?P<text>.*))?$")
_NAMED = re.compile(rb"\s+(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception))(?:: (?P<text>.*))?$")
#: The same without a traceback before it: only names that say that they are an exception.
_BY_NAME = re.compile(
    rb"(?:^|\] |\) |\s\s|: )(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*"
    rb"(?:Error|Exception|Interrupt|Exit|Timeout|Empty|Full|StopIteration))(?:: (?P<text>.*))?\s*$"
)
#: What a check of pydantic's says, in the line below `ValidationError: 1 validation error for VllmConfig`.
_CHECKED = re.compile(rb"^\s*Value error, (?P<text>.*?)(?: \[type=.*)?$")
_HEADER = re.compile(rb"Traceback \(most recent call last\):?")
_GROUP = re.compile(rb"^\s*(?:\| |\+-\+?|\+ )(?:-+ [\d.]+ -+)? ?")
_LINKS = (b"The above exception was the direct cause", b"During handling of the above exception")
_FAULT = re.compile(rb"Fatal Python error: (?P<text>[^\n]*)|!!! (?P<native>Segfault encountered)")
_NATIVE_STACK = b"most recent call first"
_CARETS = frozenset(b" ~^")
#: Lines of its process in which a traceback has to go on; processes whose tracebacks are open.
_GOES_ON, _OPEN = 40, 256
#: Frames kept: the last ones, of a fault the first ones, which are the innermost. Characters kept of their source.
_FRAMES, _SOURCE = 48, 400


class Raised(NamedTuple):
    """An exception with its frames, the outermost first. kind: its class as logged. source: of the last frame.

    follows: it stands in a chain behind another one. fault: the process died of a signal, and faulthandler says so.
    """

    kind: str
    text: str
    frames: list[Frame]
    source: str
    follows: bool
    fault: bool = False

    @property
    def fields(self) -> Fields:
        return {
            "type": self.kind.rpartition(".")[2], "class": self.kind, "text": self.text, "source": self.source,
            "frames": self.frames, "follows": self.follows, "fault": self.fault,
        }  # fmt: skip


class _Traceback:
    def __init__(self) -> None:
        self.frames: deque[Frame] = deque(maxlen=_FRAMES)
        self.source = ""
        self.missed = 0
        self.follows = False
        #: Text of a fatal error of Python's, whose stack follows.
        self.fault: str | None = None


class Tracebacks:
    """One for each input. Feed it the bodies of lines, without the prefix of their logger."""

    def __init__(self) -> None:
        self._open: dict[str, _Traceback] = {}
        self._linked: set[str] = set()

    @property
    def open(self) -> bool:
        """Whether the next lines may belong to a traceback."""
        return bool(self._open)

    def take(self, process: str, body: bytes) -> tuple[bool, Raised | None]:
        """(whether the line is part of a traceback, the exception that it ends with)."""
        text = body.rstrip()
        known = self._open.get(process)
        if known is not None and text.lstrip()[:1] in b"|+":
            text = _GROUP.sub(b"", text)
        frame = _FRAME.search(text) if b'", line ' in text else None
        if frame is not None:
            trace = known or self._begin(process)
            trace.frames.append((_decoded(frame["file"]), int(frame["line"]), _decoded(frame["function"])))
            trace.source, trace.missed = "", 0
            return True, None
        if b"Traceback (" in text and _HEADER.search(text):
            self._begin(process)
            return True, None
        fault = _FAULT.search(text) if b"Fatal Python error" in text or b"!!! Segfault" in text else None
        if fault is not None:
            self._begin(process).fault = _decoded(fault["text"] or fault["native"])
            return True, None
        frame = _FRAME.search(text) if b'", line ' in text else None
        if frame is not None:
            trace = self._open.get(process) or self._begin(process)
            if trace.fault is None or len(trace.frames) < _FRAMES:
                trace.frames.append((_decoded(frame["file"]), int(frame["line"]), _decoded(frame["function"])))
            trace.source, trace.missed = "", 0
            return True, None
        if any(link in text for link in _LINKS):
            self._linked.add(process)
            return True, None
        return (False, None) if known is None else self._go_on(process, known, text)

    def by_name(self, process: str, body: bytes, anywhere: bool) -> Raised | None:
        """An exception whose traceback is not in the log. anywhere: also behind a prefix that is not known."""
        checked = _CHECKED.match(body) if b"Value error, " in body else None
        if checked is not None:
            return Raised("ValueError", _decoded(checked["text"]), [], "", False)
        found = _BY_NAME.search(body)
        if found is None or not (anywhere or found.start("type") == 0):
            return None
        linked = process in self._linked
        self._linked.discard(process)
        return Raised(_decoded(found["type"]), _decoded(found["text"] or b""), [], "", linked)

    def cut(self) -> list[tuple[str, Raised]]:
        """At the end of the input: (process, what its traceback shows without its end)."""
        left = [(process, trace) for process, trace in self._open.items() if trace.frames or trace.fault is not None]
        self._open.clear()
        return [(process, _raised(trace, "", "")) for process, trace in left]

    def _begin(self, process: str) -> _Traceback:
        if len(self._open) >= _OPEN:
            self._open.clear()
        trace = self._open[process] = _Traceback()
        trace.follows = process in self._linked
        self._linked.discard(process)
        return trace

    def _go_on(self, process: str, trace: _Traceback, text: bytes) -> tuple[bool, Raised | None]:
        indented = text[:1].isspace()
        if trace.fault is not None:
            if _NATIVE_STACK in text or not text or (indented and not trace.frames):
                return True, None
            del self._open[process]
            return False, _raised(trace, "", "")
        # A whole traceback is indented where it is pasted into a list.
        named = _NAMED.match(text) if indented and trace.frames else None
        if named is not None:
            del self._open[process]
            return True, _raised(trace, _decoded(named["type"]), _decoded(named["text"] or b""))
        if indented or not text:
            if trace.frames and not set(text) <= _CARETS:  # Python 3.13 prints every line of a statement
                trace.source = f"{trace.source} {_decoded(text.strip())}".strip()[:_SOURCE]
            return True, None
        found = _EXCEPTION.match(text) if trace.frames else None
        if found is not None and not text.startswith((b"INFO", b"WARNING", b"ERROR", b"DEBUG")):
            del self._open[process]
            return True, _raised(trace, _decoded(found["type"]), _decoded(found["text"] or b""))
        trace.missed += 1
        if trace.missed > _GOES_ON:
            del self._open[process]
        return False, None


def _raised(trace: _Traceback, kind: str, text: str) -> Raised:
    frames = list(trace.frames)
    if trace.fault is not None:  # faulthandler names the innermost frame first
        return Raised("", trace.fault, frames[::-1], "", False, fault=True)
    return Raised(kind, text, frames, trace.source, trace.follows)


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace").strip()
