"""Where text for people goes: a terminal, or a file or pipe, which has no width."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches

from rich.console import Console

#: Columns where there is no terminal: rich would take 80, and cut tables there.
_COLUMNS = 10_000


def console() -> Console:
    """Of stdout: as wide as the terminal; without a terminal it cuts nothing and has no colour."""
    return Console() if sys.stdout.isatty() else Console(width=_COLUMNS)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the known name that is like this one, for the end of a message; "" if none is."""
    return "".join(f" Did you mean {each}?" for each in get_close_matches(name.lower(), list(known), n=1))
