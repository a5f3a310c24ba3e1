"""A scenario of the contract: a schedule, the rule that it is about, and what makes it applicable.

The files in `scenarios/` have some each, in `SCENARIOS`, and are found by themselves. A step is a method of `Player`,
of the lab's engine or of its connector.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from kvfix_tools.lab.steps import Step

#: Why a scenario says nothing of a connector that has none of these counts.
WITHOUT = {
    "loaded_tokens": "nothing was loaded",
    "aborted_loading": "no load was in flight between steps",
    "aborted_looking": "every lookup was answered at once",
    "aborted_waiting": "no request was aborted while it waited",
    "aborted_running": "no request was aborted while it computed",
    "aborted": "no request was aborted",
    "loads_failed": "no load failed",
    "connector_resets": "nothing was reset",
    "preemptions": "no request was preempted",
    "drafts_rejected": "no draft was rejected",
    "loaded_beside": "nothing was loaded by the other connector",
    "finished": "no request has ended",
    "ids_used_again": "no id was used again",
}
#: What a connector, or its tester, may not have, and what is said then.
NEEDS = {
    "alone": "its scenarios are for one engine, and this connector takes two: the fuzzer plays it",
    "beside": "the lab's own side of this connector has no other one beside it",
    "uncached": "it does nothing without vLLM's prefix caching",
    "restart": "the lab's own side of this connector has no storage that outlives an engine",
    "lose": "no --lose: nothing says how to lose what it has stored",
    "groups": "the connector has no SupportsHMA: vLLM gives it one KV group",
}


@dataclass(frozen=True)
class Scenario:
    """proof: counts (request_events.py) that must not be 0, else it was not tested. needs: keys of NEEDS.

    options: of the lab's engine, where they are not as they come.
    """

    name: str
    rule: str
    title: str
    schedule: Sequence[Step]
    proof: tuple[str, ...] = ("loaded_tokens",)
    needs: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@functools.cache
def scenarios() -> tuple[Scenario, ...]:
    """All of them, in the order of their files."""
    package = import_module("kvfix_tools.conform.scenarios")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(each for name in names for each in import_module(f"{package.__name__}.{name}").SCENARIOS)
