"""Print tables, errors and the progress on a terminal, and suggest known names for mistyped names."""

import sys
from collections.abc import Iterable
from difflib import get_close_matches

from rich.console import Console

_COLUMNS = 10_000  # width without a terminal. rich would assume 80 columns and cut off tables


def console() -> Console:
    """Return a console for stdout. Without a terminal the console cuts nothing and prints no colour."""
    return Console() if sys.stdout.isatty() else Console(width=_COLUMNS)


def error(text: str, code: int = 2) -> int:
    """Print why a command ends, and return its exit code."""
    print(text, file=sys.stderr)
    return code


def progress(what: str) -> None:
    """Show the progress in one line of a terminal. An empty text removes this line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean NAME?" with the most similar known name. Ignore case. Return "" if no name is similar."""
    spelled = {each.lower(): each for each in known}
    return "".join(f" Did you mean {spelled[each]}?" for each in get_close_matches(name.lower(), spelled, n=1))
