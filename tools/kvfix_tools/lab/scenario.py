"""The class `Scenario`, and the list of all scenarios. A scenario is the shortest schedule of steps that shows one bug.

Each file in `scenarios/` has a dict SCENARIOS, {name: scenario}. If vLLM's copy of LMCache's connector has the bug too,
the value is a tuple of two scenarios. Each fix lists its scenarios (kvfix.fixes). The docstring of the fix explains
the bug, so comments in a scenario explain only steps and numbers. This module imports neither vLLM nor LMCache.
"""

import functools
import pkgutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvfix import catalogue
from kvfix_tools.lab import steps as do
from kvfix_tools.lab.options import KNOWN, PAIRS
from kvfix_tools.lab.options import Options as Options
from kvfix_tools.lab.steps import Step

if TYPE_CHECKING:
    from kvfix_tools.lab.engine.lab_engine import LabEngine

#: Values of `Scenario.not_in_hooks`.
CONTENT = "only the contents of slots or chunks show the bug"
SERVER = "only the server of the multi-process connector holds the state"
REQUEST = "no hook call is wrong: only the result of a request shows the bug"
MEMORY = "the connector keeps the state for a while on purpose, and no hook shows that the state is kept for ever"
LAYERS = "a hook that is called for each layer raises, and kvfix does not watch these hooks without `layers=yes`"
WORKER = "the fetched chunks are in a queue of LMCache that has no request ids"
#: The lab's rules for the contents of slots and chunks.
_CONTENT_RULES = ("LAB001", "LAB004")


@dataclass(frozen=True)
class Scenario:
    """A schedule, and the rule that it must violate. The lab adds the steps `run` and `expect_all_ended` at the end.

    - shows: the code of the expected finding, and after a space a part of the finding's message
    - needs: {distribution: specifier of the releases that can play the schedule}. {} stands for all supported releases.
    - wrong: {distribution: specifier of the releases with the bug}. {} stands for the releases of `needs`. On a
      release without the bug, the schedule must have no finding.
    - not_in_hooks: why kvfix, which sees only hooks, does not report the bug in a real engine, or "" if kvfix does. If
      `hooks_rule` is empty, the default for rules LAB... is CONTENT (rules in _CONTENT_RULES) or REQUEST. For other
      rules it is "".
    - hooks_rule: the rule that kvfix reports from the hooks, if kvfix reports another rule than `rule`
    - hooks_releases: the LMCache releases in which kvfix reports the bug. () stands for all releases.
    """

    schedule: Sequence[Step]
    shows: str
    wrong: dict[str, str] = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    needs: dict[str, str] = field(default_factory=dict)
    not_in_hooks: str = ""
    hooks_rule: str = ""
    hooks_releases: tuple[str, ...] = ()
    name: str = ""  # the key of the scenario in SCENARIOS
    #: One sentence on what the schedule shows. If the fix has one scenario, use "". `title` is then the fix's title.
    doc: str = ""

    def __post_init__(self) -> None:
        played = {dist: specifier for dist, (specifier, _) in KNOWN[self.options.connector].needs.items()}
        object.__setattr__(self, "wrong", self.wrong or self.needs or played)
        if self.rule.startswith("LAB") and not (self.not_in_hooks or self.hooks_rule):
            object.__setattr__(self, "not_in_hooks", CONTENT if self.rule in _CONTENT_RULES else REQUEST)

    @property
    def rule(self) -> str:
        return self.shows.partition(" ")[0]

    @property
    def text(self) -> str:
        return self.shows.partition(" ")[2]

    @property
    def slug(self) -> str:
        return f"{self.name}-in-tree" if self.options.connector == "mp-in-tree" else self.name

    @property
    def fixes(self) -> tuple[str, ...]:
        return tuple(fix.code for fix in catalogue.fixes() if fix.fixable and self.slug in fix.scenarios)

    @property
    def title(self) -> str:
        return self.doc or next((fix.title for fix in catalogue.fixes() if self.slug in fix.scenarios), "")

    def play(self, engine: "LabEngine") -> None:
        """Play the schedule on this engine. Raises EngineDied if an exception leaves the scheduler."""
        for step in (*self.schedule, do.run(), do.expect_all_ended()):
            step.play(engine)

    def played(self, then: "Callable[[LabEngine], None]" = lambda _: None) -> Any:
        """Play the schedule on a new engine, call `then`, and return the engine. If the engine dies, do not raise."""
        from kvfix_tools.lab.engine.lab_engine import EngineDied, LabEngine

        pair = self.options.connector in PAIRS
        kind = import_module("kvfix_tools.lab.pair.pair").Pair if pair else LabEngine
        engine: Any = kind(self.options)
        with suppress(EngineDied):
            self.play(engine)
            then(engine)
        return engine


def scenario(*parts: Any, shows: str, **more: Any) -> Scenario:
    """Return a scenario with these steps, or sequences of steps, in this order. more: fields of `Scenario`."""
    return Scenario(list(do.flat(parts)), shows, **more)


#: Options for long prompts.
LARGE = functools.partial(Options, num_blocks=100, chunk_size=256, max_num_batched_tokens=2048)
#: `scenario` with chunks of 256 tokens, and with steps of up to 512 tokens, so that one step computes a whole chunk.
large_chunks = functools.partial(scenario, options=Options(chunk_size=256, max_num_batched_tokens=512))


def mp_scenarios(
    *parts: Any, shows: str, wrong: str = ">=0.4.5", vllm: str = ">=0.22.0", options: Any = None, **more: Any
) -> tuple[Scenario, Scenario]:
    """Return scenarios with these steps for LMCache's multi-process connector and vLLM's copy of this connector.

    wrong: releases of LMCache whose own connector has the bug. vLLM's copy runs only with LMCache 0.4.4 to 0.4.6.
    vllm: releases of vLLM that show the bug. options: fields of `Options`. more: fields of `Scenario`.
    """
    sizes = {"num_blocks": 60, "max_num_batched_tokens": 256, **(options or {})}
    own, copied = (
        scenario(*parts, shows=shows, wrong={"vllm": vllm, "lmcache": lmcache}, options=Options(name, **sizes), **more)
        for lmcache, name in ((wrong, "mp"), (">=0.4.4,<0.4.7", "mp-in-tree"))
    )
    return own, copied


@functools.cache
def scenarios() -> tuple[Scenario, ...]:
    package = import_module("kvfix_tools.lab.scenarios")
    found: list[Scenario] = []
    for module in pkgutil.iter_modules(package.__path__):
        for name, made in import_module(f"{package.__name__}.{module.name}").SCENARIOS.items():
            if any(each.name == name for each in found):
                raise ValueError(f"two files have the scenario {name}; the second is {module.name}.py")
            found += [replace(each, name=name) for each in (made if isinstance(made, tuple) else (made,))]
    return tuple(sorted(found, key=lambda each: each.name))


def find(slug: str) -> Scenario | None:
    return next((scenario for scenario in scenarios() if scenario.slug == slug), None)
