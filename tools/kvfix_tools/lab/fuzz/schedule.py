"""A schedule has the options and the steps of a lab engine. A seed determines a schedule. A saved schedule is JSON:

{"kvfix-schedule": 1, "versions": {"vllm": "0.32.0", "lmcache": "0.5.6"}, "options": {...},
 "steps": [["admit", "r0", 3, 120, 8], ["step"], ...]}
"""

import dataclasses
import json
from collections.abc import Collection, Sequence
from random import Random
from typing import Any, NamedTuple

from kvfix_tools.lab.fuzz import drawn_options, pair_schedule, parameters
from kvfix_tools.lab.fuzz.drawn_options import Dice
from kvfix_tools.lab.fuzz.pair_schedule import DrawnStep as DrawnStep
from kvfix_tools.lab.options import CONNECTORS, OF_VLLM, PAIRS, Options

FORMAT = 1

#: {kind of step: weight in the random choice}. A plain schedule has no faults.
_PLAIN = {"step": 60, "admit": 10, "take_blocks": 2, "free_blocks": 3, "budget": 1, "reset_prefix_cache": 1}
_FAULTS = {"abort": 4, "evict": 1, "fail_load": 2, "admit_again": 2, "timeout": 1, "preempt": 2}
#: Steps that are drawn only if lookups take time.
_ASYNCHRONOUS = {"slow_lookups": 2, "wait": 1}
#: This step is drawn only with Options.beside. The step gives the MultiConnector's other child the KV of a request.
_MULTI_CONNECTOR = {"is_beside": 5}
#: {feature (releases.FEATURES): {kind of step: weight}}. Each feature is drawn for three of ten seeds.
_SOMETIMES = {
    "pause": {"pause": 1, "unpause": 3},
    "sessions": {"session": 3, "input": 6, "end_input": 1},
    "roles": {"configured": 6, "stored_elsewhere": 3},
    "stops": {"server_stops": 1, "server_goes_on": 5},
}
#: Steps that are also drawn if OffloadingConnector or SimpleCPUOffloadConnector is the only connector.
_OFFLOADING = {"fail_store": 2, "configured": 3}
_SIMPLE_OFFLOAD = {"fail_store": 2}
_OTHERS = ("lose_loads", "lose_stored", "new_weights", "server_restarts", *_ASYNCHRONOUS, *_MULTI_CONNECTOR)
KINDS = pair_schedule.KINDS.union(_PLAIN, _FAULTS, _OFFLOADING, _OTHERS, *_SOMETIMES.values())


class Schedule(NamedTuple):
    options: Options
    steps: tuple[DrawnStep, ...]

    def to_json(self, versions: dict[str, str]) -> str:
        options = dataclasses.asdict(self.options)
        whole = {"kvfix-schedule": FORMAT, "versions": versions, "options": options, "steps": self.steps}
        return json.dumps(whole, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "tuple[Schedule, dict[str, str]]":
        """Return a saved schedule, and the versions of vLLM and LMCache in it. Raise ValueError for other text."""
        try:
            whole = json.loads(text)
            version = whole["kvfix-schedule"]
            if version != FORMAT:
                text = f"the schedule has format {version}, but kvfix reads {FORMAT}: draw the schedule from its seed"
                raise ValueError(text)
            steps = tuple(tuple(step) for step in whole["steps"])
            unknown = {str(step[0]) for step in steps} - KINDS
            if unknown:
                raise ValueError(f"this version of kvfix has no step {', '.join(sorted(unknown))}")
            options = Options(**whole["options"])
            if options.any_connector and ":" not in options.connector:
                raise ValueError(f"no connector {options.connector!r}; known: {', '.join(CONNECTORS)}")
            return cls(options, steps), whole["versions"]
        except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"the file is not a saved schedule ({type(error).__name__}: {error})") from None


def draw(
    seed: int, connector: str, plain: bool = False, lacks: Collection[str] = (), real_server: bool = False
) -> Schedule:
    """Draw the schedule of this seed.

    - plain: use LMCache's default options, and no aborts, failed loads, evictions or sessions
    - lacks: settings, options, features and steps to leave out
    - real_server: draw options for a real server, and restarts of the server
    """
    if connector in PAIRS:
        return Schedule(*pair_schedule.draw(seed, connector, plain))
    rng, dice = Random(seed), Dice(seed, lacks)
    options, features, room = drawn_options.draw(rng, dice, connector, plain, real_server)
    weights = dict(_PLAIN) if plain else {**_PLAIN, **_FAULTS}
    if connector.startswith("mp") and not plain:
        weights["lose_loads"] = 1
    if "enable_async_loading" in options.lmcache:
        weights |= _ASYNCHRONOUS
    if options.beside:
        weights |= _MULTI_CONNECTOR
    if options.states and (options.drafter or (options.pipeline and options.async_scheduling)):
        features -= {"sessions"}  # sessions would show KVF905, which cannot be fixed
    for name, kinds in _SOMETIMES.items():
        weights |= kinds if name in features else {}
    if connector != "v1":
        weights.pop("configured", None)
    if connector in OF_VLLM:
        weights.pop("timeout", None)
        weights |= {} if plain else _OFFLOADING if connector == "offloading" else _SIMPLE_OFFLOAD
    steps: list[DrawnStep] = [
        (*_step(rng, kind, number, options, room), *_rank(rng, kind, options))
        for number, kind in drawn_options.drawn_kinds(rng, weights, "admit")
    ]
    if plain:
        return Schedule(options, tuple(steps))
    own = dice.own("reset")
    if "new_weights" not in lacks:
        steps = [(*step, True) if step[0] == "reset_prefix_cache" and own.random() < 0.5 else step for step in steps]
    if real_server and (chosen := dice.lucky("restart", 0.1)):
        steps.insert(chosen.randrange(len(steps)), ("server_restarts", chosen.randrange(1, 5)))
    if chosen := dice.lucky("new_weights", 0.2):
        steps.insert(chosen.randrange(len(steps)), ("new_weights",))
    return Schedule(options, tuple(steps))


def _rank(rng: Random, kind: str, options: Options) -> DrawnStep:
    """Return (rank,) for a step of one rank, or () for a step of all ranks. Only `v1` can evict on one rank."""
    kinds = ("fail_load", "fail_store", "lose_loads", "evict" if options.connector == "v1" else "")
    if options.ranks == 1 or kind not in kinds or (kind == "lose_loads" and rng.random() < 0.5):
        return ()
    return (rng.randrange(options.ranks),)


def _step(rng: Random, kind: str, number: int, options: Options, room: int) -> DrawnStep:
    if kind in ("admit", "admit_again", "configured"):
        tokens = drawn_options.drawn_length(rng, room, options.chunk_size)
        # vLLM makes every id unique (input_processor.py 0.32.0:371). Some connectors need unique ids. The worker of the
        # multi-process connector never reports an id twice (vllm_multi_process_adapter.py 0.5.6:2034). Stores of
        # OffloadingConnector can outlive their request.
        again = kind == "admit_again" and options.connector == "v1" and not options.offloading
        which = rng.randrange(8) if again else number
        drawn = (f"r{which}", rng.randrange(3), tokens, rng.choice((1, 2, 5, 20, 30)))
        asked = tuple(parameters.OF_OFFLOADING if options.connector in OF_VLLM else parameters.OF_LMCACHE)
        return (kind, *drawn, rng.choice(asked)) if kind == "configured" else ("admit", *drawn)
    if kind == "session":
        return (kind, f"r{number}", rng.randrange(3), rng.randrange(1, room // 8), rng.choice((1, 2, 5)))
    if kind == "pause":
        return (kind, rng.random() < 0.5)
    if kind == "evict":
        return (kind, rng.randrange(1, 6), rng.random() < 0.3)
    arguments: dict[str, tuple[Sequence[Any], ...]] = {
        **dict.fromkeys(("abort", "fail_load", "fail_store", "preempt", "is_beside"), (range(8), range(3))),
        **dict.fromkeys(("slow_lookups", "wait"), (range(5),)),
        "stored_elsewhere": (range(3), range(1, room)),
        "input": (range(3), range(3), range(1, room // 8), (1, 2, 5)),
        "end_input": (range(3),),
        "take_blocks": (range(1, options.num_blocks),),
        "budget": ((1, options.block_size, options.max_num_batched_tokens),),
    }
    return (kind, *drawn_options.drawn_arguments(rng, kind, arguments))
