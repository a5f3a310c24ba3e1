"""Schedules for two engines with MooncakeConnector (mooncake.py)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection

from kvfix_tools.lab.fuzz import pair_schedule
from kvfix_tools.lab.fuzz.pair_schedule import DrawnStep
from kvfix_tools.lab.options import Options

#: See pair_router.MALFORMED and mooncake.MALFORMED.
_MALFORMED = (
    "other_engine", "odd_engine", "decode_too", "alone", "nothing", "no_transfer", "other_transfer", "odd_transfer",
    "no_address", "other_address", "odd_address",
)  # fmt: skip
KINDS = frozenset({"ends_at_once"})
#: Timeout of a producer in seconds. A consumer has 60 s more.
_TIMEOUTS = (3, 6, 480)


def draw(
    seed: int, connector: str, plain: bool = False, lacks: Collection[str] = ()
) -> tuple[Options, tuple[DrawnStep, ...]]:
    """Draw a schedule as `pair_schedule.draw` does, for Mooncake. Most routers ask both engines at once."""
    options, steps = pair_schedule.draw(seed, connector, plain, lacks)
    rng = random.Random(f"{connector} own {seed}")
    timeout = 480 if plain else rng.choice(_TIMEOUTS)
    options = dataclasses.replace(options, extra={"kv_lease_duration": timeout})
    drawn: list[DrawnStep] = []
    for step in steps:
        if step[0] == "ask" and not plain and rng.random() < 0.1:
            drawn.append(("ends_at_once", *step[1:4]))
        drawn.append(_step(rng, step, timeout))
    return options, tuple(drawn)


def _step(rng: random.Random, step: DrawnStep, timeout: float) -> DrawnStep:
    kind = step[0]
    if kind == "ask":
        return (rng.choice(("ask", "ask_at_once")), *step[1:])
    if kind == "malform":
        return (kind, rng.choice(_MALFORMED))
    if kind == "fail":
        return (kind, rng.choice(("transfer", "handshake")), step[2])
    if kind == "time_passes":
        return (kind, rng.choice((1.0, timeout / 2, timeout + 1.0)))
    return step
