"""A scenario: the shortest schedule that shows one bug, and the catalogue that finds them.

One file in `scenarios/` is one scenario. Its name is the slug; its docstring says what happens; `SCENARIO` (a tuple of
them where vLLM's copy of the connector has the bug too) has the schedule, and says what is to be violated on which
releases. Which fix is for the bug, the fix says (kvfix.fixes). Neither vLLM nor LMCache is imported by listing them.
"""

from __future__ import annotations

import copy
import functools
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvfix import catalogue
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import Step

if TYPE_CHECKING:
    from kvfix_tools.lab.lab_engine import LabEngine


#: Why the hooks of a connector do not show a bug.
CONTENT = "only the contents of slots or chunks show it"
SERVER = "only the server of the multi-process connector holds it"
REQUEST = "no hook is called wrongly: what a request gets is what shows it"
MEMORY = "it is kept on purpose, for a while: a step does not show that this is for ever"
WORKER = "what the worker has fetched is in a queue of LMCache's that has no names"

__all__ = [
    "CONTENT",
    "MEMORY",
    "REQUEST",
    "SERVER",
    "WORKER",
    "Options",
    "Scenario",
    "Step",
    "find",
    "mp_scenarios",
    "scenarios",
]


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
        """Codes of the fixes for this bug; none: it is not fixed yet."""
        return tuple(fix.code for fix in catalogue.fixes() if self.slug in fix.scenarios)

    @property
    def title(self) -> str:
        return self.doc.strip().partition("\n")[0]

    def play(self, engine: LabEngine) -> None:
        """Raises EngineDied where an exception leaves the scheduler."""
        for step in self.schedule:
            # a copy: vLLM and LMCache may change what they are given
            arguments, keywords = copy.deepcopy((step.arguments, step.keywords))
            getattr(engine, step.method)(*arguments, **keywords)


def mp_scenarios(
    schedule: Sequence[Step],
    *,
    rule: str,
    wrong: str,
    text: str = "",
    request: str = "r",
    vllm: str = ">=0.22.0",
    not_in_hooks: str = "",
    hooks_rule: str = "",
    hooks_releases: tuple[str, ...] = (),
    **options: Any,
) -> tuple[Scenario, Scenario]:
    """The same schedule on LMCache's multi-process connector and on vLLM's copy of it.

    wrong: releases of LMCache that have the bug. vllm: releases of vLLM that show it, if not all that the lab can play.
    Its copy has what LMCache's own of that time had; the lab plays it with the LMCache that it starts with.
    """
    sizes = {"block_size": 16, "num_blocks": 60, "chunk_size": 64, **options}
    mp, in_tree = Options(connector="mp", **sizes), Options(connector="mp-in-tree", **sizes)
    hooks = (not_in_hooks, hooks_rule, hooks_releases)
    own, copied = {"lmcache": ">=0.4.5"}, {"lmcache": ">=0.4.4,<0.4.7"}
    return (
        Scenario(schedule, rule, {"vllm": vllm, "lmcache": wrong}, text, request, mp, own, *hooks),
        Scenario(schedule, rule, {"vllm": vllm, **copied}, text, request, in_tree, copied, *hooks),
    )


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
