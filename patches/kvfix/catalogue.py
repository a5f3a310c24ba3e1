"""All fixes, and the fixes that handle a finding."""

from __future__ import annotations

import functools
import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from kvfix import applicability, engine_log
from kvfix import fixes as folder

if TYPE_CHECKING:
    from kvfix.fixes.record import Fix

#: Advice if no fix is found.
REINSTALL = "Install kvfix again, from its wheel or its checkout."


@functools.lru_cache(maxsize=1)
def fixes() -> tuple[Fix, ...]:
    """Return every fix, sorted by code. Skip a fix that cannot be loaded, with a warning."""
    found = [fix for _, module in folder.modules().values() if (fix := _load(module)) is not None]
    if not found:
        engine_log.warning(
            f"this installation of kvfix is broken and fixes nothing: no fix in {folder.__file__}. {REINSTALL}"
        )
    return tuple(found)


def fixes_of(module: str) -> list[Fix]:
    """Return the fixes that have a function in this module, sorted by code. Load no other fixes."""
    return [fix for fix in map(_load, modules_of_fixes().get(module, ())) if fix is not None]


@functools.lru_cache(maxsize=1)
def modules_of_fixes() -> dict[str, list[str]]:
    """{module of vLLM or LMCache: modules of the fixes that have a function in it}.

    The pairs come from fingerprints.json. This function loads only the fixes that the file does not have.
    """
    found: dict[str, list[str]] = {}
    indexed = set()
    for known in applicability.fingerprints().values():
        for module, names in known.get("fixes", {}).items():
            found.setdefault(module, []).extend(names)
            indexed.update(names)
    for _, name in folder.modules().values():
        fix = _load(name) if name not in indexed else None
        for module in {target.module for target in fix.targets} if fix is not None else ():
            found.setdefault(module, []).append(name)
    return {module: sorted(names) for module, names in found.items()}


def loaded() -> list[Fix]:
    """Return the fixes whose modules are loaded in this process."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("kvfix.fixes.")]
    return [module.FIX for module in modules if hasattr(module, "FIX")]


@functools.cache
def _load(module: str) -> Fix | None:
    found: Fix | None = engine_log.guarded(f"loading {module}", lambda: import_module(module).FIX)
    return found


def find(name: str) -> Fix | None:
    return next((fix for fix in fixes() if name.upper() == fix.code or name.lower() == fix.slug), None)


def handling(rule: str, text: str | None = None) -> list[Fix]:
    """Return the fixes with this rule or finding as evidence, for any release. text: its message; None: any message.

    There may be several fixes, because one message can have several causes.
    """
    return [fix for fix in fixes() if rule in fix.evidence and (text is None or re.search(fix.evidence[rule], text))]
