"""kvfix's own fixes in what is checked. They are in place unless `--no-fixes` says otherwise, as in an engine with
`kvfix.apply()`; the report names them. Where kvfix is not installed, everything is as released.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any


def put(wanted: bool) -> None:
    """In this process and in those that it starts; or in none of them, whatever the environment says."""
    kvfix = _kvfix()
    if kvfix is None:
        return
    logger = logging.getLogger("kvfix")
    if not logger.handlers:  # the report says which are in place
        handler = logging.StreamHandler()
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)
        logger.propagate = False
    if wanted:
        kvfix.apply()
    else:
        kvfix.revert()
        os.environ["KVFIX"] = "off"


def in_children() -> bool:
    """Are they in the engines that this process starts?"""
    return os.environ.get("KVFIX", "off") != "off"


def in_place() -> list[str]:
    """Codes of those that have been put in place in this process."""
    kvfix = sys.modules.get("kvfix")
    return [] if kvfix is None else sorted({row.code for row in kvfix.status() if row.verdict == "applied"})


def _kvfix() -> Any:
    try:
        import kvfix
    except ImportError:
        return None
    return kvfix
