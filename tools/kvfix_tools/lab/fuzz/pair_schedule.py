"""Draw a schedule for two engines (pair.py) from a seed, and play the schedule's steps."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from kvfix_tools.lab.fuzz import drawn_options, parameters
from kvfix_tools.lab.fuzz.drawn_options import Dice
from kvfix_tools.lab.options import WITH_RANKS, Options
from kvfix_tools.lab.steps import prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.pair.pair import Pair

DrawnStep = tuple[Any, ...]

_ENGINES = ("prefill", "decode")
#: {kind of step: weight}. A plain schedule has no faults.
_PLAIN = {"step": 60, "ask": 12, "ask_decode": 2, "take_blocks": 2, "free_blocks": 3, "budget": 1, "reset": 1}
_FAULTS = {
    "abort": 4, "preempt": 3, "step_alone": 5, "time_passes": 1, "router_takes": 1, "send_again": 1, "ask_again": 1,
    "malform": 1, "fail": 2, "handshakes_take": 1, "restart": 1,
}  # fmt: skip
#: Weights in push mode. "ask_at_once" counts as a fault, because both engines may then wait for each other.
_PUSH_FAULTS = {"ask": 6, "ask_at_once": 6, "writers_take": 1, "fail": 3}
#: All kinds of steps. Only Mooncake has "ends_at_once". "on" names an engine, and a step that the engine makes.
KINDS = frozenset((*_PLAIN, *_FAULTS, *_PUSH_FAULTS, "ends_at_once", "on"))
#: Kinds of steps whose first argument names the engine that makes the step.
_OF_ENGINE = ("preempt", "step_alone", "restart", "take_blocks", "budget", "free_blocks", "reset")
#: {kind of step: attribute of the pair that lists the requests from which the step chooses}
_AGAIN = {"send_again": "sent", "ask_again": "asked"}
#: (ranks of prefill, ranks of decode), if at least one engine has several ranks.
_RANKS = ((1, 2), (1, 2), (2, 1), (2, 1), (2, 2), (2, 4), (4, 2), (1, 4), (4, 1))

Steps = tuple[DrawnStep, ...]
Drawn = tuple[Options, Steps]


def draw(seed: int, connector: str, plain: bool = False) -> Drawn:
    options, steps = _draw_nixl(seed, connector, plain)
    if connector.startswith("mooncake"):
        options, steps = _for_mooncake(options, steps, Dice(seed).own(f"{connector} own"), plain)
    own, block = Dice(seed).own(f"beside {connector}"), options.block_size
    engines: tuple[str, ...] = _ENGINES
    others: Steps = ()
    if connector.endswith("-multi"):
        engines = own.choice((("decode",), ("prefill",), _ENGINES, _ENGINES))
        first, chunk = own.random() < 0.5, block * own.choice((1, 2, 3))
        options = replace(options, multi=engines, lmcache_first=first, chunk_size=chunk)
        others = (("lookups_fail", 1),)
    elif connector == "nixl-offload":
        first_or_last, chunk = own.choice(("first", "last")), block * own.choice((1, 2))
        options = replace(options, offloading=first_or_last, chunk_size=chunk, cpu_blocks=own.choice((0, 4, 8, 100)))
    else:
        return options, steps
    return options, steps if plain else _with_evictions(steps, own, engines, others)


def _draw_nixl(seed: int, connector: str, plain: bool) -> Drawn:
    rng, dice = Dice(seed).own(connector), Dice(f"{connector} {seed}")
    block = rng.choice((4, 8, 16))
    blocks, decode_blocks = rng.randrange(12, 40), rng.randrange(12, 40)
    room = block * (min(blocks, decode_blocks) - 2)
    # a waiting peer renews a lease every `duration // 6` s. A renewed lease lasts at least `duration * 2 // 3` s more
    extra: dict[str, Any] = {"kv_lease_duration": 30 if plain else rng.choice((3, 6, 30))}
    push = connector in ("nixl-push", "nixl-push-multi")
    if push and not plain:
        extra["push_registration_timeout"] = rng.choice((5.0, 30.0))
    elif not plain and rng.random() < 0.25:
        # with bidirectional_kv_xfer, KVF319 does not act if a lease ends during a read: use a long lease
        extra |= {"bidirectional_kv_xfer": True, "kv_lease_duration": 30}
        extra |= {"decoder_kv_blocks_ttl": 3, "kv_recompute_threshold": 8}
    options = Options(
        connector=connector,
        num_blocks=blocks,
        decode_blocks=decode_blocks,
        extra=extra,
        **drawn_options.drawn_sizes(rng, block, room),
        async_scheduling=rng.random() < 0.3,
        delay=rng.choice((1, 1, 2, 5)),
        kv_load_failure_policy="recompute" if plain else rng.choice(("recompute", "recompute", "fail")),
        policy="fcfs" if plain or rng.random() < 0.8 else "priority",
    )
    if connector in WITH_RANKS and not plain:
        if own := dice.lucky("ranks", 0.3):
            options = _with_ranks(options, own)
        if own := dice.lucky("windows", 0.2):  # draw windows, and add blocks for the KV groups of the windows
            windows = tuple(own.sample((block, 2 * block, 2 * block + 1, 4 * block), own.choice((1, 1, 2))))
            more = -(-options.max_model_len // block) * len(windows)
            options = replace(options, windows=windows, num_blocks=blocks + more, decode_blocks=decode_blocks + more)
    weights = dict(_PLAIN) if plain else {**_PLAIN, **_FAULTS, **(_PUSH_FAULTS if push else {})}
    if "bidirectional_kv_xfer" in extra:
        weights = {kind: weight for kind, weight in weights.items() if kind not in ("time_passes", "step_alone")}
    kinds = drawn_options.drawn_kinds(rng, weights, "ask")
    return options, tuple(_step(rng, kind, number, options, room, plain) for number, kind in kinds)


def _with_ranks(options: Options, rng: Random) -> Options:
    """Give several ranks to one engine or to both engines.

    An engine that starts transfers may have fewer ranks than its peer. The model then needs a KV head for each rank of
    the peer. With fewer heads, vLLM refuses the handshake (base_worker.py 0.32.0:2450).
    """
    prefill, decode = rng.choice(_RANKS)
    reads = [(prefill, decode)] if options.connector == "nixl-push" else [(decode, prefill)]
    if "bidirectional_kv_xfer" in options.extra:
        reads.append((prefill, decode))
    least = max((other for own, other in reads if other > own), default=1)
    heads, delay = rng.choice([each for each in (1, 2, 4) if each >= least]), rng.choice((0, 0, 1, 3))
    return replace(options, ranks=prefill, peer_ranks=decode, kv_heads=heads, rank_delay=delay)


def _step(rng: Random, kind: str, number: int, options: Options, room: int, plain: bool) -> DrawnStep:
    block = options.block_size
    engine = rng.choice(_ENGINES)
    if kind in ("ask", "ask_at_once", "ask_decode"):
        tokens = drawn_options.drawn_length(rng, room, block)
        # with windows, prefill must generate only one token. KVF353 ensures the limit, except for prompts of one token
        more = 1 if options.windows and tokens == 1 else 20
        generated = (rng.choice((1, 1, 1, more)),) if kind != "ask_decode" and not plain else ()
        return (kind, f"r{number}", rng.randrange(3), tokens, rng.choice((1, 2, 5, 20, 30)), *generated)
    lease, longest = options.extra["kv_lease_duration"], -(-options.max_model_len // block)
    # vLLM does not start if it has fewer blocks than the longest request needs, so a restart draws enough blocks
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
    drawn = drawn_options.drawn_arguments(rng, kind, arguments)
    return (kind, engine, *drawn) if kind in _OF_ENGINE else (kind, *drawn)


def _for_mooncake(options: Options, steps: Sequence[DrawnStep], rng: Random, plain: bool) -> Drawn:
    """Change a schedule for Mooncake, whose routers often send a request to both engines at once."""
    timeout = 480 if plain else rng.choice((3, 6, 480))  # seconds that prefill waits; decode waits 60 s longer
    options = replace(options, extra={"kv_lease_duration": timeout})
    drawn: list[DrawnStep] = []
    for kind, *rest in steps:
        if kind == "ask":
            if not plain and rng.random() < 0.1:
                drawn.append(("ends_at_once", *rest[:3]))
            kind = rng.choice(("ask", "ask_at_once"))
        elif kind == "malform":
            rest = [rng.choice(tuple(parameters.OF_MOONCAKE))]
        elif kind == "fail":
            rest[0] = rng.choice(("transfer", "handshake"))
        elif kind == "time_passes":
            rest = [rng.choice((1.0, timeout / 2, timeout + 1.0))]
        drawn.append((kind, *rest))
    return options, tuple(drawn)


def _with_evictions(steps: Steps, rng: Random, engines: Sequence[str], others: Steps) -> Steps:
    """Insert evictions and `others` at random places. A random engine of `engines` makes each inserted step."""
    drawn: list[DrawnStep] = []
    for step in steps:
        drawn.append(step)
        if rng.random() < 0.03:
            what = rng.choice((("evict", rng.choice((1, 3, 100))), *others))
            drawn.append(("on", rng.choice(engines), *what))
    return tuple(drawn)


def move(pair: "Pair", step: DrawnStep) -> None:
    """Make one step. A step that is not possible, such as an abort without an open request, does nothing."""
    kind, *rest = step
    if kind in ("ask", "ask_at_once", "ask_decode"):
        name, seed, tokens, max_tokens, *more = rest
        pair.do(kind, name, prompt(tokens, seed), max_tokens, *more)
    elif kind == "ends_at_once":
        pair.ends_at_once(rest[0], prompt(rest[2], rest[1]))
    elif kind in ("abort", "send_again", "ask_again"):
        names = _open(pair) if kind == "abort" else list(getattr(pair, _AGAIN[kind]))
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


def _open(pair: "Pair") -> list[str]:
    waiting = pair.waiting
    for engine in pair.engines:
        waiting |= {name.rpartition("-")[0] for name, each in engine.requests.items() if not each.is_finished()}
    return sorted(waiting)
