"""A scenario: the shortest schedule that shows one bug, and the catalogue that finds them.

One file in `scenarios/` is one scenario. Its name is the slug; its docstring says what happens; `SCENARIO` (a tuple of
them where vLLM's copy of the connector has the bug too) says which fix cures it, what is expected to be violated on
which releases, and `play` moves the world with named steps. Neither vLLM nor LMCache is imported by listing them.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvfix_tools.lab.options import Options

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


#: The rule that nothing goes wrong in kvfix itself.
FAULT = "LAB007"


@dataclass(frozen=True)
class Scenario:
    """fixes: codes of those that cure it; none: nobody has fixed it yet. rule: code that must be among the findings.

    text: must stand in its message. wrong: releases where it must be violated, {distribution: PEP 440 specifiers}; in
    all others that can play it, it must be clean. needs: releases that can play it at all.
    """

    module_name: str
    doc: str | None
    play: Callable[[World], None]
    fixes: tuple[str, ...]
    rule: str
    wrong: dict[str, str]
    text: str = ""
    #: The request whose story it is.
    request: str = "r"
    options: Options = field(default_factory=Options)
    needs: dict[str, str] | None = None

    @property
    def slug(self) -> str:
        name = self.module_name.rpartition(".")[2].replace("_", "-")
        return f"{name}-in-tree" if self.options.connector == "mp-in-tree" else name

    @property
    def title(self) -> str:
        return (self.doc or "").strip().partition("\n")[0]


def both(
    module_name: str,
    doc: str | None,
    play: Callable[[World], None],
    *,
    fixes: tuple[str, ...],
    rule: str,
    wrong: str,
    text: str = "",
    request: str = "r",
    vllm: str = "",
    **options: Any,
) -> tuple[Scenario, Scenario]:
    """The same schedule on LMCache's multi-process connector and on vLLM's copy of it.

    wrong: releases of LMCache that have the bug. vllm: releases of vLLM that show it, if not all that the lab can play.
    Its copy has what LMCache's own of that time had; the lab plays it with the LMCache that it starts with.
    """
    sizes = {"block_size": 16, "num_blocks": 60, "chunk_size": 64, **options}
    mp, in_tree = Options(connector="mp", **sizes), Options(connector="mp-in-tree", **sizes)
    own, copy = {"lmcache": ">=0.4.5"}, {"lmcache": ">=0.4.4,<0.4.7"}
    shown = {"vllm": vllm or ">=0.22.0"}
    return (
        Scenario(module_name, doc, play, fixes, rule, {**shown, "lmcache": wrong}, text, request, mp, own),
        Scenario(module_name, doc, play, fixes, rule, {**shown, **copy}, text, request, in_tree, copy),
    )


@functools.cache
def scenarios() -> tuple[Scenario, ...]:
    """All of them, by slug."""
    package = import_module("kvfix_tools.lab.scenarios")
    names = sorted(found.name for found in pkgutil.iter_modules(package.__path__))
    found: list[Scenario] = []
    for name in names:
        made = import_module(f"{package.__name__}.{name}").SCENARIO
        found += made if isinstance(made, tuple) else (made,)
    return tuple(found)


def find(slug: str) -> Scenario | None:
    """The scenario of this slug; None if there is none."""
    return next((scenario for scenario in scenarios() if scenario.slug == slug), None)


def continued(tokens: list[int], more: int) -> list[int]:
    """The prompt with so many of the tokens that the lab's model would generate after it."""
    from kvfix_tools.lab.engine import VOCABULARY
    from kvfix_tools.lab.memory import Prefix

    prefix, whole = Prefix(), list(tokens)
    for _ in range(more):
        whole.append(prefix.of(whole)[-1] % VOCABULARY)
    return whole


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """A prompt of so many tokens that shares its first token with no prompt of another seed."""
    return [(seed * 101 + position * 7 + position // 97) % 509 + 1 for position in range(tokens)]
