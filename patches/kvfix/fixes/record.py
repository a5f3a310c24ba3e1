"""A fix: the record of one bug.

A fix is one file in a folder of `fixes/`. The name of the file has code and slug. The docstring describes the bug in
fixed sections. `FIX` has the fixed functions, the broken releases, a probe that shows the bug on the installed
function, and all other facts. Every list of kvfix is a query over these records.
"""

import functools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from kvfix.fixes import code_and_slug, stubs

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]
Probe = Callable[[Function, ModuleType], bool]
Fixing = Callable[[ModuleType], Wrapper]

#: Sections of a fix's docstring, in this order. `Fix.section` and the documentation read them.
SECTIONS = ("Symptom", "Cause", "Fix")
#: Sections for a bug that cannot be fixed from outside.
SECTIONS_UNFIXABLE = ("Symptom", "Cause", "Workaround")
#: An opt-in fix has this section too: what happens while only some of the engines have the fix.
MIXED_ROLL_OUT = "Mixed roll-out"
#: The list at the end of the docstring, in this order.
FACTS = ("Releases", "Upstream", "Remove when")
_END = re.compile(rf"^(?:## |- (?:{'|'.join(FACTS)}): )", re.MULTILINE)

#: The requests for which `kvfix attach` applies a fix to a running engine. Most fixes apply to all requests. A fix that
#: needs its own notes or changes from the start of a request skips the requests that began before (`session.before`).
#: `kvfix attach` does not apply a fix that acts only while the engine starts. It also applies no fix that makes the
#: engine read the cache in another way than it was written.
ALL_REQUESTS, NEW_REQUESTS, AT_START = "all requests", "new requests", "at start"


@dataclass(frozen=True)
class Target:
    """One function of one distribution that is wrong in some releases, and its fix.

    dist, module, function: e.g. "lmcache", "lmcache.integration.vllm.vllm_v1_adapter",
        "LMCacheConnectorV1Impl.get_num_new_matched_tokens".
    broken: the releases whose code is wrong (PEP 440 specifiers). kvfix compares the fingerprints of these releases
        (fingerprints.json) with the installed function, never the installed version number.
    probe: (function, module) -> True if the bug shows on stub objects, False if the function is right. Runs only on
        code that no release has, in milliseconds. If it raises, the fix is refused.
    fix: (module) -> wrapper of the function (kvfix.wrapping). Called after the import of the module if the fix applies.
        If it is None, the target only shows whether the bug is there. A helper in the same module fixes the bug, or the
        bug cannot be fixed.
    place: order among the wrappers of one function. The wrapper with the lowest place is next to the function.
    helper: the fix needs this function, but the bug is not in it. Its code does not show the bug.
    copy: the copy of the code that the function belongs to. If it is "", every copy needs the function for its fix.
        The functions of one copy are wrapped together or not at all (kvfix.applicability).
    """

    dist: str
    module: str
    function: str
    broken: str
    probe: Probe
    fix: Fixing | None
    place: int = 0
    helper: bool = False
    copy: str = ""

    @property
    def name(self) -> str:
        return f"{self.module}:{self.function}"

    @property
    def can_be_probed(self) -> bool:
        """True if the behaviour probe can judge code that no release has."""
        return self.probe.__name__ != "cannot_tell"


class Owner:
    """A class or a module with fixed functions: `SCHEDULER.schedule(broken=..., probe=..., fix=...)` is a target.

    copy: the name of this copy, if the same code is in several places and each is fixed by itself.
    """

    def __init__(self, dist: str, module: str, name: str = "", copy: str = "") -> None:
        self.dist = dist
        self.module = module
        self.name = name
        self.copy = copy

    def target(self, function: str, **more: Any) -> Target:
        """Return the target for this function.

        more: the other fields of `Target`. Without `probe`, no stub can show the bug.
        """
        full_name = f"{self.name}.{function}" if self.name else function
        return Target(self.dist, self.module, full_name, **{"copy": self.copy, "probe": stubs.cannot_tell, **more})

    def __getattr__(self, function: str) -> Callable[..., Target]:
        if function.startswith("__"):
            raise AttributeError(function)
        return functools.partial(self.target, function)


#: `no_patch` of a bug that can be abused.
PRIVATE = {"vllm": "it can be abused: vLLM's security channel comes before a public patch (SECURITY.md)"}

#: Effects of a bug on the user, the worst first. "lost hits": more computation, right answers.
EFFECTS = ("wrong output", "crash", "hang", "leak", "lost hits")


@dataclass(frozen=True, eq=False)
class Fix:
    """The record of a bug: `FIX = Fix(__name__, targets=(...), ...)`.

    doc: the docstring of the module, if it is not given.
    effect: what the bug does to the user, one of EFFECTS. A bug with several effects has the worst of them.
    evidence: {code of a rule or finding (KVR, KVD): regular expression for its message}. A match points to this bug.
    scenarios: slugs of the scenarios that show the bug in the lab. The default is the slug of the fix. If no scenario
        shows the bug, `proof` names the test and the reason.
    changes_healthy: connectors with which the fix also changes healthy schedules (they violate no rule without it).
    no_patch: {dist: why there is no patch for upstream}, if the newest release has the bug.
    opt_in: not in the default set: the user must name it (`plus`). A default fix acts within one engine or server. It
        changes no key, no stored layout, no message to a peer and no scheduling policy.
    attaches: ALL_REQUESTS, NEW_REQUESTS or AT_START.
    on_fault: the answer if the code of the fix raises. "original": the function's own answer, as released. "closed": an
    answer that cannot give wrong KV. The load is reported as failed, the store is skipped, or nothing is promised. The
    default is "closed" if a decorated function of the fix has an `on_fault`.
    let_go: called after the wrappers were removed, for a fix that has kept objects of the engine.
    harmless: () -> the reason that the bug does no harm in this process, or "" if it can do harm. For a bug that cannot
    be fixed.
    """

    module_name: str
    doc: str | None = None
    targets: tuple[Target, ...] = ()
    effect: str = field(kw_only=True)
    evidence: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    scenarios: tuple[str, ...] = field(default=(), kw_only=True)
    proof: str = field(default="", kw_only=True)
    changes_healthy: tuple[str, ...] = field(default=(), kw_only=True)
    no_patch: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    opt_in: bool = field(default=False, kw_only=True)
    attaches: str = field(default=ALL_REQUESTS, kw_only=True)
    on_fault: str = field(default="", kw_only=True)
    let_go: Callable[[], None] = field(default=lambda: None, kw_only=True)
    harmless: Callable[[], str] = field(default=str, kw_only=True)

    def __post_init__(self) -> None:
        if self.doc is None:
            object.__setattr__(self, "doc", sys.modules[self.module_name].__doc__)
        if self.fixable and not self.scenarios and not self.proof:
            object.__setattr__(self, "scenarios", (self.slug,))
        if not self.on_fault:
            is_closed = any(getattr(target.fix, "fails_closed", False) for target in self.targets)
            object.__setattr__(self, "on_fault", "closed" if is_closed else "original")

    @property
    def code(self) -> str:
        return code_and_slug(self.module_name)[0]

    @property
    def slug(self) -> str:
        return code_and_slug(self.module_name)[1]

    @property
    def fixable(self) -> bool:
        """True if any target has a fix."""
        return any(target.fix is not None for target in self.targets)

    @property
    def groups(self) -> list[tuple[str, tuple[Target, ...]]]:
        """(copy, functions that are wrapped together or not at all) of each copy of the code."""
        copies = dict.fromkeys(target.copy for target in self.targets if target.copy) or [""]
        return [(copy, tuple(each for each in self.targets if each.copy in ("", copy))) for copy in copies]

    @property
    def dists(self) -> tuple[str, ...]:
        """Distributions that have the bug, without those that have only helpers."""
        return tuple(dict.fromkeys(target.dist for target in self.targets if not target.helper))

    @property
    def sections(self) -> tuple[str, ...]:
        found = SECTIONS if self.fixable else SECTIONS_UNFIXABLE
        return (*found, MIXED_ROLL_OUT, *FACTS) if self.opt_in else (*found, *FACTS)

    @property
    def title(self) -> str:
        return (self.doc or "").strip().partition("\n")[0]

    def section(self, name: str) -> str:
        """Text under `## name` of the docstring, or of `- name:` in the list at its end; "" if there is none."""
        _, found, rest = (self.doc or "").partition(f"\n- {name}: " if name in FACTS else f"\n## {name}\n")
        text = _END.split(rest, maxsplit=1)[0].strip() if found else ""
        return " ".join(text.split()) if name in FACTS else text
