"""Tracebacks in the boxes that rich prints, and Typer, as the tracebacks that Python prints.

A box has a frame as `/path/file.py:7 in function`, folded where it is wider than the box, some lines of the source with
an arrow before the one that failed, and maybe the locals in a box of their own. The exception stands below the box,
wrapped at its width (rich/traceback.py 14.1). A terminal without these signs has `+`, `-`, `|` and `>`.
"""

from __future__ import annotations

import re

from kvfix_tools.diagnose.wrapped import Plain

_TITLE = "Traceback (most recent call last)"
_LINE, _ARROW = "[\u2500-]", "[\u2771>]"
#: What every block with a box holds.
NEEDLES = (f"\u2500\u2500 {_TITLE}".encode(), f"---- {_TITLE}".encode())
_TOP = re.compile(f"[\u256d+]{_LINE}+ {re.escape(_TITLE)} {_LINE}*[\u256e+]?")
_BOTTOM = re.compile(f"^\\s*[\u2570+]{_LINE}+[\u256f+]?\\s*$")
_INSIDE = re.compile("[\u2502|] ?(?P<inner>.*?)(?:[\u2502|]\\s*)?$")
_FRAME = re.compile(r"(?P<file>\S.*?):(?P<line>\d+) ?in ?(?P<function><\w+>|\w+)$")
#: Of code whose file is not there.
_WITHOUT_FILE = re.compile(r"in (?P<function><?\w+>?):(?P<line>\d+)$")
_SOURCE = re.compile(f"\\s*(?P<failed>{_ARROW} )?\\s*\\d+ [\u2502|](?:\\s*[\u2502|])*\\s*(?P<code>.*)$")
#: What stands beside the source in a wide terminal.
_LOCALS = re.compile("[\u2502\u256d\u2570]")
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?::|\s*$)")


def opened(block: bytes) -> Plain:
    """The block, with each box as the lines of a traceback."""
    box = _Box()
    for number, line in enumerate(block.decode("utf-8", "surrogateescape").split("\n")):
        box.take(line, number)
    return Plain("\n".join(box.lines).encode("utf-8", "surrogateescape"), box.numbers)


class _Box:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.numbers: list[int] = []
        self._inside = False
        #: Of the last box; 0: what follows has nothing to do with it.
        self._width = 0
        #: Length of the last line of its exception; 0: that has not begun.
        self._last = 0
        #: A frame as far as it is read; the place of its line.
        self._frame, self._at = "", -1

    def take(self, line: str, number: int) -> None:
        top = _TOP.search(line)
        if top is not None:
            self._inside, self._width, self._last, self._frame = True, len(top[0]), 0, ""
            self._add(f"{line[: top.start()]}{_TITLE}:", number)
        elif self._inside and _BOTTOM.match(line):
            self._inside = False
        elif self._inside and (inside := _INSIDE.search(line)) is not None:
            self._within(inside["inner"].rstrip(), number)
        else:
            self._inside = False
            self._below(line, number)

    def _within(self, inner: str, number: int) -> None:
        source = _SOURCE.match(inner)
        if source is not None:
            self._frame = ""
            if source["failed"]:
                self._add(f"    {_LOCALS.split(source['code'])[0].rstrip()}", number)
        elif not inner or inner[0] in "\u256d\u2570\u2502|+":  # the locals
            self._frame = ""
        else:
            self._at = self._at if self._frame else len(self.lines)
            self._frame += inner
            found = _FRAME.match(self._frame) or _WITHOUT_FILE.match(self._frame)
            if found is not None:
                del self.lines[self._at :], self.numbers[self._at :]  # its function was folded
                file = found.groupdict().get("file") or "<stdin>"
                self._add(f'  File "{file}", line {found["line"]}, in {found["function"]}', number)
                self._frame = self._frame if found.re is _FRAME else ""

    def _below(self, line: str, number: int) -> None:
        """The exception, and where it goes on: the next word had no room in the line before."""
        if self._last and line.strip() and self._last + 1 + len(line.split(" ")[0]) > self._width:
            self.lines[-1] = f"{self.lines[-1].rstrip()} {line.rstrip()}"
        else:
            self._add(line, number)
            if self._last or (self._width and line.strip() and not _EXCEPTION.match(line)):
                self._width = 0
        self._last = len(line.rstrip()) if self._width else 0

    def _add(self, line: str, number: int) -> None:
        self.lines.append(line)
        self.numbers.append(number)
