"""Applies and removes wrappers: those of the fixes, and those of the connector events.

One `WrappedFunction` has all wrappers of a function, so that each can be removed separately and the original can always
be put back.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from kvfix import applicability, catalogue, engine_log, installed_source
from kvfix.applicability import Applicability
from kvfix.session import session
from kvfix.wrapping import WrappedFunction

if TYPE_CHECKING:
    from types import ModuleType

    from kvfix.fixes.api import Fix, Target
    from kvfix.wrapping import Wrapper

#: Outside of all fixes.
OUTERMOST = 1000
_HALF_IMPORTED = Applicability("failed", "its module is half imported; call kvfix.apply() before, or once more after")


def settle(module: ModuleType, complete: bool) -> None:
    """Apply the fixes for this module that the configuration takes, and remove the others.

    complete: False for a module whose import has not ended: no fix can be applied then.
    """
    fixes = catalogue.fixes()  # imports: before the lock
    with session.lock:
        _forget_reloaded(module)
        for fix in fixes:
            for target in fix.targets:
                if target.module == module.__name__ and fix.fixable:
                    if _is_wanted(fix, target):
                        _apply(fix, target, module, complete)
                    else:
                        _remove(fix, target)


def attach(owner: Any, name: str, key: str, wrapper: Wrapper) -> None:
    """Put a wrapper that is no fix around a function, outside of all fixes."""
    at = (owner.__module__, f"{owner.__qualname__}.{name}")
    with session.lock:
        function = session.wrapped.get(at)
        if function is None or function.owner is not owner:
            function = session.wrapped[at] = WrappedFunction(owner, name, vars(owner)[name])
        if key not in function:
            function.add(key, OUTERMOST, wrapper)


def detach(key: str) -> None:
    """Remove all wrappers that `attach` added under this key."""
    with session.lock:
        for function in session.wrapped.values():
            function.remove(key)


def remove_all() -> None:
    """Remove every wrapper and put back every original."""
    with session.lock:
        for function in session.wrapped.values():
            function.clear()
        session.outcomes.clear()
    for fix in catalogue.fixes():
        fix.let_go()


def _is_wanted(fix: Fix, target: Target) -> bool:
    """A helper costs time in every step: it is wanted only if another target of the fix in its module is applied."""
    if session.config is None or not session.config.takes(fix.code, fix.opt_in) or fix.code in session.held_back:
        return False
    needing = [other for other in fix.targets if other.module == target.module and not other.helper]
    applied = [other for other in needing if other in session.outcomes and session.outcomes[other].state == "applied"]
    return not target.helper or not needing or bool(applied)


def _apply(fix: Fix, target: Target, module: ModuleType, complete: bool) -> None:
    earlier = session.outcomes.get(target)
    if earlier is not None and earlier.state == "applied":
        return
    try:
        found = applicability.judge_live(target, module) if complete else _HALF_IMPORTED
        if found.state == "applicable":
            if target.fix is not None:
                _wrapped(target, module).add(fix.code, target.place, target.fix(module))
            found = Applicability("applied", found.reason)
    except Exception as error:  # noqa: BLE001
        found = Applicability("failed", f"{type(error).__name__}: {error}")
    session.outcomes[target] = found
    installed = f"{target.dist} {installed_source.version(target.dist)}"
    if found.state == "applied" and target.fix is not None:
        engine_log.info(f"{fix.code} {fix.slug} applied to {target.function} ({installed}: {found.reason})")
    elif found.state in ("failed", "unknown"):
        engine_log.warning(f"{fix.code} {fix.slug} not applied ({installed}): {found.state}: {found.reason}")


def _remove(fix: Fix, target: Target) -> None:
    function = session.wrapped.get((target.module, target.function))
    if function is not None:
        function.remove(fix.code)
    session.outcomes.pop(target, None)


def _wrapped(target: Target, module: ModuleType) -> WrappedFunction:
    key = (target.module, target.function)
    if key not in session.wrapped:
        found = installed_source.live_function(module, target.function)
        assert found is not None  # judge_live has found it
        session.wrapped[key] = WrappedFunction(*found)
    return session.wrapped[key]


def _forget_reloaded(module: ModuleType) -> None:
    """Drop the functions of a reloaded module (importlib.reload), and their outcomes."""
    for (name, function), wrapped in list(session.wrapped.items()):
        if name == module.__name__ and _is_gone(wrapped, module, function):
            del session.wrapped[name, function]
            for target in list(session.outcomes):
                if target.module == name and (target.function == function or target.fix is None):
                    del session.outcomes[target]


def _is_gone(wrapped: WrappedFunction, module: ModuleType, function: str) -> bool:
    """Whether the module has another function of this name now.

    A wrapper of another tool around ours unwraps to the same function. A wrapper without `__wrapped__` is kept.
    """
    found = installed_source.live_function(module, function)
    if found is None:
        return True
    was, now = inspect.unwrap(wrapped.original), inspect.unwrap(found[2])
    return now is not was and (found[0] is not wrapped.owner or _source(now) == _source(was))


def _source(function: Any) -> tuple[str, str]:
    """File and name of a function as it was compiled."""
    code = getattr(function, "__code__", None)
    return (code.co_filename, code.co_name) if code is not None else ("", "")
