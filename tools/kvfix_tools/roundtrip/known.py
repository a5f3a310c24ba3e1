"""Bugs that are known to fail cells: which cells, what they are, and what to do. They fail all the same."""

from __future__ import annotations

from typing import NamedTuple

from kvfix_tools.roundtrip.trip import Result


class Known(NamedTuple):
    """`fix`: kvfix's fix for it; with that in place such a cell has another reason. `remedy`: in the engine."""

    bug: str
    says: str
    remedy: str
    fix: str
    backends: tuple[str, ...]
    layouts: tuple[str, ...]


KNOWN = (
    Known(
        "LMCache issue 4463",
        "wrong KV from the packed layout of vLLM 0.26 and later",
        "kvfix.apply() before vLLM is launched (KVF020), or LMCacheMPConnector",
        "KVF020",
        ("lmcache-v2", "lmcache-v3", "lmcache-engine"),
        ("packed", "packed-hnd", "packed-pool"),
    ),
    Known(
        "heads taken for tokens",
        "LMCache's torch operation for one layer takes HND for NHD",
        "kvfix.apply() before vLLM is launched (KVF021), or an LMCache whose compiled operations load",
        "KVF021",
        ("lmcache-layerwise",),
        ("hnd", "hnd-block-first"),
    ),
)


def known(result: Result, in_place: list[str]) -> Known | None:
    """The bug that a cell which is not right shows."""
    cell = result.cell
    return next(
        (
            one
            for one in KNOWN
            if result.verdict in ("failed", "crashed")
            and cell.backend in one.backends
            and cell.layout in one.layouts
            and one.fix not in in_place
        ),
        None,
    )
