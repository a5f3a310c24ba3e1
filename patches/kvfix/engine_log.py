"""Write kvfix's lines to the engine's log, and repeat none of the last 1000 texts. The functions never raise.

A line may quote an exception, and the exception may quote text of a client. So kvfix limits the length of a line, the
number of remembered texts, and the number of lines of one kind. The lines go to the logger `kvfix`, or to stderr if
logging is not configured. kvfix imports `logging` only when it logs its first line, so that `kvfix.apply()` is fast.
"""

from __future__ import annotations

import time

from kvfix.session import session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: kvfix cuts a line to LONGEST characters, and remembers the last TEXTS texts and the last KINDS kinds of lines.
LONGEST, TEXTS, KINDS = 2000, 1000, 200
#: After LINES lines of one kind, kvfix logs at most one line of this kind in PAUSE seconds.
LINES, PAUSE = 8, 60.0


def info(text: str) -> None:
    _report("info", text)


def warning(text: str) -> None:
    _report("warning", text)


def _report(level: str, text: str) -> None:
    try:
        line = _admitted(text[:LONGEST])
        if not line:
            return
        import logging

        logger = logging.getLogger("kvfix")
        if not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("kvfix %(levelname)s [pid %(process)d] %(message)s"))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
        getattr(logger, level)(line)
    except Exception:  # noqa: BLE001  a closed stderr must not stop the engine
        pass


def _admitted(text: str) -> str:
    """Return the line to log, or "" for a repeated text or a too frequent kind. The kind is the text before ":"."""
    if text in session.reported:
        return ""
    _remember(session.reported, text, None, TEXTS)
    kind, now = text.partition(":")[0], time.monotonic()
    lines, last, left_out = session.lines.pop(kind, (0, now, 0))
    if lines >= LINES and now - last < PAUSE:
        _remember(session.lines, kind, (lines, last, left_out + 1), KINDS)
        return ""
    _remember(session.lines, kind, (lines + 1, now, 0), KINDS)
    return f"{text} ({left_out} more lines of this kind were left out before this one)" if left_out else text


def _remember(kept: dict[str, Any], name: str, value: Any, most: int) -> None:
    kept[name] = value
    if len(kept) > most:
        del kept[next(iter(kept))]


def fault(where: str, error: BaseException) -> None:
    """Log that code of kvfix has raised an exception at `where`. Log each type of exception once for each `where`."""
    kind = f"a fault of kvfix itself in {where}: {type(error).__name__}"
    session.faults[kind] = session.faults.get(kind, 0) + 1
    if session.faults[kind] == 1:  # `_admitted` is not enough, because the text of the error may differ each time
        warning(
            f"{kind}: {_text(error)}. The engine continues. Please report this error; KVFIX=off switches kvfix off."
        )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  an exception of another library may fail to make its text
        return "the text of the error cannot be read"


def guarded(where: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of kvfix and return its result. If the function raises, log the exception and return None."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001
        fault(where, error)
        return None
