"""The class `Fix`, which describes one bug and how kvfix fixes it.

A fix is one file in a folder of `fixes/`. The file name contains the code and the slug of the fix. The file's docstring
describes the bug in fixed sections, for example `Symptom: EngineCore dies ...`. The file's object `FIX` contains the
functions to fix, the releases with the bug, probes that find the bug in the installed code, and all other facts.
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

#: The sections of a fix's docstring, in this order. Each section begins with its name.
SECTIONS = ("Symptom", "Cause", "Fix")
#: The sections for a bug that kvfix cannot fix.
SECTIONS_UNFIXABLE = ("Symptom", "Cause", "Workaround")
#: Only opt-in fixes have this section. The section describes a cluster in which only some engines have the fix.
MIXED_ROLL_OUT = "Mixed roll-out"
#: The facts in the list at the docstring's end, in this order. If the docstring lacks a fact, `Fix` derives the fact.
FACTS = ("Releases", "Upstream", "Remove when")
_PART = re.compile(rf"^(?:- )?({'|'.join((*SECTIONS, 'Workaround', MIXED_ROLL_OUT, *FACTS))}):\s", re.MULTILINE)
_NAMES = {"lmcache": "LMCache", "vllm": "vLLM"}

#: Values of `Fix.attaches`, the requests to which `kvfix attach` applies the fix. With NEW_REQUESTS, the fix skips
#: requests that began before the attach (`session.before`), because the fix must see a request from its start. With
#: AT_START, `kvfix attach` does not apply the fix. A fix with AT_START acts only while the engine starts, acts only in
#: the LMCache server, or changes how the engine reads cached KV.
ALL_REQUESTS, NEW_REQUESTS, AT_START = "all requests", "new requests", "at start"


@dataclass(frozen=True)
class Target:
    """A function that is wrong in some releases of a distribution, and the fix for this function.

    dist, module, function: e.g. "lmcache", "lmcache.integration.vllm.vllm_v1_adapter",
        "LMCacheConnectorV1Impl.get_num_new_matched_tokens".
    broken: the releases whose code is wrong (PEP 440 specifiers). kvfix compares the installed function with the
        fingerprints of these releases (fingerprints.json). The installed version number does not matter.
    probe: (function, module) -> True if the function shows the bug when the probe calls the function with stubs. A
        probe takes milliseconds. kvfix runs the probe only if the function's code is not the code of any known release.
        If the probe is None or raises, kvfix refuses the fix for unknown code.
    fix: (module) -> wrapper of the function (kvfix.wrapping). If the fix applies, kvfix calls `fix` after the import of
        the module. Without `fix`, the target only shows whether the bug exists. Another target may contain the fix.
    order: position of the wrapper around the function. The wrapper with the lowest order is the innermost.
    helper: True if the fix needs this function, but the bug is in another function.
    copy: if the code exists in several copies, the name of the copy that has this function. "" means
        that all copies use this function. kvfix wraps all functions of a copy or none (kvfix.applicability).
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
        """Return a target. more: fields of `Target`. If no stub can show the bug, omit `probe`."""
        full_name = f"{self.name}.{function}" if self.name else function
        return Target(self.dist, self.module, full_name, **{"copy": self.copy, "probe": None, **more})

    @property
    def imported(self) -> Any:
        return sys.modules[self.module]

    def __getattr__(self, function: str) -> Callable[..., Target]:
        if function.startswith("__"):
            raise AttributeError(function)
        return functools.partial(self.target, function)


#: The value of `no_patch` for a bug that an attacker can use.
PRIVATE = {"vllm": "attackers could use a patch's test, so kvfix publishes no patch before vLLM's fix (SECURITY.md)"}

#: Effects of a bug on the user, the worst first. "lost hits": vLLM computes cached tokens again; the output is right.
EFFECTS = ("wrong output", "crash", "hang", "leak", "lost hits")


class Fix:
    """A bug and its fix, for example `FIX = Fix(LMCACHE_V1.get_finished(...), effect="leak")`.

    effect: the worst effect of the bug on the user, one of EFFECTS.
    evidence: {code: regular expression}. The code names a rule or a finding, such as KVR011. A message of this rule or
        finding is a sign of the bug if the message matches the regular expression.
    scenarios: slugs of the scenarios of `kvfix lab` that show the bug. The default is the slug of the fix.
    proof: if no scenario shows the bug, the test that shows the bug, and the reason why no scenario shows the bug.
    changes_healthy: connectors. With these connectors, the fix also changes `kvfix lab` runs that do not have the bug.
    no_patch: {dist: why kvfix has no patch for upstream}.
    opt_in: True if the user must name the fix (`--plus`). A fix that is not opt-in acts within one engine or server,
        and changes no key, no stored layout, no message to a peer and no scheduling policy.
    attaches: ALL_REQUESTS, NEW_REQUESTS or AT_START.
    on_fault: the result of an error in the fix's code. With "original", the function works as without the fix. With
        "closed", a load fails, a store is skipped or 0 tokens are promised. By default, the targets decide.
    let_go: releases engine objects that the fix keeps. kvfix calls this function after removing the wrappers.
    harmless: for an unfixable bug, () -> the reason why the bug does no harm in this process, or "" if it can do harm.
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
        module = sys._getframe(1).f_globals  # the caller's module, found as in collections.namedtuple
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
        """Return the name and the targets of each copy of the code."""
        copies = dict.fromkeys(target.copy for target in self.targets if target.copy) or [""]
        return [(copy, tuple(each for each in self.targets if each.copy in ("", copy))) for copy in copies]

    @property
    def dists(self) -> tuple[str, ...]:
        """Return the distributions that have the bug. A distribution with only helper targets does not have the bug."""
        return tuple(dict.fromkeys(target.dist for target in self.targets if not target.helper))

    @property
    def sections(self) -> tuple[str, ...]:
        found = SECTIONS if self.fixable else SECTIONS_UNFIXABLE
        return (*found, MIXED_ROLL_OUT, *FACTS) if self.opt_in else (*found, *FACTS)

    @functools.cached_property
    def _texts(self) -> dict[str, str]:
        """Return the text of each section and fact. If the docstring lacks a fact, `_known` derives the text."""
        _, *parts = _PART.split(self.docstring)
        texts = {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}
        facts = {name: texts.pop(name, "") or self._known(name) for name in FACTS}
        return texts | facts

    @property
    def doc(self) -> str:
        """Return the docstring as Markdown, with sections under headings and with all facts."""
        from textwrap import TextWrapper

        wrapper = TextWrapper(120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        facts = "\n".join(wrapper.fill(f"- {name}: {self.section(name)}") for name in FACTS)
        sections = (f"## {name}\n{text}" for name, text in self._texts.items() if name not in FACTS)
        return "\n\n".join((self.title, *sections, facts))

    def section(self, name: str) -> str:
        """Return the text of a section or fact, or "" for a section that the docstring does not have."""
        text = self._texts.get(name, "")
        return " ".join(text.split()) if name in FACTS else text

    def _known(self, fact: str) -> str:
        """Derive a missing fact: Upstream from `no_patch`, the other facts from the releases with the bug."""
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
            is_first = any(found[0] == "0.32.0" for _, found in known)  # kvfix was first written for vLLM 0.32.0
            return f"{'; '.join(spans)}.{' Earlier releases were not tested.' if is_first else ''}"
        return f"{' and '.join(f'{name} {found[-1]}' for name, found in known)} is no longer in use."
