"""Import hooks: kvfix applies a fix after the import of its target's module, or at once if it is imported already.

`wrapt.register_post_import_hook` has three problems: the import of wrapt takes three times what `apply()` may take, an
exception in a hook breaks the import, and a hook cannot be removed.
"""

from __future__ import annotations

import sys
from _thread import get_ident

from kvfix import engine_log
from kvfix.session import session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from kvfix.config import Config

#: Top-level packages with fixed functions. The first import from one of them loads the fixes.
PACKAGES = ("lmcache", "vllm")
#: Modules that the connector events wrap, in modes that have them: the factory of connectors, and the scheduler.
WATCHED = ("vllm.distributed.kv_transfer.kv_connector.factory", "vllm.v1.core.sched.scheduler")


class Finder:
    """A meta path finder that lets the other finders find a module, and applies fixes after its execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # The import system asks for thousands of modules: all except those of PACKAGES return here.
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


_finder = Finder()


def activate(config: Config) -> None:
    """Activate this configuration in this process. Remove fixes that only an earlier configuration has."""
    session.config = config
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if any(package in sys.modules for package in PACKAGES):
        engine_log.guarded("kvfix.apply", _settle_imported)


def deactivate() -> None:
    session.config = None
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    if "kvfix.applying" in sys.modules:
        from kvfix import applying

        engine_log.guarded("kvfix.revert", applying.remove_all)
    if "kvfix.connector_events" in sys.modules:
        from kvfix import connector_events

        engine_log.guarded("kvfix.revert", connector_events.remove_all)


def _settle_imported() -> None:
    found = [sys.modules[name] for name in sorted(_all_modules() - session.executing) if name in sys.modules]
    _settle({each: not getattr(each.__spec__, "_initializing", False) for each in found})


def _settle(modules: dict[ModuleType, bool]) -> None:
    """modules: {module: whether its import has ended}."""
    from kvfix import applying

    for module, complete in modules.items():
        engine_log.guarded(f"applying to {module.__name__}", applying.settle, module, complete)
        if complete and module.__name__ in WATCHED:
            engine_log.guarded(f"connector events of {module.__name__}", _watch, module)
    applying.log_applied()


def _watch(module: ModuleType) -> None:
    """Add the connector events, or remove those of an earlier configuration."""
    if (session.config is not None and session.config.watches) or "kvfix.connector_events" in sys.modules:
        from kvfix import connector_events

        connector_events.settle(module)


def _is_target(name: str) -> bool:
    if session.modules is None:  # cached: LMCache often tries to import modules that do not exist
        session.modules = engine_log.guarded("the fixes", _all_modules) or frozenset()
    return name in session.modules


def _all_modules() -> frozenset[str]:
    from kvfix import catalogue

    return frozenset(catalogue.modules_of_fixes()).union(WATCHED)


def _settle_when_executed(spec: ModuleSpec) -> None:
    """Replace `exec_module` of this one loader. The loader object, which tools inspect, stays the same."""
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if loader is None or execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)  # a reload must not run this function a second time
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
            f"{spec.name} is loaded by {type(loader).__name__}, which kvfix cannot wrap ({error}): its fixes are "
            "not applied. Call kvfix.apply() once more after it has been imported."
        )
