"""What kvfix says inside the engine: few lines, each of them once in a process, and never an exception.

The lines go to the logger `kvfix`. Where nobody has configured logging they go to stderr. `logging` is
imported at the first line only: `kvfix.apply()` is on the start-up path of every process.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_said: set[str] = set()
#: What went wrong in kvfix itself, and how often.
faults: dict[str, int] = {}


def note(text: str) -> None:
    """Say that something was done. Level INFO."""
    _say("info", text)


def warn(text: str) -> None:
    """Say what is wrong, where, and what to do. Level WARNING."""
    _say("warning", text)


def _say(level: str, text: str) -> None:
    if text in _said:
        return
    _said.add(text)
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
    """Say, once, that kvfix itself went wrong at `where`; the engine goes on as if kvfix were not there."""
    kind = f"a fault of kvfix itself in {where}: {type(error).__name__}"
    faults[kind] = faults.get(kind, 0) + 1
    if faults[kind] == 1:  # the error's own words may differ each time
        warn(f"{kind}: {error}; the engine goes on without it. Please report it; KVFIX=off switches kvfix off.")


def guarded(where: str, function: Callable[..., Any], *args: Any) -> Any:
    """Its answer; None where it fails, which is reported. What kvfix does in the engine goes through this."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001
        fault(where, error)
        return None
