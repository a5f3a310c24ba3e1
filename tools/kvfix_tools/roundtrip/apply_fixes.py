"""kvfix's own fixes in what is checked. They are applied unless `--no-fixes` says otherwise, as in an engine with
`kvfix.apply()`; the report names them. Where kvfix is not installed, everything is as released.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def applied(wanted: bool) -> Iterator[None]:
    """In this process and in those that it starts, or in none of them. KVFIX=off in the environment is off here too."""
    kvfix, before = _kvfix(), os.environ.get("KVFIX")
    if kvfix is None:
        yield
        return
    kvfix.revert()
    if wanted and before != "off":
        os.environ.pop("KVFIX", None)
        kvfix.apply()
    else:
        os.environ["KVFIX"] = "off"
    logger, handler = logging.getLogger("kvfix"), logging.StreamHandler()
    handler.setLevel(logging.WARNING)  # the report names those that are applied
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
        kvfix.revert()
        if before is not None:
            os.environ["KVFIX"] = before


def in_children() -> bool:
    """Are they applied in the engines that this process starts?"""
    return os.environ.get("KVFIX", "off") != "off"


def codes() -> list[str]:
    """Codes of those that are applied in this process."""
    kvfix = sys.modules.get("kvfix")
    return [] if kvfix is None else sorted({row.code for row in kvfix.status() if row.verdict == "applied"})


def _kvfix() -> Any:
    try:
        import kvfix
    except ImportError:
        return None
    return kvfix
