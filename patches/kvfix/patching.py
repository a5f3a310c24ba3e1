"""Putting corrections in place and taking them out again.

One owner per target: all corrections of one function hang on one `_Hook`, in the order of their codes (the lowest
is nearest to the original), so that each can be switched off alone and the original can always be put back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import wrapt

from kvfix import notice, target, verdict
from kvfix.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from kvfix.choice import Choice
    from kvfix.fix import Patch

_hooks: dict[tuple[str, str], _Hook] = {}
_settled: dict[Patch, Verdict] = {}


class _Hook:
    """A function of the patient with corrections around it."""

    def __init__(self, owner: Any, name: str, original: Any) -> None:
        self.owner = owner
        self.name = name
        self.original = original
        self.corrections: dict[str, Callable[..., Any]] = {}
        self.placed: Any = original
        self.enabled: list[bool] = []

    def is_on_top(self) -> bool:
        return vars(self.owner).get(self.name) is self.placed

    def place(self) -> None:
        """Compose what `corrections` holds around the original.

        If somebody has wrapped the hook after us, their wrapper holds on to ours: ours is switched through and the
        new composition goes around theirs, so nothing of theirs is lost.
        """
        if not self.is_on_top():
            self.enabled[:] = [False]
            self.original = vars(self.owner)[self.name]
        self.enabled = [True]
        composed = self.original
        for code in sorted(self.corrections):
            composed = self._around(composed, self.corrections[code], self.enabled)
        setattr(self.owner, self.name, composed)
        self.placed = composed

    @staticmethod
    def _around(function: Any, wrapper: Callable[..., Any], enabled: list[bool]) -> Any:
        return wrapt.FunctionWrapper(function, wrapper, enabled=lambda: enabled[0])


def settle(module: ModuleType, choice: Choice | None) -> None:
    """Put in place what the choice takes of the fixes for this module, and take out what it does not."""
    from kvfix.fix import catalogue

    for fix in catalogue():
        for patch in fix.patches:
            if patch.module != module.__name__:
                continue
            if choice is not None and choice.takes(fix.code, fix.opt_in):
                _put(fix.code, fix.slug, patch, module)
            else:
                _take(fix.code, patch)


def remove_all() -> None:
    """Every correction out, every original back."""
    for hook in _hooks.values():
        if hook.corrections:
            hook.corrections.clear()
            hook.place()
    _hooks.clear()
    _settled.clear()


def settled() -> dict[Patch, Verdict]:
    """The verdict of each patch whose module has arrived in this process, with the fix chosen."""
    return _settled


def _put(code: str, slug: str, patch: Patch, module: ModuleType) -> None:
    hook = _hooks.get((patch.module, patch.function))
    if hook is not None and code in hook.corrections:
        return
    try:
        found = verdict.judge_live(patch, module)
        if found.verdict == "applicable":
            _hook(patch, module).corrections[code] = patch.correct(module)
            _hook(patch, module).place()
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
        hook.place()
    _settled.pop(patch, None)


def _hook(patch: Patch, module: ModuleType) -> _Hook:
    key = (patch.module, patch.function)
    if key not in _hooks:
        found = target.live_function(module, patch.function)
        assert found is not None  # judge_live has seen it
        _hooks[key] = _Hook(*found)
    return _hooks[key]
