"""Schedules for a prefill and a decode engine with a second connector (pair_multi.py, nixl_offload.py)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Sequence

from kvfix_tools.lab.fuzz import mooncake_schedule, pair_schedule
from kvfix_tools.lab.fuzz.pair_schedule import DrawnStep
from kvfix_tools.lab.options import Options

#: A step of one of the engines.
KINDS = frozenset({"on"})


def draw(
    seed: int, connector: str, plain: bool = False, lacks: Collection[str] = ()
) -> tuple[Options, tuple[DrawnStep, ...]]:
    """Draw a schedule of the connector between the engines, with LMCache in one or both, and steps for LMCache."""
    between = mooncake_schedule if connector == "mooncake-multi" else pair_schedule
    options, steps = between.draw(seed, connector, plain, lacks)
    rng = random.Random(f"beside {connector} {seed}")
    multi = rng.choice((("decode",), ("prefill",), ("prefill", "decode"), ("prefill", "decode")))
    options = dataclasses.replace(
        options,
        multi=multi,
        lmcache_first=rng.random() < 0.5,
        chunk_size=options.block_size * rng.choice((1, 2, 3)),
    )
    return options, steps if plain else _with(steps, rng, multi, ("lookups_fail", 1))


def draw_offload(
    seed: int, connector: str, plain: bool = False, lacks: Collection[str] = ()
) -> tuple[Options, tuple[DrawnStep, ...]]:
    """Draw a schedule with OffloadingConnector in both engines, and steps for its CPU memory."""
    options, steps = pair_schedule.draw(seed, connector, plain, lacks)
    rng = random.Random(f"beside {connector} {seed}")
    options = dataclasses.replace(
        options,
        offloading=rng.choice(("first", "last")),
        chunk_size=options.block_size * rng.choice((1, 2)),
        cpu_blocks=rng.choice((0, 4, 8, 100)),
    )
    return options, steps if plain else _with(steps, rng, ("prefill", "decode"))


def _with(
    steps: Sequence[DrawnStep], rng: random.Random, engines: Sequence[str], *others: DrawnStep
) -> tuple[DrawnStep, ...]:
    """Insert evictions in one of these engines, or other steps, at random places."""
    drawn: list[DrawnStep] = []
    for step in steps:
        drawn.append(step)
        if rng.random() < 0.03:
            what = rng.choice((("evict", rng.choice((1, 3, 100))), *others))
            drawn.append(("on", rng.choice(engines), *what))
    return tuple(drawn)
