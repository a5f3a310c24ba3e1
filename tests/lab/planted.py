"""Plant faults in one engine or in a pair of engines of the lab, and play the schedules of each setup."""

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

from kvfix_tools.lab import runner
from kvfix_tools.lab import steps as do
from kvfix_tools.lab.options import PAIRS, SERVER_CHUNK, Options
from kvfix_tools.lab.scenario import scenarios
from kvfix_tools.lab.steps import prompt
from tests import late

#: A function that plants a fault in an engine or a pair of engines, or plays a schedule there.
Plant = Callable[[Any], None]


class Setup(NamedTuple):
    """Engine options and a schedule. If `fixes` is True, the lab applies kvfix's fixes in `mode` (fix or check)."""

    options: Options
    schedule: Plant
    fixes: bool = False
    mode: str = "fix"


class Fault(NamedTuple):
    shows: tuple[str, ...]  # texts `CODE PART`. The lab must report CODE with PART in the message, for one text
    plant: Plant
    options: dict[str, Any] = {}  # changed options of the setup
    schedule: Plant | None = None  # replaces the schedule of the setup


#: All registered faults, by setup and name of the fault.
FAULTS: dict[tuple[str, str], Fault] = {}


def fault(
    *shows: str, on: tuple[str, ...] = ("v1", "mp"), at: str = "", schedule: Plant | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a fault of each setup in `on`. The lab must report one finding of `shows`.

    `at` is the path from the engine to a method that the function replaces. `*` in `at` means each item of a list.
    The function gets the engine, the method and its arguments. Without `at`, the function gets only the engine.
    A keyword of `options` names a setup (`_` for `-`). Its value has the options to change. `every`: all other setups.
    """
    by_setup = {name.replace("_", "-"): each for name, each in options.items()}

    def register(plant: Callable[..., Any]) -> Callable[..., Any]:
        planted = partial(_replace_method, at, plant) if at else plant
        for setup in on:
            changed = by_setup.get(setup, options.get("every", {}))
            FAULTS[setup, plant.__name__] = Fault(shows, planted, changed, schedule)
        return plant

    return register


def row(name: str, at: str, call: Callable[..., Any], *shows: str, **more: Any) -> None:
    """Register a fault whose code is one expression. more: further arguments of `fault`."""
    call.__name__ = name
    fault(*shows, at=at, **more)(call)


def rows(table: dict[str, tuple[Any, ...]], **more: Any) -> None:
    """Call `row` for each entry of `table`. The key is the fault's name. The value has `at`, `call` and `shows`."""
    for name, (at, call, *shows) in table.items():
        row(name, at, call, *shows, **more)


def _replace_method(path: str, call: Callable[..., Any], engine: Any) -> None:
    owners, (*places, name) = [engine], path.split(".")
    for part in places:
        if part == "*":
            owners = [each for owner in owners for each in owner]
        else:
            owners = [owner[int(part)] if part.isdigit() else getattr(owner, part) for owner in owners]
    for owner in owners:
        wrap(owner, name, partial(call, engine))


def wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace the method `name` of `owner` by `call`. The first argument of `call` is the original method."""
    setattr(owner, name, partial(call, getattr(owner, name)))


def noted(engine: Any) -> dict[Any, Any]:
    """Return a dictionary in which a planted fault can keep notes about this engine."""
    return vars(engine).setdefault("noted_by_fault", {})


def played(setup: str, name: str = "", planted: bool = True, **options: Any) -> dict[str, Any]:
    """Play a setup, with the fault `name` if given. planted=False: use the fault's schedule, but plant no fault."""
    made, fault = SETUPS[setup], FAULTS[setup, name] if name else Fault((), lambda _: None)
    changed = dataclasses.replace(made.options, **{**fault.options, **options})
    with (
        TemporaryDirectory() as folder,
        mock.patch.dict("os.environ", KVFIX_DUMP_DIR=folder),
        runner.applied(made.fixes, made.mode),
        runner.reported() as reports,
    ):
        engine: Any = late.Pair(changed) if changed.connector in PAIRS else late.LabEngine(changed)
        if planted:
            fault.plant(engine)
        with suppress(late.EngineDied):
            (fault.schedule or made.schedule)(engine)
            if changed.connector in PAIRS or not all(each.is_finished() for each in engine.requests.values()):
                engine.expect_all_ended()
        (engine if changed.connector in PAIRS else engine.connector).close()
    hits = {} if changed.connector in PAIRS else engine.request_events.hits
    found = [(each.code, each.message) for each in [*engine.findings, *reports]]
    return {"found": found, "counts": engine.counts, "hits": hits}


def is_found(fault: Fault, done: dict[str, Any]) -> bool:
    wanted = [each.partition(" ")[::2] for each in fault.shows]
    return any(code == rule and text in message for code, message in done["found"] for rule, text in wanted)


def steps(*parts: Any) -> Plant:
    """Return a schedule. A part is a step, a function that gets the engine, or a sequence of parts."""
    whole = list(do.flat(parts))

    def play(engine: Any) -> None:
        for part in whole:
            (part.play if isinstance(part, do.Step) else part)(engine)

    return play


def until(condition: Callable[[Any], Any]) -> Plant:
    def play(engine: Any) -> None:
        while not condition(engine):
            engine.step()

    return play


def counted(name: str, least: int, most: float = inf) -> Plant:
    def check(engine: Any) -> None:
        assert least <= engine.counts[name] <= most, f"{engine.counts[name]} {name}"

    return check


#: Requests store KV, are preempted and load KV. Some hits are in vLLM's prefix cache, and some hits are in LMCache.
V1 = steps(
    do.store("first", prompt(300), max_tokens=3),
    [do.admit("again", prompt(300), max_tokens=20), do.admit("other", prompt(200, seed=1), max_tokens=20)],
    [do.step(4), do.preempt("again"), do.keep_blocks(3), do.step(2), do.free_blocks(), do.run(), do.settle()],
)
MP = steps(
    [do.stored_elsewhere(prompt(64)), do.admit("a", prompt(200), max_tokens=12), do.step(2)],
    do.admit("b", prompt(120, seed=1), max_tokens=12),
    until(lambda engine: engine.requests["b"] in engine.scheduler.running),
    [do.preempt("b"), do.run(), do.serve("c", prompt(200), max_tokens=4), do.settle()],
)
#: Request `of lmcache` hits LMCache, `of the other` hits SimpleCPUOffloadConnector, and `of both` hits the two.
V1_AND_SIMPLE = steps(
    [do.stored_elsewhere(prompt(100)), do.store("of lmcache", prompt(100), 5), do.serve("of both", prompt(100), 5)],
    [do.store("stored", prompt(150, seed=1), 5), do.evict(100), do.serve("of the other", prompt(150, seed=1), 5)],
    do.expect_all_ended(),
)


def schedule_offloading(engine: Any) -> None:
    """Play stores and loads. Write garbage to blocks that request `other` has freed, while their copy runs."""
    engine.serve("first", prompt(300), max_tokens=3)
    if engine.options.tier:
        engine.evict(100)
    engine.reset_prefix_cache()
    engine.admit("again", prompt(300), max_tokens=20)
    engine.step(8 if engine.options.connector == "offloading" else 12)
    engine.admit("other", prompt(200, seed=1), max_tokens=2)
    for _ in range(40):
        if not engine.requests["other"].is_finished():
            engine.step()
    if engine.requests["again"] in engine.scheduler.running:
        engine.preempt("again")
    engine.take_blocks(100)  # the connector still copies blocks of "other"
    engine.step(2)
    engine.free_blocks()
    engine.run()
    engine.expect_all_ended()


def of_pair(at_once: str = "") -> Plant:
    """Return a schedule of requests a, b and c. at_once: requests that prefill and decode get at the same time."""
    prompts = {"a": prompt(100), "b": prompt(150), "c": prompt(60, seed=1)}
    a, b, c = ((do.ask_at_once if name in at_once else do.ask)(name, tokens, 5) for name, tokens in prompts.items())
    return steps(a, b, do.step(3), c, do.run(), do.step(3))


def _others_write(pair: Any) -> None:
    pair.on("prefill", "take_blocks", pair.prefill.free())
    pair.step()
    pair.on("prefill", "free_blocks")


#: Play three requests. Then overwrite prefill's free blocks 12 times.
OF_RANKS = steps(
    [do.ask("a", prompt(100), 5), do.ask("b", prompt(150), 5), do.step(3), do.ask("c", prompt(60, seed=1), 5)],
    do.step(3),
    # each write needs a request, because the lab makes no step in an engine without requests
    [[do.ask(f"other-{number}", prompt(40, seed=2 + number)), _others_write] for number in range(12)],
    do.run(),
)
_FORGET = do.run(), do.step(5), [do.on(engine, "reset_prefix_cache") for engine in ("prefill", "decode")]
#: Decode gets one prompt three times. First only prefill has the KV, then only decode's second connector, then both.
OF_MULTI = steps(
    [do.ask("a", prompt(100), 5), _FORGET],
    [do.ask_decode("b", prompt(100), 5), _FORGET],  # the second connector has this prompt
    [do.ask("c", prompt(100), 5), do.run(), do.step(3)],  # prefill and the second connector have this prompt
)
#: A scenario in which vLLM frees blocks that have left the sliding window, while a store is in flight.
_FREED = {each.slug: each for each in scenarios()}["mp-window-freed-while-stored"]
_MP = Options(connector="mp", block_size=16, num_blocks=40, chunk_size=32, max_num_batched_tokens=64)
_REAL = Options(connector="mp", real_server=True, chunk_size=SERVER_CHUNK, num_blocks=40)
_PAIR = Options(num_blocks=40, max_num_batched_tokens=64)
_replace = dataclasses.replace
_MULTI = _replace(_PAIR, multi=("prefill", "decode"), chunk_size=32, prefix_caching=False)
SETUPS = {
    "v1": Setup(Options(chunk_size=64, num_blocks=64, max_num_batched_tokens=256), V1),
    "mp": Setup(_MP, MP),
    "mp-windows": Setup(_replace(_MP, num_blocks=100, windows=(32, 64), separate_object_groups=True), MP),
    # a chunk, a step and a block have 16 tokens each
    "mp-states": Setup(
        _replace(_MP, chunk_size=16, max_num_batched_tokens=16, states=True, separate_object_groups=True), MP
    ),
    "mp-window-freed": Setup(_FREED.options, _FREED.play, True, "check"),
    "mp-real": Setup(_REAL, MP, True),
    "offloading": Setup(_replace(_PAIR, connector="offloading", max_num_batched_tokens=256), schedule_offloading),
    "simple-offload": Setup(_replace(_PAIR, connector="simple-offload", delay=2), schedule_offloading),
    "v1-simple": Setup(_replace(_PAIR, offloading="last", simple_offloading=True, chunk_size=32), V1_AND_SIMPLE),
    "nixl-pull": Setup(_replace(_PAIR, connector="nixl-pull"), of_pair()),
    "nixl-push": Setup(_replace(_PAIR, connector="nixl-push"), of_pair()),
    "nixl-push-at-once": Setup(_replace(_PAIR, connector="nixl-push"), of_pair("abc")),
    "mooncake": Setup(_replace(_PAIR, connector="mooncake"), of_pair("b")),
    "nixl-pull-ranks": Setup(_replace(_PAIR, connector="nixl-pull"), OF_RANKS, True),
    "nixl-push-ranks": Setup(_replace(_PAIR, connector="nixl-push"), OF_RANKS, True),
    "nixl-multi": Setup(_replace(_MULTI, connector="nixl-multi"), OF_MULTI),
    # this setup applies the fixes, because without KVF317 NIXL's worker waits for tokens that LMCache has loaded
    "nixl-push-multi": Setup(_replace(_MULTI, connector="nixl-push-multi"), OF_MULTI, True),
    "mooncake-multi": Setup(_replace(_MULTI, connector="mooncake-multi"), OF_MULTI),
    "nixl-offload": Setup(_replace(_PAIR, connector="nixl-offload", chunk_size=16), OF_MULTI),
}  # fmt: skip
