"""What a fix is, and the catalogue that finds them.

A fix is one file in `fixes/`. Its name says code and slug; its docstring tells the bug in fixed sections; its
`FIX` says which functions of which distribution are corrected, in which releases they are broken, how a probe
shows the bug on the installed function, and the correction. Nothing lists the files: a new one is found.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvfix import notice
from kvfix.choice import code_and_slug, known_fixes

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

#: Sections of a fix's docstring, in this order. `Fix.section` and the documentation read them.
SECTIONS = ("Symptom", "Cause", "Fix", "Releases", "Upstream", "Remove when")
#: Of a bug that cannot be mended from outside.
SECTIONS_UNMENDED = ("Symptom", "Cause", "Workaround", "Releases", "Upstream", "Remove when")


@dataclass(frozen=True)
class Patch:
    """One function of one distribution, known to be wrong in some of its releases, and its correction.

    dist, module, function: where it is, e.g. "lmcache", "lmcache.integration.vllm.vllm_v1_adapter",
        "LMCacheConnectorV1Impl.get_num_new_matched_tokens".
    broken: the releases whose code was seen to be wrong (PEP 440 specifiers). It decides through the
        fingerprints of these releases (fingerprints.json), never by the version number installed.
    shows_bug: (function, module) -> True where the bug shows on stub objects, False where the function is right.
        Asked for code that no release has. May raise: then it is not known. Milliseconds.
    correct: (module) -> decorator of the function. Called when the module has arrived and the fix applies. What the
        decorated function does of its own must not raise (kvfix.correction sees to that), nor change arguments.
        None: it cannot be corrected from outside, and the patch only tells whether the bug is there.
    """

    dist: str
    module: str
    function: str
    broken: str
    shows_bug: Callable[[Callable[..., Any], ModuleType], bool]
    correct: Callable[[ModuleType], Callable[..., Any]] | None
    #: Where the correction is carried out, not where the bug is: it does nothing unless another patch of the fix asks
    #: for it, and what is there says nothing about the bug. Stands behind those of its module, and goes with them.
    helper: bool = False

    @property
    def target(self) -> str:
        return f"{self.module}:{self.function}"


@dataclass(frozen=True)
class Fix:
    """A file in `fixes/`: `FIX = Fix(__name__, __doc__, patches=(Patch(...),))`."""

    module_name: str
    doc: str | None
    patches: tuple[Patch, ...]
    #: Not part of the default choice: it must be named in `only=`. The docstring says why.
    opt_in: bool = field(default=False, kw_only=True)
    #: () -> why the bug does no harm here although the code is wrong, "" if it may. For one that cannot be mended.
    harmless: Callable[[], str] = field(default=str, kw_only=True)

    @property
    def code(self) -> str:
        return code_and_slug(self.module_name.rpartition(".")[2])[0]

    @property
    def slug(self) -> str:
        return code_and_slug(self.module_name.rpartition(".")[2])[1]

    @property
    def mends(self) -> bool:
        """Whether there is anything to put in place."""
        return any(patch.correct is not None for patch in self.patches)

    @property
    def sections(self) -> tuple[str, ...]:
        return SECTIONS if self.mends else SECTIONS_UNMENDED

    @property
    def title(self) -> str:
        return (self.doc or "").strip().partition("\n")[0]

    def section(self, name: str) -> str:
        """Text under `## name` of the docstring; "" if there is none."""
        _, found, rest = (self.doc or "").partition(f"\n## {name}\n")
        return rest.partition("\n## ")[0].strip() if found else ""


#: What to do where no fix is found.
ANEW = "Install kvfix again, from its wheel or its checkout."


@functools.lru_cache(maxsize=1)
def catalogue() -> tuple[Fix, ...]:
    """Every fix, in the order of its code. One that cannot be loaded is left out, with a warning."""
    fixes = []
    for code, slug in known_fixes().items():
        name = f"kvfix.fixes.{code.lower()}_{slug.replace('-', '_')}"
        try:
            fixes.append(import_module(name).FIX)
        except Exception as error:  # noqa: BLE001
            notice.fault(f"loading {name}", error)
    if not fixes:
        notice.warn(f"this installation of kvfix is broken and fixes nothing: no fix beside {__file__}. {ANEW}")
    return tuple(fixes)


def find(name: str) -> Fix | None:
    """The fix of this code or slug; None if there is none."""
    return next((fix for fix in catalogue() if name.upper() == fix.code or name.lower() == fix.slug), None)
