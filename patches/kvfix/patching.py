"""Putting corrections in place and taking them out again.

One owner per target: all corrections of one function hang on one `_Hook`, in the order of their codes (the lowest
is nearest to the original), so that each can be switched off alone and the original can always be put back.
"""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

from kvfix import notice, target, verdict
from kvfix.correction import corrected
from kvfix.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from kvfix.choice import Choice
    from kvfix.fix import Fix, Patch

#: Modules are imported in any thread, so fixes are put in place in any thread. Whoever holds it imports no target.
_lock = threading.RLock()
_hooks: dict[tuple[str, str], _Hook] = {}
_settled: dict[Patch, Verdict] = {}
_HALF_IMPORTED = Verdict("failed", "its module is half imported; call kvfix.apply() before, or once more after")


class _Hook:
    """A function of the patient with corrections around it.

    What stands in the class is a stable `hook`, whose code is exchanged when a correction comes or goes. So a tool that
    wraps the hook after us and holds on to it can stay where it is: nothing of theirs is lost.
    (wrapt.FunctionWrapper would serve too; it costs 0.4 microseconds a call against 0.03, and importing it costs
    three times what `apply()` may take. Hooks are plain methods, its proxies are not needed.)
    """

    def __init__(self, owner: Any, name: str, original: Any) -> None:
        """Raises TypeError for what it would break."""
        kind = _other_kind(original)
        if kind:
            raise TypeError(f"{owner.__name__}.{name} is {kind}, and kvfix wraps plain and static functions only")
        self.owner = owner
        self.name = name
        self.original = original
        self.corrections: dict[str, Callable[..., Any]] = {}
        self.function = original.__func__ if isinstance(original, staticmethod) else original
        self.hook = corrected(self.function, [])
        #: What stands in the class.
        self.placed: Any = staticmethod(self.hook) if isinstance(original, staticmethod) else self.hook

    def compose(self) -> None:
        """Put what `corrections` holds around the original; without any, the original itself is back."""
        made = corrected(self.function, [self.corrections[code] for code in sorted(self.corrections)])
        self.hook.__globals__.update(made.__globals__)  # first: a call under way keeps the names that it has
        self.hook.__code__ = made.__code__
        stands = vars(self.owner).get(self.name)
        if self.corrections and stands is self.original:
            setattr(self.owner, self.name, self.placed)
        elif not self.corrections and stands is self.placed:
            setattr(self.owner, self.name, self.original)

    def is_gone(self, module: ModuleType, function: str) -> bool:
        """Whether the module was executed again (importlib.reload), and has another function of this name now.

        Another tool's wrapper around ours ends in the same function; one that does not say what it wraps is left alone.
        """
        found = target.live_function(module, function)
        if found is None:
            return True
        was, now = inspect.unwrap(self.original), inspect.unwrap(found[2])
        return now is not was and (found[0] is not self.owner or _source(now) == _source(was))


def _other_kind(original: Any) -> str:
    """What this is, if not a function that answers at once; "" if it is one."""
    for kind in (classmethod, property):
        if isinstance(original, kind):
            return f"a {kind.__name__}"
    original = getattr(original, "__func__", original)
    if inspect.iscoroutinefunction(original) or inspect.isasyncgenfunction(original):
        return "an async function"
    return "" if callable(original) else f"a {type(original).__name__}"


def _source(function: Any) -> tuple[str, str]:
    """File and name of a function as it was compiled."""
    code = getattr(function, "__code__", None)
    return (code.co_filename, code.co_name) if code is not None else ("", "")


def settle(module: ModuleType, choice: Choice | None, complete: bool) -> None:
    """Put in place what the choice takes of the fixes for this module, and take out what it does not.

    complete: False for a module whose import has begun and not ended; nothing can be put in place then.
    """
    from kvfix.fix import catalogue

    fixes = catalogue()  # imports: before the lock
    with _lock:
        _forget_reloaded(module)
        for fix in fixes:
            for patch in fix.patches:
                if patch.module != module.__name__ or patch.correct is None:
                    continue
                if choice is not None and choice.takes(fix.code, fix.opt_in) and _has_use(fix, patch):
                    _put(fix.code, fix.slug, patch, module, complete)
                else:
                    _take(fix.code, patch)


def _forget_reloaded(module: ModuleType) -> None:
    """The hooks of a module that was executed again, and what was said of them."""
    for (name, function), hook in list(_hooks.items()):
        if name == module.__name__ and hook.is_gone(module, function):
            del _hooks[name, function]
            for patch in [patch for patch in _settled if (patch.module, patch.function) == (name, function)]:
                del _settled[patch]


def _has_use(fix: Fix, patch: Patch) -> bool:
    """A helper costs something in every step: it is put beside patches that ask for it only if one is applied."""
    asking = [other for other in fix.patches if other.module == patch.module and not other.helper]
    applied = [other for other in asking if other in _settled and _settled[other].verdict == "applied"]
    return not patch.helper or not asking or bool(applied)


def attach(owner: Any, name: str, key: str, decorate: Callable[[Any], Any]) -> None:
    """Something else than a fix around a function of the patient, a probe: outside of all corrections of it."""
    at = (owner.__module__, f"{owner.__qualname__}.{name}")
    with _lock:
        hook = _hooks.get(at)
        if hook is None or hook.owner is not owner:
            hook = _hooks[at] = _Hook(owner, name, vars(owner)[name])
        if key not in hook.corrections:
            hook.corrections[key] = decorate
            hook.compose()


def detach(key: str) -> None:
    """What `attach` put there under this key is gone everywhere."""
    with _lock:
        for hook in _hooks.values():
            if hook.corrections.pop(key, None) is not None:
                hook.compose()


def remove_all() -> None:
    """Every correction out, every original back."""
    with _lock:
        for hook in _hooks.values():
            if hook.corrections:
                hook.corrections.clear()
                hook.compose()
        _settled.clear()


def settled() -> dict[Patch, Verdict]:
    """The verdict of each patch whose module has arrived in this process, with the fix chosen."""
    return _settled


def _put(code: str, slug: str, patch: Patch, module: ModuleType, complete: bool) -> None:
    hook = _hooks.get((patch.module, patch.function))
    if hook is not None and code in hook.corrections:
        return
    try:
        found = verdict.judge_live(patch, module) if complete else _HALF_IMPORTED
        if found.verdict == "applicable" and patch.correct is not None:
            _hook(patch, module).corrections[code] = patch.correct(module)
            _hook(patch, module).compose()
            found = Verdict("applied", found.reason)
    except Exception as error:  # noqa: BLE001
        found = Verdict("failed", f"{type(error).__name__}: {error}")
    _settled[patch] = found
    installed = f"{patch.dist} {target.version(patch.dist)}"
    if found.verdict == "applied":
        notice.note(f"{code} {slug} applied to {patch.function} ({installed}: {found.reason})")
    elif found.verdict in ("failed", "unknown"):
        notice.warn(f"{code} {slug} not applied ({installed}): {found.verdict}: {found.reason}")


def _take(code: str, patch: Patch) -> None:
    hook = _hooks.get((patch.module, patch.function))
    if hook is not None and hook.corrections.pop(code, None) is not None:
        hook.compose()
    _settled.pop(patch, None)


def _hook(patch: Patch, module: ModuleType) -> _Hook:
    key = (patch.module, patch.function)
    if key not in _hooks:
        found = target.live_function(module, patch.function)
        assert found is not None  # judge_live has seen it
        _hooks[key] = _Hook(*found)
    return _hooks[key]
