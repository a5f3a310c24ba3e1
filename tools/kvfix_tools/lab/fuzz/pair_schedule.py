"""Schedules for two engines (pair.py), also with a second connector: draw them from a seed, and make their steps."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvfix_tools.lab.fuzz import parameters
from kvfix_tools.lab.options import WITH_RANKS, Options
from kvfix_tools.lab.steps import prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.pair.pair import Pair

DrawnStep = tuple[Any, ...]

_ENGINES = ("prefill", "decode")
#: Weight of each step. A plain schedule has no faults.
_PLAIN = {"step": 60, "ask": 12, "ask_decode": 2, "take_blocks": 2, "free_blocks": 3, "budget": 1, "reset": 1}
_FAULTS = {
    "abort": 4, "preempt": 3, "step_alone": 5, "time_passes": 1, "router_takes": 1, "send_again": 1, "ask_again": 1,
    "malform": 1, "fail": 2, "handshakes_take": 1, "restart": 1,
}  # fmt: skip
#: Weights in push mode. With requests in both engines at once, the engines can wait for each other.
_PUSH_FAULTS = {"ask": 6, "ask_at_once": 6, "writers_take": 1, "fail": 3}
#: All steps, also "ends_at_once" for Mooncake, and "on", a step of one engine.
KINDS = frozenset((*_PLAIN, *_FAULTS, *_PUSH_FAULTS, "ends_at_once", "on"))
#: Steps of one engine.
_OF_ENGINE = ("preempt", "step_alone", "restart", "take_blocks", "budget", "free_blocks", "reset")
#: {step: attribute of the router that has the requests for this step}
_AGAIN = {"send_again": "sent", "ask_again": "asked"}
#: Seconds of a lease. A waiting peer renews it after each sixth of this time, by two thirds of this time.
_LEASES = (3, 6, 30)
#: Ranks of both engines, if one has several.
_RANKS = ((1, 2), (1, 2), (2, 1), (2, 1), (2, 2), (2, 4), (4, 2), (1, 4), (4, 1))
#: Timeout of a Mooncake producer in seconds. A consumer has 60 s more.
_TIMEOUTS = (3, 6, 480)

Drawn = tuple[Options, tuple[DrawnStep, ...]]


def draw(seed: int, connector: str, plain: bool = False) -> Drawn:
    options, steps = _draw_nixl(seed, connector, plain)
    if connector.startswith("mooncake"):
        options, steps = _for_mooncake(options, steps, random.Random(f"{connector} own {seed}"), plain)
    own = random.Random(f"beside {connector} {seed}")
    if connector.endswith("-multi"):
        options, steps = _with_lmcache(options, steps, own, plain)
    elif connector == "nixl-offload":
        options, steps = _with_offloading(options, steps, own, plain)
    return options, steps


def _draw_nixl(seed: int, connector: str, plain: bool) -> Drawn:
    rng = random.Random(f"{connector} {seed}")
    block = rng.choice((4, 8, 16))
    blocks, decode_blocks = rng.randrange(12, 40), rng.randrange(12, 40)
    room = block * (min(blocks, decode_blocks) - 2)
    extra: dict[str, Any] = {"kv_lease_duration": 30 if plain else rng.choice(_LEASES)}
    push = connector in ("nixl-push", "nixl-push-multi")
    if push and not plain:
        extra["push_registration_timeout"] = rng.choice((5.0, 30.0))
    elif not plain and rng.random() < 0.25:
        # in this mode KVF319 does not cover a lease that ends: make the lease long enough for the read
        extra |= {"bidirectional_kv_xfer": True, "kv_lease_duration": 30}
        extra |= {"decoder_kv_blocks_ttl": 3, "kv_recompute_threshold": 8}
    options = Options(
        connector=connector,
        block_size=block,
        num_blocks=blocks,
        decode_blocks=decode_blocks,
        max_num_batched_tokens=rng.choice((max(block, 8), 3 * block + 1, 8 * block, 64 * block)),
        max_num_seqs=rng.choice((2, 4, 8)),
        max_model_len=max(64, room),
        prefix_caching=rng.random() < 0.85,
        reserve_full_isl=rng.random() < 0.5,
        async_scheduling=rng.random() < 0.3,
        extra=extra,
        delay=rng.choice((1, 1, 2, 5)),
        kv_load_failure_policy="recompute" if plain else rng.choice(("recompute", "recompute", "fail")),
        policy="fcfs" if plain or rng.random() < 0.8 else "priority",
    )
    # separate generators for ranks and windows, so that they do not change the rest of a seed
    own = random.Random(f"ranks {connector} {seed}")
    if connector in WITH_RANKS and not plain and own.random() < 0.3:
        options = _with_ranks(options, own)
    own = random.Random(f"windows {connector} {seed}")
    if connector in WITH_RANKS and not plain and own.random() < 0.2:
        options = _with_windows(options, own)
    weights = dict(_PLAIN) if plain else {**_PLAIN, **_FAULTS, **(_PUSH_FAULTS if push else {})}
    if "bidirectional_kv_xfer" in extra:
        weights = {kind: weight for kind, weight in weights.items() if kind not in ("time_passes", "step_alone")}
    names = list(weights)
    steps: list[DrawnStep] = []
    for number in range(rng.randrange(30, 160)):
        kind = rng.choices(names, [weights[name] for name in names])[0] if number else "ask"
        steps.append(_step(rng, kind, number, options, room, plain))
    return options, tuple(steps)


def _with_ranks(options: Options, rng: random.Random) -> Options:
    """Add several ranks to one engine or both.

    If the reading or writing engine has fewer ranks, the model needs a head for each rank of the other: otherwise vLLM
    refuses the handshake (base_worker.py 0.32.0:2450).
    """
    prefill, decode = rng.choice(_RANKS)
    reads = [(prefill, decode)] if options.connector == "nixl-push" else [(decode, prefill)]
    if "bidirectional_kv_xfer" in options.extra:
        reads.append((prefill, decode))
    least = max((other for own, other in reads if other > own), default=1)
    return dataclasses.replace(
        options,
        ranks=prefill,
        peer_ranks=decode,
        kv_heads=rng.choice([heads for heads in (1, 2, 4) if heads >= least]),
        rank_delay=rng.choice((0, 0, 1, 3)),
    )


def _with_windows(options: Options, rng: random.Random) -> Options:
    """Add one or two KV groups of sliding windows, and blocks for them."""
    block = options.block_size
    windows = tuple(rng.sample((block, 2 * block, 2 * block + 1, 4 * block), rng.choice((1, 1, 2))))
    more = -(-options.max_model_len // block) * len(windows)
    return dataclasses.replace(
        options, windows=windows, num_blocks=options.num_blocks + more, decode_blocks=options.decode_blocks + more
    )


def _step(rng: random.Random, kind: str, number: int, options: Options, room: int, plain: bool) -> DrawnStep:
    block = options.block_size
    engine = rng.choice(_ENGINES)
    if kind in ("ask", "ask_at_once", "ask_decode"):
        # few prompts, so that they share prefixes; lengths around the edges of blocks
        whole = rng.randrange(1, max(2, room // block)) * block
        tokens = max(1, min(room - 40, whole + rng.choice((-1, 0, 0, 1, rng.randrange(block)))))
        # with KVF353 prefill leaves out the last token: impossible for a prompt of one token
        more = 1 if options.windows and tokens == 1 else 20
        generated = (rng.choice((1, 1, 1, more)),) if kind != "ask_decode" and not plain else ()
        return (kind, f"r{number}", rng.randrange(3), tokens, rng.choice((1, 2, 5, 20, 30)), *generated)
    lease, longest = options.extra["kv_lease_duration"], -(-options.max_model_len // block)
    # vLLM does not start with fewer blocks than the longest request needs
    more = longest * len(options.windows)
    arguments: dict[str, tuple[Sequence[Any], ...]] = {
        **dict.fromkeys(("abort", "send_again", "ask_again", "preempt"), (range(8),)),
        **dict.fromkeys(("router_takes", "handshakes_take", "writers_take"), ((0, 1, 1, 3, 10),)),
        "step_alone": ((1, 2, 5, 20),),
        "time_passes": ((1.0, lease / 2, lease + 1.0),),
        "malform": (tuple(parameters.OF_NIXL),),
        "fail": (("transfer", "handshake", "setup", "notice"), (1, 1, 3)),
        "restart": (range(longest + 2 + more, 42 + more),),
        "take_blocks": (range(1, 40),),
        "budget": ((1, block, options.max_num_batched_tokens),),
    }
    drawn = drawn_arguments(rng, kind, arguments)
    return (kind, engine, *drawn) if kind in _OF_ENGINE else (kind, *drawn)


def drawn_arguments(rng: random.Random, kind: str, arguments: dict[str, tuple[Sequence[Any], ...]]) -> tuple[Any, ...]:
    """Draw each argument of a step of this kind. arguments: {kind: values of each argument}."""
    return tuple(rng.choice(values) for values in arguments.get(kind, ()))


# ---------------------------------------------------------------------- other connectors


def _for_mooncake(options: Options, steps: Sequence[DrawnStep], rng: random.Random, plain: bool) -> Drawn:
    """Change a schedule for Mooncake. Most routers ask both engines at once."""
    timeout = 480 if plain else rng.choice(_TIMEOUTS)
    options = dataclasses.replace(options, extra={"kv_lease_duration": timeout})
    drawn: list[DrawnStep] = []
    for step in steps:
        if step[0] == "ask" and not plain and rng.random() < 0.1:
            drawn.append(("ends_at_once", *step[1:4]))
        drawn.append(_mooncake_step(rng, step, timeout))
    return options, tuple(drawn)


def _mooncake_step(rng: random.Random, step: DrawnStep, timeout: float) -> DrawnStep:
    kind = step[0]
    if kind == "ask":
        return (rng.choice(("ask", "ask_at_once")), *step[1:])
    if kind == "malform":
        return (kind, rng.choice(tuple(parameters.OF_MOONCAKE)))
    if kind == "fail":
        return (kind, rng.choice(("transfer", "handshake")), step[2])
    if kind == "time_passes":
        return (kind, rng.choice((1.0, timeout / 2, timeout + 1.0)))
    return step


def _with_lmcache(options: Options, steps: tuple[DrawnStep, ...], rng: random.Random, plain: bool) -> Drawn:
    """Add LMCache to one engine or both, and steps for LMCache."""
    multi = rng.choice((("decode",), ("prefill",), ("prefill", "decode"), ("prefill", "decode")))
    options = dataclasses.replace(
        options, multi=multi, lmcache_first=rng.random() < 0.5, chunk_size=options.block_size * rng.choice((1, 2, 3))
    )
    return options, steps if plain else _with_evictions(steps, rng, multi, ("lookups_fail", 1))


def _with_offloading(options: Options, steps: tuple[DrawnStep, ...], rng: random.Random, plain: bool) -> Drawn:
    """Add OffloadingConnector to both engines, and steps for its CPU memory."""
    options = dataclasses.replace(
        options,
        offloading=rng.choice(("first", "last")),
        chunk_size=options.block_size * rng.choice((1, 2)),
        cpu_blocks=rng.choice((0, 4, 8, 100)),
    )
    return options, steps if plain else _with_evictions(steps, rng, _ENGINES)


def _with_evictions(
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


# ---------------------------------------------------------------------- the steps


def move(pair: Pair, step: DrawnStep) -> None:
    """Make one step. A step that is not possible, such as an abort without an open request, does nothing."""
    kind, *rest = step
    if kind in ("ask", "ask_at_once", "ask_decode"):
        name, seed, tokens, max_tokens, *more = rest
        pair.do(kind, name, prompt(tokens, seed), max_tokens, *more)
    elif kind == "ends_at_once":
        pair.router.ends_at_once(rest[0], prompt(rest[2], rest[1]))
    elif kind in ("abort", "send_again", "ask_again"):
        names = _open(pair) if kind == "abort" else list(getattr(pair.router, _AGAIN[kind]))
        if names:
            pair.do(kind, names[rest[0] % len(names)])
    elif kind == "preempt":
        engine = pair.engine(rest[0])
        running = [each.request_id for each in engine.scheduler.running]
        if running:
            engine.do("preempt", running[rest[1] % len(running)])
    elif kind in ("take_blocks", "free_blocks", "budget"):
        pair.on(rest[0], kind, *rest[1:])
    elif kind == "reset":
        pair.on(rest[0], "reset_prefix_cache")
    else:
        pair.do(kind, *rest)


def _open(pair: Pair) -> list[str]:
    """Return requests whose clients wait for an answer."""
    waiting = pair.router.waiting
    for engine in pair.engines:
        waiting |= {name.rpartition("-")[0] for name, each in engine.requests.items() if not each.is_finished()}
    return sorted(waiting)
