"""Where text for people goes: a terminal, or a file or pipe, which has no width."""

from __future__ import annotations

import sys

from rich.console import Console

#: Columns where there is no terminal: rich would take 80, and cut tables there.
_COLUMNS = 10_000


def console() -> Console:
    """Of stdout: as wide as the terminal; without a terminal it cuts nothing and has no colour."""
    return Console() if sys.stdout.isatty() else Console(width=_COLUMNS)
