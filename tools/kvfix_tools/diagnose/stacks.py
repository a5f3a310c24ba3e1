"""Stacks of a process in the format of `py-spy dump` or gdb, which print the innermost frame first."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvfix_tools.diagnose.tracebacks import Frame

_PROCESS = re.compile(rb"^\s*Process (?P<pid>\d+): ?(?P<name>[^\n]{0,200})")
_THREAD = re.compile(
    rb'^\s*Thread (?:0x)?[0-9A-Fa-f]+ \((?P<state>idle|active|active\+gil)\)(?:: "(?P<name>[^"\n]*)")?'
)
_FRAME = re.compile(rb"^\s+(?P<function>[^\s(]+) +\((?P<file>[^()\n]+?)(?::(?P<line>\d{1,9}))?\)\s*$")
#: gdb prints `Thread 12 (Thread 0x7f.. (LWP 77) "name"):`, `#1  0x00.. in name (x=7) from lib.so`, or `at file.c:7`.
_GDB_THREAD = re.compile(
    rb'^Thread \d+ \((?:Thread 0x[0-9a-f]+ \()?LWP (?P<lwp>\d+)\)?(?: "(?P<name>[^"\n]{0,80})")?\)?'
)
_GDB_FRAME = re.compile(
    rb"^\s*#\d+ +(?:0x[0-9a-f]+ in )?(?P<function>[^\s(]+)[^\n]*?(?: at (?P<file>[^\s:]+):(?P<line>\d{1,9})"
    rb"| from (?P<library>\S+))?\s*$"
)
#: State of a thread with native frames of gdb.
NATIVE = "native"
#: Maximum number of frames to keep of a thread, the innermost ones.
_MOST = 64


class Stack(NamedTuple):
    """A thread. process: `VLLM::EngineCore pid=7`, or "". frames: the innermost is last, as in a traceback."""

    process: str
    thread: str
    state: str
    frames: list[Frame]


class Stacks:
    """The parser of stacks in one input."""

    def __init__(self) -> None:
        self._process = ""
        self._thread: tuple[str, str] | None = None
        self._frames: list[Frame] = []
        #: True if the next lines may be frames.
        self.open = False

    def take(self, text: bytes) -> tuple[bool, Stack | None]:
        """Take a line. Return (True if it is part of a dump, the thread that ends before it or None)."""
        head = _THREAD.match(text) or _GDB_THREAD.match(text)
        is_first = text.startswith(b"#0 ") and not self._is_native_at_start and _GDB_FRAME.match(text) is not None
        process = _PROCESS.match(text)
        if head is None and process is None and not is_first:
            if self._thread is None:
                return False, None
            return (True, None) if self._frame(text) else (False, self.end())
        ended = self.end()
        if process is not None:
            self._process = f"{_decoded(process['name']).split(' ')[0] or 'process'} pid={_decoded(process['pid'])}"
            return True, ended
        known = head.groupdict() if head is not None else {}
        self._thread = _decoded(known.get("name") or b""), _decoded(known.get("state") or NATIVE.encode())
        self.open = True
        if is_first:
            self._frame(text)
        return True, ended

    @property
    def _is_native_at_start(self) -> bool:
        return self._thread is not None and self._thread[1] == NATIVE and not self._frames

    def _frame(self, text: bytes) -> bool:
        """Return True if the line is a frame, and keep it unless there are too many."""
        native = self._thread is not None and self._thread[1] == NATIVE
        frame = _GDB_FRAME.match(text) if native else _FRAME.match(text)
        if frame is None:
            return False
        if len(self._frames) < _MOST:
            file = frame["file"] or (frame.groupdict().get("library") or b"")
            self._frames.append((_decoded(file), int(frame["line"] or 0), _decoded(frame["function"])))
        return True

    def end(self) -> Stack | None:
        """Return the thread whose frames were read, and reset."""
        if self._thread is None:
            return None
        (name, state), frames = self._thread, self._frames[::-1]
        self._thread, self._frames, self.open = None, [], False
        return Stack(self._process, name, state, frames) if frames else None


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace").strip()
