"""Stacks of a process in the format of `py-spy dump` or gdb, which print the innermost frame first."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvfix_tools.diagnose.tracebacks import Frame

#: A report may have a name instead of a number, and a remark after a frame.
_PROCESS = re.compile(rb"^\s*Process (?P<pid>\d+|<\w+>): ?(?P<name>[^\n]{0,200})")
_THREAD = re.compile(
    rb'^\s*Thread (?:(?:0x)?[0-9A-Fa-f]+|<\w+>) \((?P<state>idle|active|active\+gil)\)(?:: "(?P<name>[^"\n]*)")?'
)
_FRAME = re.compile(
    rb"^\s+(?P<function>[^\s(]+) +\((?P<file>[^()\n]+?)(?::(?P<line>\d{1,9}))?\)\s*(?:(?:<-|#).{0,80})?$"
)
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
        thread = _THREAD.match(text)
        if thread is not None:
            ended = self.end()
            self._thread = (_decoded(thread["name"] or b""), _decoded(thread["state"]))
            self.open = True
            return True, ended
        native = _GDB_THREAD.match(text)
        if native is not None or (text.startswith(b"#0 ") and _GDB_FRAME.match(text) and not self._is_native_at_start):
            ended = self.end()
            name = _decoded(native["name"] or b"") if native is not None else ""
            self._thread, self.open = (name, NATIVE), True
            if native is None:
                self._frame(text)
            return True, ended
        process = _PROCESS.match(text)
        if process is not None:
            ended = self.end()
            self._process = f"{_decoded(process['name']).split(' ')[0] or 'process'} pid={_decoded(process['pid'])}"
            return True, ended
        if self._thread is None:
            return False, None
        if self._frame(text):
            return True, None
        return False, self.end()

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
