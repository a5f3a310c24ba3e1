"""A scenario of the contract: a schedule, the rule that it tests, and its requirements.

A step is a method of `Player`, of the lab's engine or of its connector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfix_tools.lab.steps import Step

#: {count: why a scenario has tested nothing if the count is 0}
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
    "loaded_beside": "the other connector loaded nothing",
    "finished": "no request has ended",
    "ids_used_again": "no request id was used again",
}
#: {requirement of a scenario: the message if the connector, or its stand-in, does not have it}
NEEDS = {
    "alone": "the scenario is for one engine, but this connector needs two: only the fuzzer tests it",
    "multi": "the stand-in for this connector cannot be used in a MultiConnector",
    "uncached": "the connector does nothing without vLLM's prefix caching",
    "restart": "the stand-in for this connector has no storage that outlives an engine",
    "lose": "give --lose MODULE:FUNCTION, which deletes the stored KV",
    "groups": "the connector does not have SupportsHMA, so vLLM gives it one KV group",
}


@dataclass(frozen=True)
class Scenario:
    """A scenario.

    proof: counts (request_events.py). If one of them is 0, the rule was not tested. needs: keys of NEEDS.
    options: options of the lab's engine that differ from their defaults.
    """

    name: str
    rule: str
    title: str
    schedule: Sequence[Step]
    proof: tuple[str, ...] = ("loaded_tokens",)
    needs: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
