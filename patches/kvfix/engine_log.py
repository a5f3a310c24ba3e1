"""Writes kvfix's lines to the engine's log: few lines, each once in a process, and never an exception.

The lines go to the logger `kvfix`, or to stderr if logging is not configured. The first line imports `logging`:
`kvfix.apply()` is on the start-up path of every process.
"""

from __future__ import annotations

from kvfix.session import session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def info(text: str) -> None:
    """Log an action of kvfix."""
    _report("info", text)


def warning(text: str) -> None:
    """Log what is wrong, where, and what to do."""
    _report("warning", text)


def _report(level: str, text: str) -> None:
    if text in session.reported:
        return
    session.reported.add(text)
    try:
        import logging

        logger = logging.getLogger("kvfix")
        if not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("kvfix %(levelname)s [pid %(process)d] %(message)s"))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
        getattr(logger, level)(text)
    except Exception:  # noqa: BLE001  a closed stderr must not stop the engine
        pass


def fault(where: str, error: BaseException) -> None:
    """Log, once, that kvfix itself failed at `where`. The engine goes on as without kvfix."""
    kind = f"a fault of kvfix itself in {where}: {type(error).__name__}"
    session.faults[kind] = session.faults.get(kind, 0) + 1
    if session.faults[kind] == 1:  # the text of the error may differ each time
        warning(f"{kind}: {error}; the engine goes on without it. Please report it; KVFIX=off switches kvfix off.")


def guarded(where: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function; its answer, or None if it raises, which is logged. For code of kvfix in the engine."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001
        fault(where, error)
        return None
