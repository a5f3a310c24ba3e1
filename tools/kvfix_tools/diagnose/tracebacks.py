"""Frames and exceptions, which stand on lines of their own, put together again: one traceback per process at a time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from kvfix_tools.diagnose import scan

if TYPE_CHECKING:
    from kvfix_tools.diagnose.seen import Seen

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

    def take(self, seen: Seen) -> Seen | None:
        """The exception with its frames, as a line of the kind `raised`; None: it has not ended."""
        if len(self._open) > _OPEN:
            self._open.clear()
        trace = self._open.setdefault(seen.process, _Traceback())
        if seen.name == "frame":
            trace.frames.append((seen.fields["file"], seen.fields["line"], seen.fields["function"]))
            trace.source = ""
            return None
        if seen.name == "assertion":
            trace.source = seen.fields["source"]
            return None
        del self._open[seen.process]
        kind, text = seen.fields["type"].rpartition(".")[2], seen.fields.get("text", "")
        return seen._replace(name="raised", fields=raised(kind, text, list(trace.frames), trace.source))


def raised(kind: str, text: str, frames: list[tuple[str, int, str]], source: str = "") -> dict[str, Any]:
    """Fields of a line of the kind `raised`. source: what was asserted; meaning: what the grammar reads in the text."""
    name, fields = scan.raised(text) or ("", {})
    return {**fields, "type": kind, "text": text, "meaning": name, "source": source, "frames": frames}
