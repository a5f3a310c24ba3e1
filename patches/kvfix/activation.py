"""How one choice reaches every process.

vLLM starts EngineCore and its workers as other processes, most often by spawn: what the parent patched is not
there. So `apply()` writes the choice into the environment, and vLLM's plugin entry point (`load`) reads it in
each process, before scheduler, worker and connector are made (vllm/v1/engine/core.py, v1/worker/worker_base.py).
"""

from __future__ import annotations

import os

from kvfix import arrival, notice
from kvfix.choice import Choice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvfix.verdict import Row

ENV = "KVFIX"
#: vLLM loads no plugin that is not in this list, where the list is set, and says nothing (vllm/plugins/__init__.py).
_ALLOWED_PLUGINS = "VLLM_PLUGINS"
#: Ray workers get only variables with a prefix from vLLM's own list and from this one (vllm/ray/ray_env.py).
_RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"

#: What the environment held before `apply()` changed it.
_before: dict[str, str | None] = {}


def apply(
    mode: str = "fix", only: Iterable[str] | None = None, skip: Iterable[str] | None = None, layers: bool = False
) -> None:
    """Fix the known bugs of the installed vLLM and LMCache, here and in every process started from here.

    Call it before vLLM is launched. Calling it again is harmless; the last choice holds. Importing heavy
    modules is left to their users: a fix is put in place when its module has been imported.

    mode: `fix`; `observe`: and keep a flight recorder of the connector hooks; `check`: and look at the invariants
    after each of them, log and dump what violates one; `strict`: and raise `kvfix.probes.Violation` there.
    only, skip: codes (`KVF001`) or slugs of fixes; default all that are not opt-in.
    layers: hooks that run once per layer and step are counted too, and where one hangs is told; not in mode `fix`.
    Raises ValueError for an unknown mode or fix. Nothing else is raised here.
    KVFIX=off in the environment keeps kvfix off, whatever the program says.
    """
    choice = Choice.make(mode, only, skip, layers)
    if Choice.is_off(os.environ.get(ENV)):
        notice.warn(f"{ENV}=off is set in the environment: kvfix.apply() does nothing")
        return
    _hand_over(choice)
    arrival.activate(choice)


def revert() -> None:
    """Take every fix out of this process, and the choice out of its environment. Idempotent.

    Processes that are running already keep what they have.
    """
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()
    os.environ.pop(ENV, None)
    arrival.deactivate()


def status() -> list[Row]:
    """One row for each fix and distribution: the verdict in this process, and why. Imports no patient."""
    from kvfix.verdict import survey

    return survey()


def load() -> None:
    """Entry point `vllm.general_plugins`, and of `kvfix run`: do here what the environment says.

    vLLM calls it unguarded in each of its processes, so it never raises. No choice in the environment:
    nothing happens.
    """
    try:
        text = os.environ.get(ENV)
        if not text or Choice.is_off(text):
            return
        try:
            choice = Choice.parse(text)
        except ValueError as error:
            notice.warn(
                f"the environment has {ENV}={text[:200]!r}: {error}. Nothing is patched. "
                f'Write {ENV}=fix, {ENV}="fix only=KVF001", {ENV}="fix skip=KVF001" or {ENV}=off.'
            )
            return
        arrival.activate(choice)
    except Exception as error:  # noqa: BLE001
        notice.fault("kvfix.activation.load", error)


def _hand_over(choice: Choice) -> None:
    _set(ENV, str(choice))
    allowed = os.environ.get(_ALLOWED_PLUGINS)
    if allowed is not None:
        _set(_ALLOWED_PLUGINS, _with(allowed, "kvfix"))
    _set(_RAY_PREFIXES, _with(os.environ.get(_RAY_PREFIXES, ""), ENV))


def _set(name: str, value: str) -> None:
    _before.setdefault(name, os.environ.get(name))
    os.environ[name] = value


def _with(listed: str, item: str) -> str:
    """A comma-separated list with `item` in it once."""
    items = [part for part in (part.strip() for part in listed.split(",")) if part]
    return ",".join(items if item in items else [*items, item])
