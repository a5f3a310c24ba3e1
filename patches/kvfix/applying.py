"""Apply and remove wrappers: the wrappers of fixes, and the wrappers that record connector events.

The functions of a fix are in groups. In a group, kvfix wraps all functions with the bug, or none. Before kvfix wraps
any function of a fix, `kvfix.applicability` judges all functions of the fix. Before the import of a module, kvfix
judges the module's file. After the import, kvfix judges the functions again, and unwraps a group if one of its
functions is refused. All wrappers of a function are in one `WrappedFunction`.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from kvfix import applicability, catalogue, engine_log, installed_source
from kvfix.applicability import Applicability, Decision
from kvfix.fixes.record import Fix, Target
from kvfix.session import session
from kvfix.wrapping import WrappedFunction, Wrapper

_HALF_IMPORTED = Applicability(
    "refused", "Python is still importing the module; call kvfix.apply() before the import, or again after the import"
)


def settle(module: ModuleType, complete: bool) -> None:
    """Apply the wanted fixes to functions of this module, and remove unwanted fixes from the functions.

    complete: True if the import of the module has ended. kvfix cannot apply fixes before the import has ended.
    """
    fixes = catalogue.fixes_of(module.__name__)  # outside the lock, because this call imports modules
    with session.lock:
        _forget_reloaded(module)
        if complete:
            session.complete[module.__name__] = module
        for fix in fixes:
            if fix.fixable:
                try:
                    _settle(fix, module.__name__)
                except Exception as error:  # noqa: BLE001
                    engine_log.fault(f"applying {fix.code}", error)
                    engine_log.guarded(f"removing {fix.code}", _wrap, fix, [])


def attach(holder: type, name: str, key: str, wrapper: Wrapper) -> None:
    """Wrap a method of this class. The wrapper belongs to no fix, and is outside the wrappers of all fixes."""
    owner: Any = next(each for each in holder.__mro__ if name in vars(each))
    at = (owner.__module__, f"{owner.__qualname__}.{name}")
    with session.lock:
        function = session.wrapped.get(at)
        if function is None or function.owner is not owner:
            function = session.wrapped[at] = WrappedFunction(owner, name, vars(owner)[name])
        if key not in function:
            function.add(key, 1000, wrapper)  # the highest order, so that the wrapper is outermost


def detach(key: str) -> None:
    """Remove all wrappers that `attach` added under this key."""
    with session.lock:
        for function in session.wrapped.values():
            function.remove(key)


def remove_all() -> None:
    with session.lock:
        for function in session.wrapped.values():
            function.clear()
        session.outcomes.clear()
        session.judged.clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("kvfix.fixes.") and hasattr(module, "FIX"):
            module.FIX.let_go()


def _settle(fix: Fix, imported: str) -> None:
    """Wrap or unwrap the functions of the fix. Judge unwrapped functions of the module `imported` again."""
    is_taken = session.config is not None and session.config.takes(fix.code, fix.opt_in)
    if not is_taken or fix.code in session.held_back:
        for target in fix.targets:
            session.outcomes.pop(target, None)
            session.judged.pop(target, None)
        _wrap(fix, [])
        return
    for target in fix.targets:
        if target.module == imported and not _is_wrapped(fix, target):
            session.judged.pop(target, None)
    while True:
        decisions = applicability.decide(fix, _judged)
        failure = _wrap(fix, [target for decision in decisions for target in decision.wrapped])
        if failure is None:
            break
        target, error = failure
        session.judged[target] = Applicability("refused", f"{target.function}: {type(error).__name__}: {error}")
    _note_outcomes(fix, decisions)


def _judged(target: Target) -> Applicability:
    """Judge the function without kvfix's wrappers."""
    module = sys.modules.get(target.module)
    if module is None or target.module in session.executing:
        return applicability.judge(target)
    if target not in session.judged:
        is_initializing = getattr(getattr(module, "__spec__", None), "_initializing", False)
        if is_initializing and session.complete.get(target.module) is not module:
            session.judged[target] = _HALF_IMPORTED
            return _HALF_IMPORTED
        wrapped = session.wrapped.get((target.module, target.function))
        found = installed_source.live_function(module, target.function)
        inside = wrapped.original if wrapped is not None and found is not None and found[2] is wrapped.placed else None
        session.judged[target] = applicability.judge_live(target, module, inside)
    return session.judged[target]


def _wrap(fix: Fix, targets: list[Target]) -> tuple[Target, Exception] | None:
    """Wrap these functions of the fix if their modules are imported, and unwrap the other functions of the fix.

    If kvfix cannot make or add a wrapper, add no wrapper, and return the function and the error.
    """
    new: list[tuple[WrappedFunction, Target, Wrapper]] = []
    try:
        for target in dict.fromkeys(targets):
            module = sys.modules.get(target.module)
            if target.fix is None or module is None or target.module in session.executing or _is_wrapped(fix, target):
                continue
            new.append((_wrapped(target, module), target, target.fix(module)))
        for other in fix.targets:
            if other not in targets and _is_wrapped(fix, other):
                session.wrapped[other.module, other.function].remove(fix.code)
        for function, target, wrapper in new:
            function.add(fix.code, target.order, wrapper)
    except Exception as error:  # noqa: BLE001
        for function, _, _ in new:
            function.remove(fix.code)
        return target, error
    return None


def _is_wrapped(fix: Fix, target: Target) -> bool:
    return fix.code in session.wrapped.get((target.module, target.function), ())


def _wrapped(target: Target, module: ModuleType) -> WrappedFunction:
    key = (target.module, target.function)
    if key not in session.wrapped:
        found = installed_source.live_function(module, target.function)
        assert found is not None  # judge_live has found the function
        session.wrapped[key] = WrappedFunction(*found)
    return session.wrapped[key]


def _note_outcomes(fix: Fix, decisions: list[Decision]) -> None:
    """Store in `session.outcomes` the state of each function whose module is imported. Log a refused fix."""
    wrapped = {target for decision in decisions for target in decision.wrapped}
    for decision in decisions:
        for target in decision.group:
            if target.module not in sys.modules or target.module in session.executing:
                continue
            if target in wrapped:
                outcome = Applicability("applied", _judged(target).reason)
            elif decision.outcome.state in ("refused", "unknown"):
                outcome = decision.outcome
            else:
                outcome = _judged(target)
            earlier = session.outcomes.get(target)
            session.outcomes[target] = outcome
            if outcome.state == "applied" and (earlier is None or earlier.state != "applied"):
                session.newly_applied.setdefault(target.module, {})[fix.code] = None
        if decision.outcome.state == "refused":
            engine_log.warning(
                f"{fix.code} {fix.slug} is refused and not applied: {decision.outcome.reason}. "
                f"`kvfix explain {fix.code}` describes the bug"
            )


def log_applied() -> None:
    """Log one line for each module, with the fixes that kvfix has applied to the module since the last call."""
    while session.newly_applied:
        module, codes = session.newly_applied.popitem()
        dist = module.partition(".")[0]
        installed = f"{dist} {installed_source.version(dist)}".strip()
        engine_log.info(f"applied to {module} ({installed}): {' '.join(sorted(codes))}")


def _forget_reloaded(module: ModuleType) -> None:
    """If `importlib.reload` has replaced functions of the module, forget the old functions and their states."""
    for (name, function), wrapped in list(session.wrapped.items()):
        if name == module.__name__ and _is_gone(wrapped, module, function):
            del session.wrapped[name, function]
            for kept in (session.outcomes, session.judged):
                for target in list(kept):
                    if target.module == name and (target.function == function or target.fix is None):
                        del kept[target]


def _is_gone(wrapped: WrappedFunction, module: ModuleType, function: str) -> bool:
    """Return True if a reload of the module has replaced the function.

    If another tool has wrapped kvfix's wrapper, return False. If the tool's wrapper has no `__wrapped__`,
    `inspect.unwrap` stops at the tool's wrapper. Unlike a tool's wrapper, a reload keeps a function's file and name.
    """
    found = installed_source.live_function(module, function)
    if found is None:
        return True
    was, now = inspect.unwrap(wrapped.original), inspect.unwrap(found[2])
    return now is not was and (found[0] is not wrapped.owner or _source(now) == _source(was))


def _source(function: Any) -> tuple[str, str]:
    code = getattr(function, "__code__", None)
    return (code.co_filename, code.co_name) if code is not None else ("", "")
