"""kvfix's own fixes in what is checked, and the bugs that are known to fail cells.

Fixes are applied unless `--no-fixes` says otherwise, as in an engine with `kvfix.apply()`; the report names them. Where
kvfix is not installed, everything is as released. A cell that shows a known bug fails all the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

from kvfix_tools.roundtrip.cell_check import Result


@contextlib.contextmanager
def applied(wanted: bool) -> Iterator[None]:
    """In this process and in those that it starts, or in none of them. KVFIX=off in the environment is off here too."""
    try:
        import kvfix
    except ImportError:
        yield
        return
    before = os.environ.get("KVFIX")
    kvfix.revert()
    if wanted and before != "off":
        os.environ.pop("KVFIX", None)
        kvfix.apply()
    else:
        os.environ["KVFIX"] = "off"
    logger = logging.getLogger("kvfix")
    logger.addFilter(_warnings)
    try:
        yield
    finally:
        logger.removeFilter(_warnings)
        kvfix.revert()
        if before is not None:
            os.environ["KVFIX"] = before


def _warnings(record: logging.LogRecord) -> bool:
    """The report names the fixes that are applied."""
    return record.levelno >= logging.WARNING


def in_children() -> bool:
    """Are they applied in the engines that this process starts?"""
    return os.environ.get("KVFIX", "off") != "off"


def codes() -> list[str]:
    """Codes of those that are applied in this process."""
    kvfix = sys.modules.get("kvfix")
    return [] if kvfix is None else sorted({row.code for row in kvfix.status() if row.verdict == "applied"})


class KnownBug(NamedTuple):
    """`fix`: kvfix's fix for it; with that applied such a cell has another reason. `remedy`: in the engine."""

    bug: str
    effect: str
    remedy: str
    fix: str
    backends: tuple[str, ...]
    layouts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.bug}: {self.effect}"


KNOWN = (
    KnownBug(
        "LMCache issue 4463",
        "wrong KV from the packed layout of vLLM 0.26 and later",
        "kvfix.apply() before vLLM is launched (KVF020), or LMCacheMPConnector",
        "KVF020",
        ("lmcache-v2", "lmcache-v3", "lmcache-engine"),
        ("packed", "packed-hnd", "packed-pool"),
    ),
    KnownBug(
        "heads taken for tokens",
        "LMCache's torch operation for one layer takes HND for NHD",
        "kvfix.apply() before vLLM is launched (KVF021), or an LMCache whose compiled operations load",
        "KVF021",
        ("lmcache-layerwise",),
        ("hnd", "hnd-block-first"),
    ),
)


def known_bug(result: Result, applied: list[str]) -> KnownBug | None:
    """The bug that a cell which is not right shows. applied: codes of fixes."""
    if result.verdict not in ("failed", "crashed"):
        return None
    cell = result.cell
    shown = (bug for bug in KNOWN if cell.backend in bug.backends and cell.layout in bug.layouts)
    return next((bug for bug in shown if bug.fix not in applied), None)
