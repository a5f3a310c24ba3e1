"""The class `Fix`: the record of one bug.

A fix is one file in a folder of `fixes/`. The file name has the code and the slug of the fix. The docstring describes
the bug in fixed sections, for example `Symptom: EngineCore dies ...`. `FIX` has the fixed functions, the broken
releases, probes that find the bug in the installed code, and all other facts. Every list of bugs comes from `FIX`.
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

#: Sections of a fix's docstring, in this order. Each section begins with its name. `Fix.doc` has the names as headings.
SECTIONS = ("Symptom", "Cause", "Fix")
#: Sections for a bug that cannot be fixed from outside.
SECTIONS_UNFIXABLE = ("Symptom", "Cause", "Workaround")
#: Only an opt-in fix has this section. It says what happens while only some of the engines have the fix.
MIXED_ROLL_OUT = "Mixed roll-out"
#: Facts in the list at the end of the docstring, in this order. `Fix` adds a fact that the docstring leaves out.
FACTS = ("Releases", "Upstream", "Remove when")
_PART = re.compile(rf"^(?:- )?({'|'.join((*SECTIONS, 'Workaround', MIXED_ROLL_OUT, *FACTS))}):\s", re.MULTILINE)
_NAMES = {"lmcache": "LMCache", "vllm": "vLLM"}

#: Values of `Fix.attaches`: to which requests `kvfix attach` applies the fix. With NEW_REQUESTS, the fix skips requests
#: that began earlier (`session.before`), because it must see a request from the start. AT_START means no requests: the
#: fix acts only while the engine starts, or would read cached KV differently than it was written.
ALL_REQUESTS, NEW_REQUESTS, AT_START = "all requests", "new requests", "at start"


@dataclass(frozen=True)
class Target:
    """A function of a distribution that is wrong in some releases, and the fix of this function.

    dist, module, function: e.g. "lmcache", "lmcache.integration.vllm.vllm_v1_adapter",
        "LMCacheConnectorV1Impl.get_num_new_matched_tokens".
    broken: the releases whose code is wrong (PEP 440 specifiers). kvfix compares the installed function with the
        fingerprints of these releases (fingerprints.json). It ignores version numbers.
    probe: (function, module) -> True if stubs show the bug, False if the function is right. It takes milliseconds.
        kvfix runs it only on code that no release has. If it is None or raises, kvfix refuses the fix.
    fix: (module) -> wrapper of the function (kvfix.wrapping). If the fix applies, kvfix calls `fix` after the import of
        the module. None: the target only shows whether the bug is there. A helper fixes the bug, or nothing can.
    order: position of the wrapper around the function. The wrapper with the lowest order is the innermost.
    helper: the fix needs this function, but the bug is in another function. The code of a helper does not show the bug.
    copy: if several classes have a copy of the code, the name of this function's copy. "": every copy needs the
        function. kvfix wraps either all functions of a copy or none (kvfix.applicability).
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
    """A class or module with functions to fix. `SCHEDULER.schedule(broken=..., fix=...)` returns a `Target`."""

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


#: Value of `no_patch` for a bug that an attacker can use.
PRIVATE = {"vllm": "it can be abused: vLLM's security channel comes before a public patch (SECURITY.md)"}

#: Effects of a bug on the user, the worst first. With "lost hits", vLLM computes more, but the output is right.
EFFECTS = ("wrong output", "crash", "hang", "leak", "lost hits")


class Fix:
    """The record of a bug, for example `FIX = Fix(LMCACHE_V1.get_finished(...), effect="leak")`.

    effect: the worst effect of the bug on the user, one of EFFECTS.
    evidence: {code of a rule or finding, such as KVR011: regular expression}. A message that matches shows this bug.
    scenarios: slugs of the scenarios that show the bug in the lab. The default is the slug of the fix. If no scenario
        shows the bug, `proof` names the test and the reason.
    changes_healthy: connectors with which the fix also changes lab runs that violate no rule without the fix.
    no_patch: {dist: why kvfix has no patch for upstream}.
    opt_in: True if the user must name the fix (`--plus`). A default fix acts within one engine or server, and changes
        no key, no stored layout, no message to a peer and no scheduling policy.
    attaches: ALL_REQUESTS, NEW_REQUESTS or AT_START.
    on_fault: what happens if the code of the fix raises. "original": the function answers as without the fix. "closed":
    a load fails, a store is skipped or 0 tokens are promised. With an `on_fault`, the default is "closed".
    let_go: releases the objects of the engine that the fix keeps. kvfix calls it after it has removed the wrappers.
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
        """Return (copy, targets) for each copy of the code. kvfix wraps either all targets of a copy or none."""
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
        """Return {section or fact: text}, including the facts that the docstring leaves out."""
        _, *parts = _PART.split(self.docstring)
        texts = {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}
        facts = {name: texts.pop(name, "") or self._known(name) for name in FACTS}
        return texts | facts

    @property
    def doc(self) -> str:
        """Return the docstring as Markdown, with all facts."""
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
        """Derive a fact from the first and the last release with the bug, because the docstring leaves it out."""
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
