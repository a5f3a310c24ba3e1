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
#: {what a box begins with: a line inside}
_INSIDE = {sign: re.compile(rf"\s*[{side}] ?(?P<inner>.*?)(?:[{side}]\s*)?$") for sign, side in ("\u256d\u2502", "+|")}
#: Lines of others in which a box has to go on.
_GOES_ON = 40
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
        #: Lines in which the box may go on; 0: no box is open.
        self._inside = 0
        self._pattern = _INSIDE["+"]
        #: Of the last box; 0: what follows has nothing to do with it.
        self._width = 0
        #: Length of the last line of its exception; 0: that has not begun.
        self._last = 0
        #: A frame as far as it is read; the place of its line.
        self._frame, self._at = "", -1
        #: What a container or a launcher put in front of the box.
        self._before = ""

    def take(self, line: str, number: int) -> None:
        top = _TOP.search(line)
        if top is not None:
            self._inside, self._width, self._last, self._frame = _GOES_ON, len(top[0]), 0, ""
            self._before, self._pattern = line[: top.start()], _INSIDE[top[0][0]]
            self._add(f"{self._before}{_TITLE}:", number)
        elif self._inside and _BOTTOM.match(line[len(self._before) :]):
            self._inside = 0
        elif self._inside and (inside := self._pattern.match(line[len(self._before) :])) is not None:
            self._inside = _GOES_ON
            self._within(inside["inner"].rstrip(), number)
        elif self._inside:
            self._inside -= 1
            self._add(line, number)
        else:
            self._below(line, number)

    def _within(self, inner: str, number: int) -> None:
        source = _SOURCE.match(inner)
        if source is not None:
            self._frame = ""
            if source["failed"]:
                self._add(f"{self._before}    {_LOCALS.split(source['code'])[0].rstrip()}", number)
        elif not inner or inner[0] in "\u256d\u2570\u2502|+":  # the locals
            self._frame = ""
        else:
            self._at = self._at if self._frame else len(self.lines)
            self._frame += inner
            found = _FRAME.match(self._frame) or _WITHOUT_FILE.match(self._frame)
            if found is not None:
                del self.lines[self._at :], self.numbers[self._at :]  # its function was folded
                file = found.groupdict().get("file") or "<stdin>"
                self._add(f'{self._before}  File "{file}", line {found["line"]}, in {found["function"]}', number)
                self._frame = self._frame if found.re is _FRAME else ""

    def _below(self, line: str, number: int) -> None:
        """The exception, and where it goes on: the next word had no room in the line before."""
        text = line[len(self._before) :].rstrip()
        if self._last and text and self._last + 1 + len(text.split(" ")[0]) > self._width:
            self.lines[-1] = f"{self.lines[-1].rstrip()} {text}"
        else:
            self._add(line, number)
            if self._last or (self._width and text and not _EXCEPTION.match(text)):
                self._width, self._before = 0, ""
        self._last = len(text) if self._width else 0

    def _add(self, line: str, number: int) -> None:
        self.lines.append(line)
        self.numbers.append(number)
