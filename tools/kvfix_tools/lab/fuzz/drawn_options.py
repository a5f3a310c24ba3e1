"""Draw the options of one engine in a schedule. Random generators choose the values. The seed sets the generators."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from kvfix_tools.lab.options import OF_VLLM, SERVER_CHUNK, Options
from kvfix_tools.lab.releases import FEATURES

#: Options that are not drawn with a real server (_NOT_WITH_SERVER), or in a schedule without faults (_FAULTS).
_NOT_WITH_SERVER = ("ranks", "windows", "states", "offloading", "roles", "stops")
_FAULTS = (*_NOT_WITH_SERVER, "sessions", "policy", "use_layerwise")


class Dice(NamedTuple):
    """The random generators of a seed. lacks: settings, options and steps that are not drawn.

    Each option has its own generator. So an option that is not drawn changes no other option and no step.
    """

    seed: object
    lacks: Collection[str] = ()

    def own(self, name: str) -> Random:
        return Random(f"{name} {self.seed}")

    def lucky(self, name: str, chance: float) -> Random | None:
        """Return the option's generator with probability `chance`. None means that the option is not drawn."""
        rng = self.own(name)
        return rng if name not in self.lacks and rng.random() < chance else None


def drawn_arguments(rng: Random, kind: str, arguments: dict[str, tuple[Sequence[Any], ...]]) -> tuple[Any, ...]:
    """Draw each argument of a step of this kind. arguments: {kind: possible values of each argument}."""
    return tuple(rng.choice(values) for values in arguments.get(kind, ()))


def drawn_kinds(rng: Random, weights: dict[str, int], first: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the kind of each step of a schedule. weights: {kind: weight}. first: kind of step 0."""
    for number in range(rng.randrange(30, 160)):
        yield number, rng.choices(list(weights), list(weights.values()))[0] if number else first


def drawn_length(rng: Random, room: int, size: int) -> int:
    """Draw the length of a prompt, near a multiple of `size`, so that prompts share whole blocks or chunks."""
    whole = rng.randrange(1, max(2, room // size)) * size
    return max(1, min(room - 40, whole + rng.choice((-1, 0, 0, 1, rng.randrange(size)))))


def drawn_sizes(rng: Random, block: int, room: int) -> dict[str, Any]:
    return {
        "block_size": block,
        "max_model_len": max(64, room),
        "max_num_batched_tokens": rng.choice((max(block, 8), 3 * block + 1, 8 * block, 64 * block)),
        "max_num_seqs": rng.choice((2, 4, 8)),
        "prefix_caching": rng.random() < 0.85,
        "reserve_full_isl": rng.random() < 0.5,
    }


def draw(rng: Random, dice: Dice, connector: str, plain: bool, real_server: bool) -> tuple[Options, set[str], int]:
    """Return the options, the drawn FEATURES, and the maximum length of a request. Arguments: see `schedule.draw`."""
    lacks = {*dice.lacks, *(_FAULTS if plain else ()), *(_NOT_WITH_SERVER if real_server else ())}
    lacks |= {"roles", "stops"} if connector in OF_VLLM else {"stops"} if connector == "v1" else set()
    dice = Dice(dice.seed, lacks)
    block = rng.choice((4, 8, 16))
    chunk = block * rng.choice((1, 2, 4) if connector != "v1" else (1, 2, 3, 4))
    if real_server:
        chunk = SERVER_CHUNK
    blocks = rng.randrange(12, 48)
    room = block * (blocks - 2)
    settings = {} if plain else _settings(connector, chunk)
    chosen = {name: rng.choice(values) for name, values in settings.items() if rng.random() < 0.3}
    sizes = drawn_sizes(rng, block, room)
    sizes["prefix_caching"] |= connector == "simple-offload"
    options = Options(
        connector=connector,
        num_blocks=blocks,
        chunk_size=chunk,
        lmcache={name: value for name, value in chosen.items() if name not in lacks},
        beside=connector == "v1" and not plain and rng.random() < 0.2,
        delay=1 if plain else rng.choice((1, 1, 2, 5)),
        real_server=real_server,
        kv_load_failure_policy="recompute" if plain else rng.choice(("recompute", "recompute", "fail")),
        **sizes,
    )
    features = {name for name in FEATURES if dice.lucky(name, 0.3)}
    options = replace(options, **_of_features(options, features, dice))
    if connector in OF_VLLM:
        options = replace(options, **_windows(options, dice))
        options = replace(options, separate_object_groups=False, **_memory_of_vllm(options, dice.own("memory"), plain))
    elif connector == "mp":
        options = replace(options, **_windows(options, dice))
        options = replace(options, **_states(options, dice))
        may_share = options.ranks > 1 and not (options.pipeline or options.several_groups)
        options = replace(options, context=bool(may_share and dice.lucky("context", 0.5)))
    if connector in ("v1", "mp") and not options.several_groups and options.ranks == 1:
        options = replace(options, **_offloading_beside(options, dice))
    return options, features, room


def _of_features(options: Options, features: set[str], dice: Dice) -> dict[str, Any]:
    """Return the options of these features, and also draw layerwise loads of LMCache, priorities and ranks."""
    switches: dict[str, Any] = {name: name in features for name in ("async_scheduling", "model_runner_v2")}
    if dice.lucky("policy", 0.2):
        switches["policy"] = "priority"
    may_load_by_layers = options.connector == "v1" and "enable_async_loading" not in options.lmcache
    if may_load_by_layers and dice.lucky("use_layerwise", 0.2):
        switches["lmcache"] = {**options.lmcache, "use_layerwise": True}
    if "roles" in features:
        switches["kv_role"] = dice.own("role").choice(("kv_producer", "kv_consumer", "kv_both"))
    if "drafter" in features:
        switches |= _drafts(dice.own("drafts"), options.block_size)
    if not options.beside and dice.lucky("ranks", 0.25):
        switches |= {"ranks": 2, "rank_delay": dice.own("rank_delay").choice((0, 1, 3))}
        if "drafter" not in switches and (own := dice.lucky("pipeline", 0.4)):
            switches |= {"pipeline": True, "ranks": own.choice((2, 3))}
    return switches


def _states(options: Options, dice: Dice) -> dict[str, Any]:
    own = None if options.windows else dice.lucky("states", 0.3)
    if own is None:
        return {}
    # a request has two Mamba states at a time, and one more state for each draft (MambaSpec.max_memory_usage_bytes)
    drafts = min(options.drafts, options.block_size - 1)
    more = {"num_blocks": options.num_blocks + own.choice((2, 4, 8)) + 2 * drafts, "drafts": drafts}
    return {**more, "states": True, "prefix_caching": True, "separate_object_groups": own.random() < 0.5}


def _offloading_beside(options: Options, dice: Dice) -> dict[str, Any]:
    """Draw a MultiConnector with one of vLLM's offloading connectors."""
    if "offloading" in dice.lacks:
        return {}
    if own := dice.lucky("offloading", 0.2):
        return {"offloading": own.choice(("first", "last"))}
    own = dice.lucky("simple offloading", 0.15) if options.connector == "v1" else None
    if own is None:
        return {}
    drawn = {"offloading": own.choice(("first", "last")), "extra": {"lazy_offload": own.random() < 0.3}}
    return {**drawn, "simple_offloading": True, "prefix_caching": True, "cpu_blocks": own.choice(_cpu_sizes(options))}


def _settings(connector: str, chunk: int) -> dict[str, tuple[Any, ...]]:
    """Return {setting in `Options.lmcache`: its values} for settings that change how LMCache counts tokens."""
    if connector == "v1":
        return {
            "save_decode_cache": (True,),
            "save_unfull_chunk": (False,),
            "min_retrieve_tokens": (chunk, 3 * chunk),
            "max_tokens_per_load": (chunk, 2 * chunk, 5 * chunk),
            "enable_async_loading": (True,),
        }
    return {"mp.eager_prefetch": (True,), "mp.save_decode_cache": (True,)} if connector == "mp" else {}


def _cpu_sizes(options: Options) -> tuple[int, ...]:
    """Return sizes of the CPU memory, in blocks, that are smaller than, equal to and larger than the GPU memory."""
    return options.num_blocks // 4, options.num_blocks, 3 * options.num_blocks


def _memory_of_vllm(options: Options, rng: Random, plain: bool) -> dict[str, Any]:
    sizes = _cpu_sizes(options)
    if options.connector == "simple-offload":
        lazy = not plain and rng.random() < 0.3
        return {"extra": {"lazy_offload": lazy}, "cpu_blocks": 0 if plain else rng.choice(sizes)}
    extra: dict[str, Any] = {"blocks_per_chunk": rng.choice((1, 1, 2, 3)), "offload_prompt_only": rng.random() < 0.4}
    if plain:
        return {"extra": extra}
    if rng.random() < 0.3:
        extra["eviction_policy"] = "arc"
    tier = rng.choice(("", "fs"))
    if not tier and rng.random() < 0.3:
        extra |= {"store_threshold": 2, "max_tracker_size": rng.choice((4, 64))}
    return {"extra": extra, "cpu_blocks": rng.choice(sizes), "tier": tier}


def _windows(options: Options, dice: Dice) -> dict[str, Any]:
    """In a third of the schedules, draw one or two KV groups with sliding windows. Add blocks for these groups."""
    rng, chunk = dice.own("windows"), options.chunk_size
    if "windows" in dice.lacks or rng.random() < 0.67:
        return {}
    window_blocks = rng.choice((1, 1, 2)) if chunk > options.block_size else 1
    block = options.block_size * window_blocks
    # LMCache requires whole blocks if a window is shorter than a chunk (v1/kv_layer_groups.py 0.5.6:727).
    windows = tuple(rng.sample(sorted({block, chunk, 2 * chunk, chunk + block}), rng.choice((1, 1, 2))))
    # vLLM does not start with fewer blocks than the longest request needs (kv_cache_interface.py 0.32.0:859).
    # With speculative decoding, vLLM also keeps and allocates blocks for the draft tokens.
    in_flight = options.max_num_batched_tokens * options.steps_in_flight + 2 * options.drafts
    most = [-(-min(window - 1 + in_flight, options.max_model_len) // block) + 1 for window in windows]
    drawn = {"windows": windows, "window_blocks": window_blocks, "num_blocks": options.num_blocks + sum(most)}
    return {**drawn, "separate_object_groups": rng.random() < 0.5}


def _drafts(rng: Random, block: int) -> dict[str, Any]:
    """Draw options of speculative decoding. With MTP, vLLM refuses more drafts than a block has tokens."""
    drafter, drafts = rng.choice(("ngram", "eagle", "mtp")), rng.randrange(1, 8)
    return {
        "drafter": drafter,
        "drafts": min(drafts, block) if drafter == "mtp" else drafts,
        "acceptance": rng.choice((0, 30, 70, 95, 100)),
        "save_last": rng.random() < 0.5,
    }
