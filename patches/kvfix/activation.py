"""Brings one configuration to every process.

vLLM starts EngineCore and its workers as other processes, most often by spawn, without the parent's patches. So
`apply()` writes the configuration into the environment. vLLM's plugin entry point (`load`) reads it in each process,
before it creates scheduler, worker and connector (vllm/v1/engine/core.py, v1/worker/worker_base.py).
"""

from __future__ import annotations

import os

from kvfix import engine_log, import_hooks
from kvfix.config import Config
from kvfix.session import session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvfix.fix_status import FixRow

ENV = "KVFIX"
#: If this list is set, vLLM skips every plugin that is not in it, without a message (vllm/plugins/__init__.py).
_ALLOWED_PLUGINS = "VLLM_PLUGINS"
#: Ray workers get only variables with a prefix from vLLM's own list and from this one (vllm/ray/ray_env.py).
_RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"


def apply(
    mode: str = "fix",
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    layers: bool = False,
    plus: Iterable[str] | None = None,
    audit: float = 0,
) -> None:
    """Fix the known bugs of the installed vLLM and LMCache, here and in every process started from here.

    Call it before you launch vLLM. You may call it again: the last configuration holds. It imports no heavy modules:
    kvfix applies a fix after the import of the fixed module.

    mode: `fix`: the fixes. `observe`: also a flight recorder of the connector hooks. `check`: also the rules after each
    hook, with a log line and a dump for each violation. `strict`: also raises `kvfix.connector_events.Violation`.
    only, skip, plus: codes (`KVF001`) or slugs of fixes. Default: all that are not opt-in. only: these and no others.
    skip: all but these. plus: these opt-in fixes too.
    layers: also count the hooks that run once per layer and step, and record which of them hangs; not in mode `fix`.
    audit: the fraction of hits that vLLM computes, to compare them with the cache; in `check` and `strict`.
    Raises ValueError for an unknown mode or fix, and nothing else.
    KVFIX=off in the environment keeps kvfix off, even if a program calls this function.
    """
    config = Config(mode, only, skip, layers, plus, audit)
    text = os.environ.get(ENV)
    if Config.is_off(text):
        engine_log.warning(f"{ENV}=off is set in the environment: kvfix.apply() does nothing")
        return
    try:
        Config.parse(text or str(config))
    except ValueError as error:
        engine_log.warning(f"the environment has {ENV}={text!r:.200}: {error}. kvfix.apply() uses {config} instead")
    _set(ENV, str(config))
    allowed = os.environ.get(_ALLOWED_PLUGINS)
    if allowed is not None:
        _set(_ALLOWED_PLUGINS, _with(allowed, "kvfix"))
    _set(_RAY_PREFIXES, _with(os.environ.get(_RAY_PREFIXES, ""), ENV))
    import_hooks.activate(config)


def revert() -> None:
    """Remove every fix from this process, and the configuration from its environment. Idempotent.

    Running child processes keep their fixes.
    """
    for name, value in session.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    session.environment.clear()
    os.environ.pop(ENV, None)
    import_hooks.deactivate()


def status() -> list[FixRow]:
    """One row for each fix and distribution: its state in this process, and why. Imports neither vLLM nor LMCache."""
    from kvfix import fix_status

    return fix_status.rows()


def load() -> None:
    """Entry point of `vllm.general_plugins` and of `kvfix run`: activate the configuration of the environment, if any.

    vLLM calls it unguarded in each of its processes, so it never raises.
    """
    try:
        text = os.environ.get(ENV)
        if not text or Config.is_off(text):
            return
        try:
            config = Config.parse(text)
        except ValueError as error:
            engine_log.warning(
                f"the environment has {ENV}={text!r:.200}: {error}. Nothing is patched. "
                f'Write {ENV}=fix, {ENV}="fix only=KVF001", {ENV}="fix skip=KVF001" or {ENV}=off.'
            )
            return
        import_hooks.activate(config)
    except Exception as error:  # noqa: BLE001
        engine_log.fault("kvfix.activation.load", error)


def _set(name: str, value: str) -> None:
    session.environment.setdefault(name, os.environ.get(name))
    os.environ[name] = value


def _with(listed: str, item: str) -> str:
    """A comma-separated list with `item` in it once."""
    items = [part for part in (part.strip() for part in listed.split(",")) if part]
    return ",".join(items if item in items else [*items, item])
