"""The README as a program: its sections, and the blocks of code in each."""

from __future__ import annotations

import re
import textwrap
from typing import NamedTuple


class Block(NamedTuple):
    """Code that the README shows. language: "" where it is indented: a shell's lines, or text of a log."""

    section: str
    language: str
    text: str


def blocks(text: str) -> list[Block]:
    found = []
    for part in re.split(r"(?m)^(?=#)", text):
        title, _, body = part.partition("\n")
        for code in re.finditer(r"(?ms)^```(\w+)\n(.*?)^```|(?:^    [^\n]*\n)+", body):
            block = code[2] if code[1] else textwrap.dedent(code[0])
            found.append(Block(title.lstrip("# "), code[1] or "", block.strip("\n")))
    return found
