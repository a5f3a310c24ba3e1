"""A scenario: the shortest schedule that shows one bug, and the catalogue that finds them.

One file in `scenarios/` is one scenario. Its name is the slug; its docstring says what happens; `SCENARIO` (a tuple of
them where vLLM's copy of the connector has the bug too) has the schedule, and says what is to be violated on which
releases. Which fix is for the bug, the fix says (kvfix.fixes). Neither vLLM nor LMCache is imported by listing them.
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


@dataclass(frozen=True)
class Scenario:
    """rule: code that must be among the findings; text: what must stand in its message. wrong: releases where it must
    be violated, {distribution: PEP 440 specifiers}; in all others that can play it, it must be clean. needs: releases
    that can play it at all.
    In an engine only the hooks of the connector are watched. not_in_hooks: why they do not show the bug; "": they do.
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
    #: Name and docstring of its file.
    name: str = ""
    doc: str = ""

    @property
    def slug(self) -> str:
        slug = self.name.replace("_", "-")
        return f"{slug}-in-tree" if self.options.connector == "mp-in-tree" else slug

    @property
    def fixes(self) -> tuple[str, ...]:
        """Codes of the fixes for this bug; none: it is not fixed."""
        return tuple(fix.code for fix in catalogue.fixes() if fix.fixable and self.slug in fix.scenarios)

    @property
    def title(self) -> str:
        return self.doc.strip().partition("\n")[0]

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
    schedule: Sequence[Step], *, wrong: str, vllm: str = ">=0.22.0", **more: Any
) -> tuple[Scenario, Scenario]:
    """The same schedule on LMCache's multi-process connector and on vLLM's copy of it.

    wrong: releases of LMCache that have the bug. vllm: releases of vLLM that show it, if not all that the lab can play.
    Its copy has what LMCache's own of that time had; the lab plays it with the LMCache that it starts with.
    more: of `Scenario` and of `Options`.
    """
    names = {each.name for each in fields(Options)} & set(more)
    sizes = {"block_size": 16, "num_blocks": 60, "chunk_size": 64, **{name: more.pop(name) for name in names}}
    own, copied = {"lmcache": ">=0.4.5"}, {"lmcache": ">=0.4.4,<0.4.7"}

    def scenario(connector: str, wrong: dict[str, str], needs: dict[str, str]) -> Scenario:
        options = Options(connector=connector, **sizes)
        return Scenario(schedule, wrong={"vllm": vllm, **wrong}, needs=needs, options=options, **more)

    return scenario("mp", {"lmcache": wrong}, own), scenario("mp-in-tree", copied, copied)


def _pair(options: Options) -> Any:
    """Two engines and a router, in place of one engine."""
    return import_module("kvfix_tools.lab.pair").Pair(options)


@functools.cache
def scenarios() -> tuple[Scenario, ...]:
    """All of them, by slug."""
    package = import_module("kvfix_tools.lab.scenarios")
    found: list[Scenario] = []
    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        module = import_module(f"{package.__name__}.{name}")
        made = module.SCENARIO if isinstance(module.SCENARIO, tuple) else (module.SCENARIO,)
        found += [replace(scenario, name=name, doc=module.__doc__ or "") for scenario in made]
    return tuple(found)


def find(slug: str) -> Scenario | None:
    """The scenario of this slug; None if there is none."""
    return next((scenario for scenario in scenarios() if scenario.slug == slug), None)
