"""A schedule: the lab engine's options and the steps that it makes, as data. Drawn from a seed, played, saved, shrunk.

{"kvfix-schedule": 1, "versions": {"vllm": "0.32.0", "lmcache": "0.5.6"}, "options": {...},
 "steps": [["admit", "r0", 3, 120, 8], ["step"], ...]}
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Collection
from typing import Any, NamedTuple

from kvfix_tools.lab.options import CONNECTORS, Options
from kvfix_tools.lab.releases import DRAWN_SINCE

FORMAT = 1
DrawnStep = tuple[Any, ...]

#: How often each step is drawn. A plain schedule has no faults.
_PLAIN = {"step": 60, "admit": 10, "take_blocks": 2, "free_blocks": 3, "budget": 1, "reset_prefix_cache": 1}
_FAULTS = {"abort": 4, "evict": 1, "fail_load": 2, "admit_again": 2, "timeout": 1, "preempt": 2}
#: Only where lookups take time.
_ASYNCHRONOUS = {"slow_lookups": 2, "wait": 1}
#: Only where another connector is there: it has the next request, or one that was preempted.
_MULTI_CONNECTOR = {"is_beside": 5}
#: Drawn for three seeds of ten each, by what they are called in DRAWN_SINCE.
_SOMETIMES = {"pause": {"pause": 1, "unpause": 3}, "sessions": {"session": 3, "input": 6, "end_input": 1}}
KINDS = frozenset((*_PLAIN, *_FAULTS, *_ASYNCHRONOUS, *_MULTI_CONNECTOR, "lose_loads")).union(*_SOMETIMES.values())


class Schedule(NamedTuple):
    options: Options
    steps: tuple[DrawnStep, ...]

    def to_json(self, versions: dict[str, str]) -> str:
        options = dataclasses.asdict(self.options)
        whole = {"kvfix-schedule": FORMAT, "versions": versions, "options": options, "steps": self.steps}
        return json.dumps(whole, indent=1)

    @classmethod
    def from_json(cls, text: str) -> tuple[Schedule, dict[str, str]]:
        """The schedule and the versions it was found on. Raises ValueError for anything else than a saved schedule."""
        try:
            whole = json.loads(text)
            version = whole["kvfix-schedule"]
            if version != FORMAT:
                text = f"it is of schedule format {version}, this kvfix reads {FORMAT}: find it again by its seed"
                raise ValueError(text)
            steps = tuple(tuple(step) for step in whole["steps"])
            unknown = {str(step[0]) for step in steps} - KINDS
            if unknown:
                raise ValueError(f"this kvfix knows no step {', '.join(sorted(unknown))}")
            options = Options(**whole["options"])
            if options.connector not in CONNECTORS:
                raise ValueError(f"no connector {options.connector!r}; known: {', '.join(CONNECTORS)}")
            return cls(options, steps), whole["versions"]
        except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"it is no saved schedule ({type(error).__name__}: {error})") from None


def _settings(connector: str, chunk: int) -> dict[str, tuple[Any, ...]]:
    """Settings of LMCache that change the accounting, by the names of `Options.lmcache`, and their values."""
    if connector == "v1":
        return {
            "save_decode_cache": (True,),
            "save_unfull_chunk": (False,),
            "min_retrieve_tokens": (chunk, 3 * chunk),
            "max_tokens_per_load": (chunk, 2 * chunk, 5 * chunk),
            "enable_async_loading": (True,),
        }
    return {"mp.eager_prefetch": (True,), "mp.save_decode_cache": (True,)} if connector == "mp" else {}


def draw(seed: int, connector: str, plain: bool = False, lacks: Collection[str] = ()) -> Schedule:
    """The schedule of this seed. plain: default options of LMCache, no aborts, failed loads, evictions and sessions.

    lacks: settings and options that what is installed does not have.
    """
    rng = random.Random(seed)
    block = rng.choice((4, 8, 16))
    chunk = block * rng.choice((1, 2, 4) if connector != "v1" else (1, 2, 3, 4))
    blocks = rng.randrange(12, 48)
    room = block * (blocks - 2)
    settings = {} if plain else _settings(connector, chunk)
    chosen = {name: rng.choice(values) for name, values in settings.items() if rng.random() < 0.3}
    lmcache: dict[str, Any] = {name: value for name, value in chosen.items() if name not in lacks}
    options = Options(
        connector=connector,
        block_size=block,
        num_blocks=blocks,
        chunk_size=chunk,
        max_num_batched_tokens=rng.choice((max(block, 8), 3 * block + 1, 8 * block, 64 * block)),
        max_num_seqs=rng.choice((2, 4, 8)),
        max_model_len=max(64, room),
        prefix_caching=rng.random() < 0.85,
        reserve_full_isl=rng.random() < 0.5,
        lmcache=lmcache,
        beside=connector == "v1" and not plain and rng.random() < 0.2,
        delay=1 if plain else rng.choice((1, 1, 2, 5)),
        kv_load_failure_policy="recompute" if plain else rng.choice(("recompute", "recompute", "fail")),
    )
    # each from a generator of its own, so that the rest of a seed is the same where they are not drawn
    drawn = {name for name in DRAWN_SINCE if name not in lacks and random.Random(f"{name} {seed}").random() < 0.3}
    if plain:
        drawn.discard("sessions")
    switches: dict[str, Any] = {name: name in drawn for name in ("async_scheduling", "model_runner_v2")}
    if "policy" in drawn:
        switches["policy"] = "priority"
    if "drafter" in drawn:
        switches |= _drafts(random.Random(f"drafts {seed}"), block)
    options = dataclasses.replace(options, **switches)
    weights = dict(_PLAIN) if plain else {**_PLAIN, **_FAULTS}
    if connector != "v1" and not plain:
        weights["lose_loads"] = 1
    if "enable_async_loading" in lmcache:
        weights |= _ASYNCHRONOUS
    if options.beside:
        weights |= _MULTI_CONNECTOR
    for name, kinds in _SOMETIMES.items():
        weights |= kinds if name in drawn else {}
    names = list(weights)
    steps: list[DrawnStep] = []
    for number in range(rng.randrange(30, 160)):
        kind = rng.choices(names, [weights[name] for name in names])[0] if number else "admit"
        steps.append(_step(rng, kind, number, options, room))
    return Schedule(options, tuple(steps))


def _drafts(rng: random.Random, block: int) -> dict[str, Any]:
    """Options of speculative decoding. vLLM refuses more modules of MTP than a block has tokens."""
    drafter, drafts = rng.choice(("ngram", "eagle", "mtp")), rng.randrange(1, 8)
    return {
        "drafter": drafter,
        "drafts": min(drafts, block) if drafter == "mtp" else drafts,
        "acceptance": rng.choice((0, 30, 70, 95, 100)),
        "save_last": rng.random() < 0.5,
    }


def _step(rng: random.Random, kind: str, number: int, options: Options, room: int) -> DrawnStep:
    if kind in ("admit", "admit_again"):
        # few prompts, so that they share prefixes; lengths around the edges of blocks and chunks
        whole = rng.randrange(1, max(2, room // options.chunk_size)) * options.chunk_size
        tokens = max(1, min(room - 40, whole + rng.choice((-1, 0, 0, 1, rng.randrange(options.chunk_size)))))
        # vLLM makes every id its own (input_processor.py 0.32.0:371). The worker of the multi-process connector builds
        # on it: it reports no id twice (vllm_multi_process_adapter.py 0.5.6:2034), so the second one is never freed.
        again = kind == "admit_again" and options.connector == "v1"
        which = rng.randrange(8) if again else number
        return ("admit", f"r{which}", rng.randrange(3), tokens, rng.choice((1, 2, 5, 20, 30)))
    if kind in ("session", "input"):
        session = f"r{number}" if kind == "session" else rng.randrange(3)
        return (kind, session, rng.randrange(3), rng.randrange(1, room // 8), rng.choice((1, 2, 5)))
    if kind == "pause":
        return (kind, rng.random() < 0.5)
    if kind == "end_input":
        return (kind, rng.randrange(3))
    if kind in ("abort", "fail_load", "preempt", "is_beside"):
        return (kind, rng.randrange(8), rng.randrange(3))
    if kind == "take_blocks":
        return (kind, rng.randrange(1, options.num_blocks))
    if kind == "evict":
        return (kind, rng.randrange(1, 6), rng.random() < 0.3)
    if kind in ("slow_lookups", "wait"):
        return (kind, rng.randrange(5))
    if kind == "budget":
        return (kind, rng.choice((1, options.block_size, options.max_num_batched_tokens)))
    return (kind,)
