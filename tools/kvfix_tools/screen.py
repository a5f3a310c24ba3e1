"""Where text goes that people read: the terminal, or a file or pipe that has no edge."""

from __future__ import annotations

import sys

from rich.console import Console

#: Columns of what is no terminal: rich would take 80, and cut tables there.
_NO_EDGE = 10_000


def console() -> Console:
    """Of stdout: as wide as the terminal, and without an edge or colour where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=_NO_EDGE)
