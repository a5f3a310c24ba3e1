"""Pass one configuration to every process of an engine, and apply fixes there after the import of the fixed modules.

vLLM starts EngineCore and its workers as new processes. A spawned process does not have the parent's patches. So
`apply()` writes the configuration into the environment. `load`, a plugin of vLLM, reads the configuration in each
process, before vLLM creates scheduler, worker and connector (vllm/v1/engine/core.py, v1/worker/worker_base.py).

A finder on the meta path applies a fix after the import of the fixed module. `activate` also applies fixes to modules
that are already imported. kvfix does not use wrapt, because wrapt imports slowly and its hooks can break an import.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident

from kvfix import engine_log
from kvfix.config import Config
from kvfix.session import session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from kvfix.catalogue import FixRow

ENV = "KVFIX"
#: vLLM silently skips plugins that this environment variable, if set, does not list (vllm/plugins/__init__.py).
_ALLOWED_PLUGINS = "VLLM_PLUGINS"
#: A list of prefixes. vLLM copies environment variables with these prefixes to Ray workers (vllm/ray/ray_env.py).
_RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
#: Top-level packages with functions to fix. The first import from one of these packages loads the fixes.
PACKAGES = ("lmcache", "vllm")
#: In every mode except `fix`, kvfix wraps functions of these modules to record connector events.
WATCHED = ("vllm.distributed.kv_transfer.kv_connector.factory", "vllm.v1.core.sched.scheduler")


def apply(
    mode: str = "fix",
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    layers: bool = False,
    plus: Iterable[str] | None = None,
    audit: float = 0,
) -> None:
    """Fix the known bugs of the installed vLLM and LMCache, in this process and in its child processes.

    Call this function before you launch vLLM. If you call it again, the new configuration replaces the old one. The
    function imports no heavy module, because kvfix applies a fix later, when the engine imports the fixed module.

    mode: `fix` applies fixes. `observe` also records hook calls. `check` also checks rules at each hook, and
    reports violations in the log and in files. `strict` also raises `kvfix.connector_events.Violation`.
    only, skip, plus: codes (`KVF001`) or slugs of fixes. By default, kvfix applies all fixes that are not opt-in.
    only: apply no other fixes. skip: do not apply these fixes. plus: apply these opt-in fixes too.
    layers: also count the hooks that run once per layer and step, and record if a layer hook hangs. Not in mode `fix`.
    audit: the fraction of hits that vLLM computes instead of loading, to check the cache. Only in `check` and `strict`.
    Raises ValueError for an unknown mode or fix, and for wrong `layers` or `audit`. Raises no other exception.
    If KVFIX=off is in the environment, this function applies nothing.
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
    activate(config)


def revert() -> None:
    """Remove all fixes and the configuration from this process. Child processes keep their fixes."""
    for name, value in session.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    session.environment.clear()
    os.environ.pop(ENV, None)
    session.config = None
    if Finder in sys.meta_path:
        sys.meta_path.remove(Finder)
    for name in ("kvfix.applying", "kvfix.connector_events"):
        if name in sys.modules:
            engine_log.guarded("kvfix.revert", sys.modules[name].remove_all)


def status() -> list[FixRow]:
    """Return one row for each fix and distribution, with the fix's state in this process and the state's reason."""
    from kvfix import catalogue

    return catalogue.rows()


def load() -> None:
    """Activate the configuration in the environment, if any. vLLM's plugin loader and `kvfix run` call this function.

    vLLM calls this function in each of its processes, and does not catch exceptions. So this function never raises.
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
        activate(config)
    except Exception as error:  # noqa: BLE001
        engine_log.fault("kvfix.activation.load", error)


def _set(name: str, value: str) -> None:
    session.environment.setdefault(name, os.environ.get(name))
    os.environ[name] = value


def _with(listed: str, item: str) -> str:
    items = [part for part in (part.strip() for part in listed.split(",")) if part]
    return ",".join(items if item in items else [*items, item])


class Finder:
    """A meta path finder that applies fixes after a module has run. Other finders find the module."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        # Python calls this function for thousands of modules. Return at once for a module outside PACKAGES.
        finding = get_ident(), name
        if name.partition(".")[0] not in PACKAGES or finding in session.finding or not _is_target(name):
            return None
        session.finding.add(finding)
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = find(name, path, target) if find is not None else None
                if spec is not None:
                    _settle_when_executed(spec)
                    return spec
            return None
        finally:
            session.finding.discard(finding)


def activate(config: Config) -> None:
    """Activate this configuration in this process. Remove applied fixes that the configuration does not want."""
    session.config = config
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
    if any(package in sys.modules for package in PACKAGES):
        engine_log.guarded("kvfix.apply", _settle_imported)


def _settle_imported() -> None:
    found = [sys.modules[name] for name in sorted(_all_modules() - session.executing) if name in sys.modules]
    _settle({each: not getattr(each.__spec__, "_initializing", False) for each in found})


def _settle(modules: dict[ModuleType, bool]) -> None:
    """Apply fixes and recording wrappers to the modules. modules: {module: True if its import has ended}."""
    from kvfix import applying

    for module, complete in modules.items():
        engine_log.guarded(f"applying to {module.__name__}", applying.settle, module, complete)
        if complete and module.__name__ in WATCHED:
            engine_log.guarded(f"connector events of {module.__name__}", _watch, module)
    applying.log_applied()


def _watch(module: ModuleType) -> None:
    if session.mode != "fix" or "kvfix.connector_events" in sys.modules:
        from kvfix import connector_events

        connector_events.settle(module)


def _is_target(name: str) -> bool:
    if session.modules is None:  # cached, because LMCache often tries to import modules that do not exist
        session.modules = engine_log.guarded("the fixes", _all_modules) or frozenset()
    return name in session.modules


def _all_modules() -> frozenset[str]:
    from kvfix import catalogue

    return frozenset(catalogue.modules_of_fixes()).union(WATCHED)


def _settle_when_executed(spec: ModuleSpec) -> None:
    """Make the loader apply fixes after the module has run. Other tools read `spec.loader`, so the loader stays."""
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if loader is None or execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)  # so that a reload does not run this function again
        session.executing.add(module.__name__)
        try:
            execute(module)
        finally:
            session.executing.discard(module.__name__)
        if session.config is not None:
            engine_log.guarded(f"applying to {module.__name__}", _settle, {module: True})

    try:
        loader.exec_module = exec_module  # type: ignore[method-assign]
    except AttributeError as error:
        engine_log.warning(
            f"kvfix cannot wrap {type(loader).__name__}, which loads {spec.name} ({error}), and applies no fix there. "
            f"Call kvfix.apply() once more after the import of {spec.name}."
        )
