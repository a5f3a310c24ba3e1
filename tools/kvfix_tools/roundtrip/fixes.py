"""kvfix's fixes during the round trip, and known bugs that make cells fail. Without kvfix, nothing is fixed."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple


@contextlib.contextmanager
def applied(wanted: bool) -> Iterator[None]:
    """Apply the fixes in this process and its children, in the mode that KVFIX names, or apply none."""
    try:
        import kvfix
    except ImportError:
        yield
        return
    before = os.environ.get("KVFIX")
    kvfix.revert()
    if wanted and before != "off":
        kvfix.apply((before or "fix").partition(" ")[0])
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
    """Hide lines about applied fixes, because the report names them."""
    return record.levelno >= logging.WARNING


def codes() -> list[str]:
    kvfix = sys.modules.get("kvfix")
    return [] if kvfix is None else sorted({row.code for row in kvfix.status() if row.verdict == "applied"})


class KnownBug(NamedTuple):
    """A known bug. fix: code of kvfix's fix. If it is applied, a failed cell has another cause. remedy: what to do."""

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
        "kvfix run -- vllm serve ... (KVF020), or use LMCacheMPConnector",
        "KVF020",
        ("lmcache-v2", "lmcache-v3", "lmcache-engine"),
        ("packed", "packed-hnd", "packed-pool"),
    ),
    KnownBug(
        "heads taken for tokens",
        "LMCache's torch operation for one layer reads HND as NHD",
        "kvfix run -- vllm serve ... (KVF021), or install an LMCache whose compiled operations load",
        "KVF021",
        ("lmcache-layerwise",),
        ("hnd", "hnd-block-first"),
    ),
)
