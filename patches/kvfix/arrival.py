"""Post-import hooks: a fix is put in place when the module it corrects has been executed, or now if it has.

`wrapt.register_post_import_hook` would do, but importing wrapt takes three times what `apply()` may take, an
exception of its hooks breaks the import that met them, and what is registered cannot be taken back.
"""

from __future__ import annotations

import sys
from _thread import get_ident

from kvfix import notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from kvfix.choice import Choice

#: Top-level packages of the patient. The catalogue of fixes is loaded when the first module of one of them arrives.
PATIENT = ("lmcache", "vllm")
#: What the probes hold on to, in modes that have them: who makes connectors, and who schedules.
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
PROBED = (FACTORY, "vllm.v1.core.sched.scheduler")


class Arrivals:
    """A meta path finder that finds nothing itself: it lets the others find, and is told when the module is there."""

    def __init__(self) -> None:
        #: Names that a thread has asked the others for.
        self._finding: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # The import system asks for thousands of modules: anything but the patient's leaves here.
        finding = get_ident(), name
        if name.partition(".")[0] not in PATIENT or finding in self._finding or not _is_target(name):
            return None
        self._finding.add(finding)
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = find(name, path, target) if find is not None else None
                if spec is not None:
                    _tell_when_executed(spec)
                    return spec
            return None
        finally:
            self._finding.discard(finding)


_finder = Arrivals()
_choice: Choice | None = None
#: Modules with something to correct; None before anybody has asked.
_targets: frozenset[str] | None = None
#: Targets that are being executed right now and will be settled when that is done.
_executing: set[str] = set()


def activate(choice: Choice) -> None:
    """From now on the fixes of this choice hold in this process; those of an earlier choice that it lacks go."""
    global _choice
    _choice = choice
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if any(package in sys.modules for package in PATIENT):
        notice.guarded("kvfix.apply", _settle_arrived)


def deactivate() -> None:
    """The opposite of `activate`."""
    global _choice
    _choice = None
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    if "kvfix.patching" in sys.modules:
        from kvfix import patching

        notice.guarded("kvfix.revert", patching.remove_all)
    if "kvfix.probes" in sys.modules:
        from kvfix import probes

        notice.guarded("kvfix.revert", probes.remove_all)


def choice() -> Choice | None:
    """The choice that holds in this process; None: kvfix does nothing here."""
    return _choice


def _settle_arrived() -> None:
    from kvfix import patching

    for name in sorted(_all_targets()):
        module = sys.modules.get(name)
        if module is not None and name not in _executing:
            half_imported = getattr(getattr(module, "__spec__", None), "_initializing", False)
            patching.settle(module, _choice, complete=not half_imported)
            if name in PROBED and not half_imported:
                notice.guarded(f"probes of {name}", _probe, module)


def _settle(module: ModuleType) -> None:
    from kvfix import patching

    patching.settle(module, _choice, complete=True)
    if module.__name__ in PROBED:
        _probe(module)


def _probe(module: ModuleType) -> None:
    """Probes in, or out where an earlier choice had them."""
    if (_choice is not None and _choice.probes) or "kvfix.probes" in sys.modules:
        from kvfix import probes

        probes.settle(module, _choice)


def _is_target(name: str) -> bool:
    global _targets
    if _targets is None:  # LMCache asks for modules that are not there at every start of a connector, and more often
        _targets = notice.guarded("the catalogue of fixes", _all_targets) or frozenset()
    return name in _targets


def _all_targets() -> frozenset[str]:
    from kvfix import fix

    return frozenset(patch.module for found in fix.catalogue() for patch in found.patches if patch.correct).union(
        PROBED
    )


def _tell_when_executed(spec: ModuleSpec) -> None:
    """Replace `exec_module` on this one loader; the loader itself, which tools inspect, stays what it was."""
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if loader is None or execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)  # once: a reload must not find two of us
        _executing.add(module.__name__)
        try:
            execute(module)
        finally:
            _executing.discard(module.__name__)
        if _choice is not None:
            notice.guarded(f"patching {module.__name__}", _settle, module)

    try:
        loader.exec_module = exec_module  # type: ignore[method-assign]
    except AttributeError as error:
        notice.warn(
            f"{spec.name} is loaded by {type(loader).__name__}, which cannot be watched ({error}): its fixes are "
            "not applied. Call kvfix.apply() once more after it has been imported."
        )
