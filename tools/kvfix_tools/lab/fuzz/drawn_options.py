"""Options of a schedule for one engine, drawn from a seed (schedule.py)."""

import dataclasses
import random
from collections.abc import Collection
from typing import Any

from kvfix_tools.lab.options import OF_VLLM, SERVER_CHUNK, Options
from kvfix_tools.lab.releases import FEATURES


def draw(
    rng: random.Random, seed: int, connector: str, plain: bool, lacks: Collection[str], real_server: bool
) -> tuple[Options, set[str], int]:
    """Return the options, a part of FEATURES, and the maximum tokens of a request. Arguments: of `schedule.draw`.

    Each option has its own random generator. So the other options and the steps of a seed stay the same if an option is
    not drawn.
    """
    if real_server:
        lacks = {*lacks, "ranks", "windows", "states", "offloading", "roles", "stops"}
    if connector in OF_VLLM:
        lacks = {*lacks, "roles", "stops", "use_layerwise"}
    block = rng.choice((4, 8, 16))
    chunk = block * rng.choice((1, 2, 4) if connector != "v1" else (1, 2, 3, 4))
    if real_server:
        chunk = SERVER_CHUNK
    blocks = rng.randrange(12, 48)
    room = block * (blocks - 2)
    settings = {} if plain else _settings(connector, chunk)
    chosen = {name: rng.choice(values) for name, values in settings.items() if rng.random() < 0.3}
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
        lmcache={name: value for name, value in chosen.items() if name not in lacks},
        beside=connector == "v1" and not plain and rng.random() < 0.2,
        delay=1 if plain else rng.choice((1, 1, 2, 5)),
        real_server=real_server,
        kv_load_failure_policy="recompute" if plain else rng.choice(("recompute", "recompute", "fail")),
    )
    features = {name for name in FEATURES if name not in lacks and random.Random(f"{name} {seed}").random() < 0.3}
    if plain:
        features -= {"sessions", "roles", "stops"}
    if connector == "v1":
        features -= {"stops"}
    options = _with_features(options, features, seed, plain, lacks)
    if connector in OF_VLLM:
        if not plain and "windows" not in lacks:
            options = _with_windows(options, random.Random(f"windows {seed}"))
        options = _memory_of_vllm(options, random.Random(f"memory {seed}"), plain)
    elif not plain:
        options = _offloading_beside(_with_groups(options, seed, lacks), seed, lacks)
    return options, features, room


def _with_features(options: Options, features: set[str], seed: int, plain: bool, lacks: Collection[str]) -> Options:
    """Add these features. Draw layerwise loads of LMCache, priorities and ranks."""
    switches: dict[str, Any] = {name: name in features for name in ("async_scheduling", "model_runner_v2")}
    if not plain and "policy" not in lacks and random.Random(f"policy {seed}").random() < 0.2:
        switches["policy"] = "priority"
    may_load_by_layers = options.connector == "v1" and not plain and "enable_async_loading" not in options.lmcache
    if may_load_by_layers and "use_layerwise" not in lacks and random.Random(f"use_layerwise {seed}").random() < 0.2:
        switches["lmcache"] = {**options.lmcache, "use_layerwise": True}
    if "roles" in features:
        switches["kv_role"] = random.Random(f"role {seed}").choice(("kv_producer", "kv_consumer", "kv_both"))
    if "drafter" in features:
        switches |= _drafts(random.Random(f"drafts {seed}"), options.block_size)
    may_have_ranks = not plain and not options.beside and "ranks" not in lacks
    if may_have_ranks and random.Random(f"ranks {seed}").random() < 0.25:
        switches |= {"ranks": 2, "rank_delay": random.Random(f"rank_delay {seed}").choice((0, 1, 3))}
        own = random.Random(f"pipeline {seed}")
        if "drafter" not in switches and own.random() < 0.4:
            switches |= {"pipeline": True, "ranks": own.choice((2, 3))}
    return dataclasses.replace(options, **switches)


def _with_groups(options: Options, seed: int, lacks: Collection[str]) -> Options:
    """Draw several KV groups, or context parallelism, for the multi-process connector."""
    if options.connector != "mp":
        return options
    if "windows" not in lacks:
        options = _with_windows(options, random.Random(f"windows {seed}"))
    own = random.Random(f"states {seed}")
    if not options.windows and "states" not in lacks and own.random() < 0.3:
        # a request has two states at a time, and one for each draft (MambaSpec.max_memory_usage_bytes)
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
    may_share = options.ranks > 1 and not (options.pipeline or options.several_groups)
    if may_share and "context" not in lacks and own.random() < 0.5:
        options = dataclasses.replace(options, context=True)
    return options


def _offloading_beside(options: Options, seed: int, lacks: Collection[str]) -> Options:
    """Draw a MultiConnector with one of vLLM's offloading connectors, for v1 and mp."""
    if options.connector not in ("v1", "mp") or options.several_groups or options.ranks > 1 or "offloading" in lacks:
        return options
    own = random.Random(f"offloading {seed}")
    if own.random() < 0.2:
        return dataclasses.replace(options, offloading=own.choice(("first", "last")))
    own = random.Random(f"simple offloading {seed}")
    if options.connector == "v1" and own.random() < 0.15:
        return dataclasses.replace(
            options,
            offloading=own.choice(("first", "last")),
            simple_offloading=True,
            prefix_caching=True,
            extra={"lazy_offload": own.random() < 0.3},
            cpu_blocks=own.choice(_cpu_sizes(options)),
        )
    return options


def _settings(connector: str, chunk: int) -> dict[str, tuple[Any, ...]]:
    """Return {name in `Options.lmcache`: values} of the settings that change the accounting."""
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
    """Return sizes of the CPU memory in blocks, smaller and larger than the GPU's."""
    return options.num_blocks // 4, options.num_blocks, 3 * options.num_blocks


def _memory_of_vllm(options: Options, rng: random.Random, plain: bool) -> Options:
    """Draw settings of a connector in OF_VLLM, and its CPU memory: from one chunk to more than the GPU's."""
    options = dataclasses.replace(options, separate_object_groups=False)
    sizes = _cpu_sizes(options)
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


def _with_windows(options: Options, rng: random.Random) -> Options:
    """Add one or two KV groups of sliding windows, and blocks for them, to a third of the schedules."""
    if rng.random() < 0.67:
        return options
    chunk = options.chunk_size
    window_blocks = rng.choice((1, 1, 2)) if chunk > options.block_size else 1
    block = options.block_size * window_blocks
    # LMCache takes a window shorter than a chunk only in whole blocks (v1/kv_layer_groups.py 0.5.6:727)
    windows = tuple(rng.sample(sorted({block, chunk, 2 * chunk, chunk + block}), rng.choice((1, 1, 2))))
    # vLLM does not start with fewer blocks than the longest request needs (kv_cache_interface.py 0.32.0:859), and it
    # keeps and allocates more blocks for drafts
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
    """Draw options of speculative decoding. vLLM refuses more MTP modules than a block has tokens."""
    drafter, drafts = rng.choice(("ngram", "eagle", "mtp")), rng.randrange(1, 8)
    return {
        "drafter": drafter,
        "drafts": min(drafts, block) if drafter == "mtp" else drafts,
        "acceptance": rng.choice((0, 30, 70, 95, 100)),
        "save_last": rng.random() < 0.5,
    }
