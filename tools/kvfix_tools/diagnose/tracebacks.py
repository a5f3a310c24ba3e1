"""Frames and exceptions, which stand on lines of their own, put together again: one traceback per process at a time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvfix_tools.diagnose import line_scanner

if TYPE_CHECKING:
    from kvfix_tools.diagnose.log_line import Fields, LogLine

#: Kinds of lines that make a traceback; the last one ends it.
LINES = ("frame", "assertion", "exception")
#: Processes whose tracebacks are open; where there are more, something else is wrong.
_OPEN = 256


class _Traceback:
    def __init__(self) -> None:
        self.frames: deque[tuple[str, int, str]] = deque(maxlen=48)
        self.source = ""


class Tracebacks:
    def __init__(self) -> None:
        self._open: dict[str, _Traceback] = {}

    def take(self, line: LogLine) -> LogLine | None:
        """The exception with its frames, as a line of the kind `raised`; None: it has not ended."""
        if len(self._open) > _OPEN:
            self._open.clear()
        trace = self._open.setdefault(line.process, _Traceback())
        if line.name == "frame":
            trace.frames.append((line.fields["file"], line.fields["line"], line.fields["function"]))
            trace.source = ""
            return None
        if line.name == "assertion":
            trace.source = line.fields["source"]
            return None
        del self._open[line.process]
        kind, text = line.fields["type"].rpartition(".")[2], line.fields.get("text", "")
        return line._replace(name="raised", fields=raised(kind, text, list(trace.frames), trace.source))


def raised(kind: str, text: str, frames: list[tuple[str, int, str]], source: str = "") -> Fields:
    """Fields of a line of the kind `raised`. source: what was asserted; meaning: what the grammar reads in the text."""
    name, fields = line_scanner.raised(text) or ("", {})
    return {**fields, "type": kind, "text": text, "meaning": name, "source": source, "frames": frames}
