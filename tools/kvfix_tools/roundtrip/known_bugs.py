"""Bugs that are known to fail cells: which cells, what they are, and what to do. They fail all the same."""

from __future__ import annotations

from typing import NamedTuple

from kvfix_tools.roundtrip.cell_check import Result


class KnownBug(NamedTuple):
    """`fix`: kvfix's fix for it; with that applied such a cell has another reason. `remedy`: in the engine."""

    bug: str
    effect: str
    remedy: str
    fix: str
    backends: tuple[str, ...]
    layouts: tuple[str, ...]


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
