"""A scenario: the shortest schedule that shows one bug, and the catalogue that finds them.

A file in `scenarios/` has a dict `SCENARIOS` of one family: {slug: scenario}, or a tuple of two where vLLM's copy of
the connector has the bug too. `doc` says what happens; the schedule shows it; `wrong` names the releases in which the
rule must be violated. Which fix is for the bug, the fix says (kvfix.fixes). Listing scenarios imports neither vLLM nor
LMCache.
"""

from __future__ import annotations

import copy
import functools
import pkgutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvfix import catalogue
from kvfix_tools.lab.options import PAIRS
from kvfix_tools.lab.options import Options as Options
from kvfix_tools.lab.steps import Step

if TYPE_CHECKING:
    from kvfix_tools.lab.lab_engine import LabEngine

#: Why the hooks of a connector do not show a bug.
CONTENT = "only the contents of slots or chunks show it"
SERVER = "only the server of the multi-process connector holds it"
REQUEST = "no hook is called wrongly: what a request gets is what shows it"
MEMORY = "it is kept on purpose, for a while: a step does not show that this is for ever"
LAYERS = "a hook that is called for each layer raises, and those are not watched without `layers=yes`"
WORKER = "what the worker has fetched is in a queue of LMCache's that has no names"
#: The lab's rules for what slots and chunks hold.
_OF_CONTENT = ("LAB001", "LAB004")


@dataclass(frozen=True)
class Scenario:
    """rule: code that must be among the findings; text: what must stand in its message. wrong: releases where it must
    be violated, {distribution: PEP 440 specifiers}; in all others that can play it, it must be clean. needs: releases
    that can play it at all.
    In an engine only the hooks of the connector are watched. not_in_hooks: why they do not show the bug; "": they do.
    By default they show the ledger's rules, and not the lab's own.
    hooks_rule: what they show, if not `rule`. hooks_releases: where they show it; (): wherever it is.
    """

    schedule: Sequence[Step]
    rule: str
    wrong: dict[str, str]
    text: str = ""
    #: The request whose history it is.
    request: str = "r"
    options: Options = field(default_factory=Options)
    needs: dict[str, str] = field(default_factory=dict)
    not_in_hooks: str = ""
    hooks_rule: str = ""
    hooks_releases: tuple[str, ...] = ()
    #: Its key in SCENARIOS.
    name: str = ""
    #: The title, then, after an empty line, what happens in detail.
    doc: str = ""

    def __post_init__(self) -> None:
        if self.rule.startswith("LAB") and not (self.not_in_hooks or self.hooks_rule):
            object.__setattr__(self, "not_in_hooks", CONTENT if self.rule in _OF_CONTENT else REQUEST)

    @property
    def slug(self) -> str:
        return f"{self.name}-in-tree" if self.options.connector == "mp-in-tree" else self.name

    @property
    def fixes(self) -> tuple[str, ...]:
        """Codes of the fixes for this bug; none: it is not fixed."""
        return tuple(fix.code for fix in catalogue.fixes() if fix.fixable and self.slug in fix.scenarios)

    @property
    def title(self) -> str:
        return " ".join(self.doc.partition("\n\n")[0].split())

    def play(self, engine: LabEngine) -> None:
        """Raises EngineDied where an exception leaves the scheduler."""
        for step in self.schedule:
            # a copy: vLLM and LMCache may change what they are given
            arguments, keywords = copy.deepcopy((step.arguments, step.keywords))
            engine.do(step.method, *arguments, **keywords)

    def played(self, then: Callable[[LabEngine], None] = lambda _: None) -> Any:
        """A new engine that has played it, and done what comes `then`. That it died is among its findings."""
        from kvfix_tools.lab.lab_engine import EngineDied, LabEngine

        engine: Any = LabEngine(self.options) if self.options.connector not in PAIRS else _pair(self.options)
        with suppress(EngineDied):
            self.play(engine)
            then(engine)
        return engine


def mp_scenarios(
    doc: str, schedule: Sequence[Step], rule: str, *, wrong: str = ">=0.4.5", vllm: str = ">=0.22.0", **more: Any
) -> tuple[Scenario, Scenario]:
    """The same schedule on LMCache's multi-process connector and on vLLM's copy of it.

    wrong: releases of LMCache that have the bug. vllm: releases of vLLM that show it, if not all that the lab can play.
    Its copy has what LMCache's own of that time had; the lab plays it with the LMCache that it starts with.
    more: of `Scenario` and of `Options`.
    """
    names = {each.name for each in fields(Options)} & set(more)
    sizes = {"num_blocks": 60, "max_num_batched_tokens": 256, **{name: more.pop(name) for name in names}}
    own, copied = {"lmcache": ">=0.4.5"}, {"lmcache": ">=0.4.4,<0.4.7"}

    def scenario(connector: str, wrong: dict[str, str], needs: dict[str, str]) -> Scenario:
        options = Options(connector=connector, **sizes)
        return Scenario(schedule, rule, {"vllm": vllm, **wrong}, needs=needs, options=options, doc=doc, **more)

    return scenario("mp", {"lmcache": wrong}, own), scenario("mp-in-tree", copied, copied)


def pair_scenario(
    doc: str, schedule: Sequence[Step], rule: str, *, wrong: str = ">=0.32", request: str = "r-00000002", **more: Any
) -> Scenario:
    """A schedule of two engines, which the lab plays with vLLM from 0.32 on.

    wrong: releases of vLLM that have the bug. request: by default the first one, as decode knows it.
    more: of `Scenario`.
    """
    needs = {"vllm": ">=0.32"}
    return Scenario(schedule, rule, {"vllm": wrong}, request=request, needs=needs, doc=doc, **more)


def _pair(options: Options) -> Any:
    """Two engines and a router, in place of one engine."""
    return import_module("kvfix_tools.lab.pair").Pair(options)


@functools.cache
def scenarios() -> tuple[Scenario, ...]:
    """All of them, by slug."""
    package = import_module("kvfix_tools.lab.scenarios")
    found: list[Scenario] = []
    for module in pkgutil.iter_modules(package.__path__):
        for name, made in import_module(f"{package.__name__}.{module.name}").SCENARIOS.items():
            if any(each.name == name for each in found):
                raise ValueError(f"two files have the scenario {name}; the second is {module.name}.py")
            found += [replace(each, name=name) for each in (made if isinstance(made, tuple) else (made,))]
    return tuple(sorted(found, key=lambda each: each.name))


def find(slug: str) -> Scenario | None:
    """The scenario of this slug; None if there is none."""
    return next((scenario for scenario in scenarios() if scenario.slug == slug), None)
