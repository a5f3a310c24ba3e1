"""All fixes, and the fixes that handle a finding."""

from __future__ import annotations

import functools
import re
from importlib import import_module
from typing import TYPE_CHECKING

from kvfix import engine_log
from kvfix import fixes as folder

if TYPE_CHECKING:
    from kvfix.fixes.api import Fix

#: Advice if no fix is found.
REINSTALL = "Install kvfix again, from its wheel or its checkout."


@functools.lru_cache(maxsize=1)
def fixes() -> tuple[Fix, ...]:
    """Every fix, sorted by code. A fix that cannot be loaded is skipped, with a warning."""
    loaded = [engine_log.guarded(f"loading {module}", _load, module) for _, module in folder.modules().values()]
    found = [fix for fix in loaded if fix is not None]
    if not found:
        engine_log.warning(
            f"this installation of kvfix is broken and fixes nothing: no fix in {folder.__file__}. {REINSTALL}"
        )
    return tuple(found)


def _load(module: str) -> Fix:
    fix: Fix = import_module(module).FIX
    return fix


def find(name: str) -> Fix | None:
    """The fix of this code or slug; None if there is none."""
    return next((fix for fix in fixes() if name.upper() == fix.code or name.lower() == fix.slug), None)


def handling(rule: str, message: str | None = None) -> list[Fix]:
    """Fixes that have this rule or finding as evidence, in any release. message: None matches any.

    There may be several: one message can have several causes.
    """
    return [
        fix for fix in fixes() if rule in fix.evidence and (message is None or re.search(fix.evidence[rule], message))
    ]
