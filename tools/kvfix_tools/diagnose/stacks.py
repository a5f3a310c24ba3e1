"""Stacks of a running process, as `py-spy dump` prints them: one thread after the other, the innermost frame first."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvfix_tools.diagnose.tracebacks import Frame

_PROCESS = re.compile(rb"^\s*Process (?P<pid>\d+): ?(?P<name>[^\n]{0,200})")
_THREAD = re.compile(
    rb'^\s*Thread (?:0x)?[0-9A-Fa-f]+ \((?P<state>idle|active|active\+gil)\)(?:: "(?P<name>[^"\n]*)")?'
)
_FRAME = re.compile(rb"^\s+(?P<function>[^\s(]+) +\((?P<file>[^()\n]+?)(?::(?P<line>\d{1,9}))?\)\s*$")
#: Frames of a thread that are kept, the innermost ones.
_MOST = 64


class Stack(NamedTuple):
    """A thread. process: `VLLM::EngineCore pid=7`, or "". frames: the innermost one is the last, as in a traceback."""

    process: str
    thread: str
    state: str
    frames: list[Frame]


class Stacks:
    """One for each input."""

    def __init__(self) -> None:
        self._process = ""
        self._thread: tuple[str, str] | None = None
        self._frames: list[Frame] = []
        #: Whether the next lines may be frames.
        self.open = False

    def take(self, text: bytes) -> tuple[bool, Stack | None]:
        """(whether the line is part of a dump, the thread that ends with it)."""
        thread = _THREAD.match(text)
        if thread is not None:
            ended = self.end()
            self._thread = (_decoded(thread["name"] or b""), _decoded(thread["state"]))
            self.open = True
            return True, ended
        process = _PROCESS.match(text)
        if process is not None:
            ended = self.end()
            self._process = f"{_decoded(process['name']).split(' ')[0] or 'process'} pid={_decoded(process['pid'])}"
            return True, ended
        if self._thread is None:
            return False, None
        frame = _FRAME.match(text)
        if frame is None:
            return False, self.end()
        if len(self._frames) < _MOST:
            self._frames.append((_decoded(frame["file"]), int(frame["line"] or 0), _decoded(frame["function"])))
        return True, None

    def end(self) -> Stack | None:
        """The thread whose frames have been read."""
        if self._thread is None:
            return None
        (name, state), frames = self._thread, self._frames[::-1]
        self._thread, self._frames, self.open = None, [], False
        return Stack(self._process, name, state, frames) if frames else None


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace").strip()
