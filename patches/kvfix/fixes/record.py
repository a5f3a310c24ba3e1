"""A fix: the record of one bug.

A fix is one file in a folder of `fixes/`. The name of the file has the code and the slug. The docstring describes the
bug in fixed sections: `Symptom: EngineCore dies ...`. `FIX` has the fixed functions, the broken releases, a probe that
shows the bug on the installed function, and all other facts. Every list of kvfix is a query over these records.
"""

import functools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

from kvfix import applicability
from kvfix.fixes import code_and_slug

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]
Probe = Callable[[Function, ModuleType], bool]
Fixing = Callable[[ModuleType], Wrapper]

#: Sections of a fix's docstring, in this order. Each name begins a paragraph. In `Fix.doc` each name is a heading.
SECTIONS = ("Symptom", "Cause", "Fix")
#: Sections for a bug that cannot be fixed from outside.
SECTIONS_UNFIXABLE = ("Symptom", "Cause", "Workaround")
#: An opt-in fix has this section too: what happens while only some of the engines have the fix.
MIXED_ROLL_OUT = "Mixed roll-out"
#: The list at the end of the docstring, in this order. The docstring may leave out a fact that the record has.
FACTS = ("Releases", "Upstream", "Remove when")
_PART = re.compile(rf"^(?:- )?({'|'.join((*SECTIONS, 'Workaround', MIXED_ROLL_OUT, *FACTS))}):\s", re.MULTILINE)
_NAMES = {"lmcache": "LMCache", "vllm": "vLLM"}

#: The requests to which `kvfix attach` applies a fix. ALL_REQUESTS: most fixes. NEW_REQUESTS: the fix must see a
#: request from its start, and skips requests that began before (`session.before`). AT_START: no requests,
#: because the fix acts only while the engine starts, or would read cached KV in another way than it was written.
ALL_REQUESTS, NEW_REQUESTS, AT_START = "all requests", "new requests", "at start"


@dataclass(frozen=True)
class Target:
    """One function of one distribution that is wrong in some releases, and its fix.

    dist, module, function: e.g. "lmcache", "lmcache.integration.vllm.vllm_v1_adapter",
        "LMCacheConnectorV1Impl.get_num_new_matched_tokens".
    broken: the releases whose code is wrong (PEP 440 specifiers). kvfix compares the fingerprints of these releases
        (fingerprints.json) with the installed function, never the installed version number.
    probe: (function, module) -> True if the bug shows on stub objects, False if the function is right. kvfix runs it
        only on code that no release has. It takes milliseconds. If it raises or is None, kvfix refuses the fix.
    fix: (module) -> wrapper of the function (kvfix.wrapping). kvfix calls it after the import of the module, if the fix
        applies. With None, the target only shows if the bug is there: a helper in the module fixes it, or nothing can.
    order: position of its wrapper around the function. The wrapper with the lowest order is next to the function.
    helper: the fix needs this function, but the bug is not in it. Its code does not show the bug.
    copy: the name of the copy that has the function, if the same code is in several places. "": every copy needs it.
        kvfix wraps the functions of one copy together or not at all (kvfix.applicability).
    """

    dist: str
    module: str
    function: str
    broken: str
    probe: Probe | None
    fix: Fixing | None
    order: int = 0
    helper: bool = False
    copy: str = ""

    @property
    def name(self) -> str:
        return f"{self.module}:{self.function}"


class Owner:
    """A class or a module with fixed functions: `SCHEDULER.schedule(broken=..., probe=..., fix=...)` is a target."""

    def __init__(self, dist: str, module: str, name: str = "", copy: str = "") -> None:
        self.dist = dist
        self.module = module
        self.name = name
        self.copy = copy

    def target(self, function: str, **more: Any) -> Target:
        """Return the target for this function. more: fields of `Target`. Omit `probe` if no stub can show the bug."""
        full_name = f"{self.name}.{function}" if self.name else function
        return Target(self.dist, self.module, full_name, **{"copy": self.copy, "probe": None, **more})

    @property
    def imported(self) -> Any:
        """The imported module, for the code of a fix."""
        return sys.modules[self.module]

    def __getattr__(self, function: str) -> Callable[..., Target]:
        if function.startswith("__"):
            raise AttributeError(function)
        return functools.partial(self.target, function)


#: `no_patch` of a bug that can be abused.
PRIVATE = {"vllm": "it can be abused: vLLM's security channel comes before a public patch (SECURITY.md)"}

#: Effects of a bug on the user, the worst first. "lost hits": more computation, but right answers.
EFFECTS = ("wrong output", "crash", "hang", "leak", "lost hits")


class Fix:
    """The record of a bug: `FIX = Fix(LMCACHE_V1.get_finished(...), effect="leak")`.

    effect: the worst effect of the bug on the user, one of EFFECTS.
    evidence: {code of a rule or finding (KVR, KVD): regular expression for its message}. A match points to this bug.
    scenarios: slugs of the scenarios that show the bug in the lab. The default is the slug of the fix. If no scenario
        shows the bug, `proof` names the test and the reason.
    changes_healthy: connectors with which the fix also changes schedules that violate no rule without the fix.
    no_patch: {dist: why there is no patch for upstream}, if the newest release has the bug.
    opt_in: True if the user must name the fix (`plus`). A default fix acts within one engine or server, and changes no
        key, no stored layout, no message to a peer and no scheduling policy.
    attaches: ALL_REQUESTS, NEW_REQUESTS or AT_START.
    on_fault: the answer if the code of the fix raises. "original": as without the fix. "closed": no wrong KV, but a
    failed load, a skipped store, 0 promised tokens. The default is "closed" if a function of the fix has an `on_fault`.
    let_go: for a fix that keeps objects of the engine. kvfix calls it after it has removed the wrappers.
    harmless: for an unfixable bug, () -> the reason why the bug does no harm in this process; "" if it can do harm.
    """

    def __init__(
        self,
        *targets: Target,
        effect: str,
        evidence: Mapping[str, str] = MappingProxyType({}),
        scenarios: tuple[str, ...] = (),
        proof: str = "",
        changes_healthy: tuple[str, ...] = (),
        no_patch: Mapping[str, str] = MappingProxyType({}),
        opt_in: bool = False,
        attaches: str = ALL_REQUESTS,
        on_fault: str = "",
        let_go: Callable[[], None] = lambda: None,
        harmless: Callable[[], str] = str,
    ) -> None:
        module = sys._getframe(1).f_globals  # as collections.namedtuple finds its module
        self.module_name: str = module["__name__"]
        self.code, self.slug = code_and_slug(self.module_name)
        self.docstring: str = module["__doc__"] or ""
        self.title = self.docstring.strip().partition("\n")[0]
        self.targets = targets
        self.fixable = any(target.fix is not None for target in targets)
        self.effect = effect
        self.evidence = evidence
        self.scenarios = scenarios or ((self.slug,) if self.fixable and not proof else ())
        self.proof = proof
        self.changes_healthy = changes_healthy
        self.no_patch = no_patch
        self.opt_in = opt_in
        self.attaches = attaches
        is_closed = any(getattr(target.fix, "fails_closed", False) for target in targets)
        self.on_fault = on_fault or ("closed" if is_closed else "original")
        self.let_go = let_go
        self.harmless = harmless

    @property
    def groups(self) -> list[tuple[str, tuple[Target, ...]]]:
        """Return (copy, functions that are wrapped together or not at all) for each copy of the code."""
        copies = dict.fromkeys(target.copy for target in self.targets if target.copy) or [""]
        return [(copy, tuple(each for each in self.targets if each.copy in ("", copy))) for copy in copies]

    @property
    def dists(self) -> tuple[str, ...]:
        """Return the distributions that have the bug, without those that have only helpers."""
        return tuple(dict.fromkeys(target.dist for target in self.targets if not target.helper))

    @property
    def sections(self) -> tuple[str, ...]:
        found = SECTIONS if self.fixable else SECTIONS_UNFIXABLE
        return (*found, MIXED_ROLL_OUT, *FACTS) if self.opt_in else (*found, *FACTS)

    @functools.cached_property
    def _texts(self) -> dict[str, str]:
        """{section or fact: its text}, including the facts that the docstring leaves out."""
        _, *parts = _PART.split(self.docstring)
        texts = {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}
        facts = {name: texts.pop(name, "") or self._known(name) for name in FACTS}
        return texts | facts

    @property
    def doc(self) -> str:
        """The docstring in markdown, with all facts."""
        from textwrap import TextWrapper

        wrapper = TextWrapper(120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        facts = "\n".join(wrapper.fill(f"- {name}: {self.section(name)}") for name in FACTS)
        sections = (f"## {name}\n{text}" for name, text in self._texts.items() if name not in FACTS)
        return "\n\n".join((self.title, *sections, facts))

    def section(self, name: str) -> str:
        """Return the text of a section or fact; "" if there is none."""
        text = self._texts.get(name, "")
        return " ".join(text.split()) if name in FACTS else text

    def _known(self, fact: str) -> str:
        """Return a fact that the docstring leaves out, from the first and the last release that have the bug."""
        from packaging.version import Version

        if fact == "Upstream":
            private = " in public: the bug is a security problem (SECURITY.md)"
            return f"None known{private if self.no_patch is PRIVATE else ''}."
        wrong: dict[str, set[str]] = {}
        for target in self.targets:
            if not target.helper:
                wrong.setdefault(target.copy or _NAMES[target.dist], set()).update(applicability.wrong_releases(target))
        known = [(name, sorted(releases, key=Version)) for name, releases in wrong.items()]
        if fact == "Releases":
            spans = (f"{name} {' to '.join(dict.fromkeys(found[:1] + found[-1:]))}" for name, found in known)
            is_first = any(found[0] == "0.32.0" for _, found in known)  # kvfix was written for this release of vLLM
            return f"{'; '.join(spans)}.{' Earlier releases were not tested.' if is_first else ''}"
        return f"{' and '.join(f'{name} {found[-1]}' for name, found in known)} is no longer in use."
