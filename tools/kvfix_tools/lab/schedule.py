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

from kvfix_tools.lab import mooncake_schedule, multi_schedule, pair_schedule, parameters
from kvfix_tools.lab.options import CONNECTORS, OF_VLLM, PAIRS, SERVER_CHUNK, Options
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
_SOMETIMES = {
    "pause": {"pause": 1, "unpause": 3},
    "sessions": {"session": 3, "input": 6, "end_input": 1},
    "roles": {"configured": 6, "stored_elsewhere": 3},
    "stops": {"server_stops": 1, "server_goes_on": 5},
}
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
#: Only where vLLM's OffloadingConnector is alone.
_OFFLOADING = {"fail_store": 2, "configured": 3}
_SIMPLE_OFFLOAD = {"fail_store": 2}
KINDS = frozenset(
    (
        *_PLAIN,
        *_OFFLOADING,
        *_FAULTS,
        *_ASYNCHRONOUS,
        *_MULTI_CONNECTOR,
        "lose_loads",
        "lose_stored",
        "new_weights",
        "server_restarts",
    )
).union(*_SOMETIMES.values(), pair_schedule.KINDS, multi_schedule.KINDS, mooncake_schedule.KINDS)
#: Who draws for two engines, where it is not pair_schedule.
_DRAW = {
    "nixl-multi": multi_schedule.draw,
    "nixl-push-multi": multi_schedule.draw,
    "nixl-offload": multi_schedule.draw_offload,
    "mooncake": mooncake_schedule.draw,
    "mooncake-multi": multi_schedule.draw,
}


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
            if options.any_connector and ":" not in options.connector:
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


def draw(
    seed: int, connector: str, plain: bool = False, lacks: Collection[str] = (), real_server: bool = False
) -> Schedule:
    """The schedule of this seed. plain: default options of LMCache, no aborts, failed loads, evictions and sessions.

    lacks: settings and options that what is installed does not have. real_server: for one, and what it is played with.
    """
    if connector in PAIRS:
        return Schedule(*_DRAW.get(connector, pair_schedule.draw)(seed, connector, plain, lacks))
    if real_server:
        lacks = {*lacks, "ranks", "windows", "states", "offloading", "roles", "stops"}
    if connector in OF_VLLM:
        lacks = {*lacks, "roles", "stops", "use_layerwise"}
    rng = random.Random(seed)
    block = rng.choice((4, 8, 16))
    chunk = block * rng.choice((1, 2, 4) if connector != "v1" else (1, 2, 3, 4))
    if real_server:
        chunk = SERVER_CHUNK
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
        prefix_caching=rng.random() < 0.85 or connector == "simple-offload",
        reserve_full_isl=rng.random() < 0.5,
        lmcache=lmcache,
        beside=connector == "v1" and not plain and rng.random() < 0.2,
        delay=1 if plain else rng.choice((1, 1, 2, 5)),
        real_server=real_server,
        kv_load_failure_policy="recompute" if plain else rng.choice(("recompute", "recompute", "fail")),
    )
    # each from a generator of its own, so that the rest of a seed is the same where they are not drawn
    drawn = {name for name in DRAWN_SINCE if name not in lacks and random.Random(f"{name} {seed}").random() < 0.3}
    if plain:
        drawn -= {"sessions", "roles", "stops"}
    if connector == "v1":
        drawn -= {"stops"}
    switches: dict[str, Any] = {name: name in drawn for name in ("async_scheduling", "model_runner_v2")}
    if not plain and "policy" not in lacks and random.Random(f"policy {seed}").random() < 0.2:
        switches["policy"] = "priority"
    may_load_by_layers = connector == "v1" and not plain and "enable_async_loading" not in lmcache
    if may_load_by_layers and "use_layerwise" not in lacks and random.Random(f"use_layerwise {seed}").random() < 0.2:
        lmcache["use_layerwise"] = True
    if "roles" in drawn:
        switches["kv_role"] = random.Random(f"role {seed}").choice(_ROLES)
    if "drafter" in drawn:
        switches |= _drafts(random.Random(f"drafts {seed}"), block)
    may_have_ranks = not plain and not options.beside and "ranks" not in lacks
    if may_have_ranks and random.Random(f"ranks {seed}").random() < 0.25:
        switches |= {"ranks": 2, "rank_delay": random.Random(f"rank_delay {seed}").choice((0, 1, 3))}
        own = random.Random(f"pipeline {seed}")
        if "drafter" not in switches and own.random() < 0.4:
            switches |= {"pipeline": True, "ranks": own.choice((2, 3))}
    options = dataclasses.replace(options, **switches)
    if connector in ("mp", *OF_VLLM) and not plain and "windows" not in lacks:
        options = _with_windows(options, random.Random(f"windows {seed}"))
    if connector in OF_VLLM:
        options = _memory_of_vllm(options, random.Random(f"memory {seed}"), plain)
    own = random.Random(f"states {seed}")
    may_have_states = connector == "mp" and not plain and not options.windows
    if may_have_states and "states" not in lacks and own.random() < 0.3:
        # a request holds two at a time, and one for each draft (MambaSpec.max_memory_usage_bytes)
        drafts = min(options.drafts, options.block_size - 1)
        more = options.num_blocks + own.choice((2, 4, 8)) + 2 * drafts
        options = dataclasses.replace(
            options,
            states=True,
            prefix_caching=True,
            drafts=drafts,
            num_blocks=more,
            separate_object_groups=own.random() < 0.5,
        )
    own = random.Random(f"context {seed}")
    may_share = connector == "mp" and options.ranks > 1 and not (options.pipeline or options.several_groups)
    if may_share and "context" not in lacks and own.random() < 0.5:
        options = dataclasses.replace(options, context=True)
    own = random.Random(f"offloading {seed}")
    may_offload = connector in ("v1", "mp") and not plain and not options.several_groups and options.ranks == 1
    if may_offload and "offloading" not in lacks and own.random() < 0.2:
        options = dataclasses.replace(options, offloading=own.choice(("first", "last")))
    own = random.Random(f"simple offloading {seed}")
    if (
        may_offload
        and connector == "v1"
        and not options.offloading
        and "offloading" not in lacks
        and own.random() < 0.15
    ):
        options = _offloads_simply(options, own)
    weights = dict(_PLAIN) if plain else {**_PLAIN, **_FAULTS}
    if connector.startswith("mp") and not plain:
        weights["lose_loads"] = 1
    if "enable_async_loading" in lmcache:
        weights |= _ASYNCHRONOUS
    if options.beside:
        weights |= _MULTI_CONNECTOR
    if options.states and (options.drafter or (options.pipeline and options.async_scheduling)):
        drawn -= {"sessions"}  # KVF905, for which there is no fix
    for name, kinds in _SOMETIMES.items():
        weights |= kinds if name in drawn else {}
    if connector != "v1":
        weights.pop("configured", None)
    if connector in OF_VLLM:
        weights.pop("timeout", None)
        weights |= {} if plain else _OFFLOADING if connector == "offloading" else _SIMPLE_OFFLOAD
    names = list(weights)
    steps: list[DrawnStep] = []
    for number in range(rng.randrange(30, 160)):
        kind = rng.choices(names, [weights[name] for name in names])[0] if number else "admit"
        steps.append((*_step(rng, kind, number, options, room), *_rank(rng, kind, options)))
    own = random.Random(f"reset {seed}")
    if not plain and "new_weights" not in lacks:
        steps = [(*step, True) if step[0] == "reset_prefix_cache" and own.random() < 0.5 else step for step in steps]
    own = random.Random(f"restart {seed}")
    if real_server and not plain and own.random() < 0.1:
        steps.insert(own.randrange(len(steps)), ("server_restarts", own.randrange(1, 5)))
    own = random.Random(f"new_weights {seed}")
    if not plain and "new_weights" not in lacks and own.random() < 0.2:
        steps.insert(own.randrange(len(steps)), ("new_weights",))
    return Schedule(options, tuple(steps))


def _memory_of_vllm(options: Options, rng: random.Random, plain: bool) -> Options:
    """Settings of one of OF_VLLM, and how much CPU memory it has: from a chunk to more than the GPU."""
    options = dataclasses.replace(options, separate_object_groups=False)
    sizes = options.num_blocks // 4, options.num_blocks, 3 * options.num_blocks
    if options.connector == "simple-offload":
        lazy = not plain and rng.random() < 0.3
        return dataclasses.replace(options, extra={"lazy_offload": lazy}, cpu_blocks=0 if plain else rng.choice(sizes))
    extra: dict[str, Any] = {"blocks_per_chunk": rng.choice((1, 1, 2, 3)), "offload_prompt_only": rng.random() < 0.4}
    if plain:
        return dataclasses.replace(options, extra=extra)
    if rng.random() < 0.3:
        extra["eviction_policy"] = "arc"
    tier = rng.choice(("", "fs"))
    if not tier and rng.random() < 0.3:
        extra |= {"store_threshold": 2, "max_tracker_size": rng.choice((4, 64))}
    return dataclasses.replace(options, extra=extra, cpu_blocks=rng.choice(sizes), tier=tier)


def _offloads_simply(options: Options, rng: random.Random) -> Options:
    """Beside LMCache's connector is the SimpleCPUOffloadConnector."""
    return dataclasses.replace(
        options,
        offloading=rng.choice(("first", "last")),
        simple_offloading=True,
        prefix_caching=True,
        extra={"lazy_offload": rng.random() < 0.3},
        cpu_blocks=rng.choice((options.num_blocks // 4, options.num_blocks, 3 * options.num_blocks)),
    )


def _with_windows(options: Options, rng: random.Random) -> Options:
    """With one or two KV groups of sliding windows in a third of the schedules, and blocks for them."""
    if rng.random() < 0.67:
        return options
    chunk = options.chunk_size
    window_blocks = rng.choice((1, 1, 2)) if chunk > options.block_size else 1
    block = options.block_size * window_blocks
    # LMCache takes a window shorter than a chunk only in whole blocks (v1/kv_layer_groups.py 0.5.6:727)
    windows = tuple(rng.sample(sorted({block, chunk, 2 * chunk, chunk + block}), rng.choice((1, 1, 2))))
    # as many as a request of the longest prompt takes, for vLLM starts with no fewer (kv_cache_interface.py 0.32.0:859)
    # and those that it keeps, and allocates ahead, for drafts
    in_flight = options.max_num_batched_tokens * options.steps_in_flight + 2 * options.drafts
    most = [-(-min(window - 1 + in_flight, options.max_model_len) // block) + 1 for window in windows]
    return dataclasses.replace(
        options,
        windows=windows,
        window_blocks=window_blocks,
        separate_object_groups=rng.random() < 0.5,
        num_blocks=options.num_blocks + sum(most),
    )


def _drafts(rng: random.Random, block: int) -> dict[str, Any]:
    """Options of speculative decoding. vLLM refuses more modules of MTP than a block has tokens."""
    drafter, drafts = rng.choice(("ngram", "eagle", "mtp")), rng.randrange(1, 8)
    return {
        "drafter": drafter,
        "drafts": min(drafts, block) if drafter == "mtp" else drafts,
        "acceptance": rng.choice((0, 30, 70, 95, 100)),
        "save_last": rng.random() < 0.5,
    }


def _rank(rng: random.Random, kind: str, options: Options) -> DrawnStep:
    """In which rank it happens, where there are several. A server's silence may concern all, and its cache is one."""
    kinds = ("fail_load", "fail_store", "lose_loads", "evict" if options.connector == "v1" else "")
    if options.ranks == 1 or kind not in kinds or (kind == "lose_loads" and rng.random() < 0.5):
        return ()
    return (rng.randrange(options.ranks),)


def _step(rng: random.Random, kind: str, number: int, options: Options, room: int) -> DrawnStep:
    if kind in ("admit", "admit_again", "configured"):
        # few prompts, so that they share prefixes; lengths around the edges of blocks and chunks
        whole = rng.randrange(1, max(2, room // options.chunk_size)) * options.chunk_size
        tokens = max(1, min(room - 40, whole + rng.choice((-1, 0, 0, 1, rng.randrange(options.chunk_size)))))
        # vLLM makes every id its own (input_processor.py 0.32.0:371). The worker of the multi-process connector builds
        # on it: it reports no id twice (vllm_multi_process_adapter.py 0.5.6:2034), so the second one is never freed.
        # So does the OffloadingConnector, whose stores go on after their request.
        again = kind == "admit_again" and options.connector == "v1" and not options.offloading
        which = rng.randrange(8) if again else number
        drawn = (f"r{which}", rng.randrange(3), tokens, rng.choice((1, 2, 5, 20, 30)))
        asked = tuple(parameters.OF_OFFLOADING if options.connector in OF_VLLM else parameters.OF_LMCACHE)
        return (kind, *drawn, rng.choice(asked)) if kind == "configured" else ("admit", *drawn)
    if kind == "stored_elsewhere":
        return (kind, rng.randrange(3), rng.randrange(1, room))
    if kind in ("session", "input"):
        session = f"r{number}" if kind == "session" else rng.randrange(3)
        return (kind, session, rng.randrange(3), rng.randrange(1, room // 8), rng.choice((1, 2, 5)))
    if kind == "pause":
        return (kind, rng.random() < 0.5)
    if kind == "end_input":
        return (kind, rng.randrange(3))
    if kind in ("abort", "fail_load", "fail_store", "preempt", "is_beside"):
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
