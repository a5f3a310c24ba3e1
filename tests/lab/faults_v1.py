"""Faults planted in a world: each one the lab must see. Run in a process of its own, for it imports vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvfix_tools.lab import runner
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import prompt
from tests.healthy import own_blocks

FAULTS: dict[str, tuple[str, str, Callable[[Any], None]]] = {}
CHUNK = 64


def fault(rule: str, text: str = "") -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """The rule that must see it, and what must stand in the message."""

    def register(plant: Callable[[Any], None]) -> Callable[[Any], None]:
        FAULTS[plant.__name__] = (rule, text, plant)
        return plant

    return register


def schedule(world: Any) -> None:
    """Computes, stores, preempts, resumes with a load, hits vLLM's cache and LMCache's; clean on a sound release."""
    world.admit("first", prompt(300), max_tokens=3)
    world.run()
    world.reset_prefix_cache()
    world.admit("again", prompt(300), max_tokens=20)
    world.admit("other", prompt(200, seed=1), max_tokens=20)
    for _ in range(4):
        world.step()
    world.preempt("again")
    world.keep_blocks(3)
    world.step()
    world.step()
    world.free_blocks()
    world.run()
    world.settle()


@fault("LAB001")
def load_goes_one_slot_too_far(world: Any) -> None:
    slots = world.side.engine.slots
    put = slots.put
    slots.put = lambda slot, content: put(slot + 1 if slot % 16 < 15 else slot, content)


@fault("LAB001")
def load_moves_nothing_and_says_it_did(world: Any) -> None:
    world.side.engine.slots.put = lambda slot, content: None


@fault("LAB001")
def load_takes_the_chunk_of_another_key(world: Any) -> None:
    engine = world.side.engine
    engine.chunk = lambda name, key: next(reversed(engine.cache._chunks.values()))


@fault("LAB001")
def store_reads_the_next_block(world: Any) -> None:
    slots = world.side.engine.slots
    get = slots.get
    slots.get = lambda slot: get((slot + 16) % (world.options.num_blocks * 16))


@fault("LAB001")
def two_blocks_are_exchanged(world: Any) -> None:
    step, memory, done = world.step, world.slots._blocks, []

    def exchange() -> None:
        step()
        blocks = world.model.blocks("again")
        if not done and len(blocks) > 1:
            memory[blocks[0]], memory[blocks[1]] = memory[blocks[1]], memory[blocks[0]]
            done.append(True)

    world.step = exchange


@fault("LAB002", "loaded up to 192 of 256")
def load_comes_short_for_no_reason(world: Any) -> None:
    world.side.engine.failing["again"] = 3


@fault("KVR001")
def promises_one_too_many(world: Any) -> None:
    _answer(world, lambda request, computed, answer: request.num_tokens - computed)


@fault("KVR002", "promised 0 where")
def changes_its_mind(world: Any) -> None:
    asked = []

    def answer(request: Any, computed: int, answer: int) -> int:
        asked.append(request.num_preemptions)
        return 0 if asked.count(1) > 1 else answer

    _answer(world, answer)


@fault("KVR004")
def load_of_less_than_was_granted(world: Any) -> None:
    def less(meta: Any) -> None:
        if meta.load_spec is not None and meta.load_spec.can_load:
            meta.load_spec.lmcache_cached_tokens -= CHUNK

    _metadata(world, less)


@fault("KVR006", "no load of them was started")
def load_is_forgotten(world: Any) -> None:
    def forget(meta: Any) -> None:
        meta.load_spec = None

    _metadata(world, forget)


@fault("KVR007", "never are")
def store_skips_a_chunk(world: Any) -> None:
    def skip(meta: Any) -> None:
        if meta.req_id == "other" and meta.save_spec is not None:
            meta.save_spec.skip_leading_tokens += CHUNK

    _metadata(world, skip)


@fault("KVR008", "are computed")
def store_tells_of_more_than_there_is(world: Any) -> None:
    engine = world.side.engine
    told = engine.on_store
    engine.on_store = lambda name, tokens, start, end: told(name, tokens, start, end + CHUNK)


@fault("KVR009", "pins of the worker")
def pins_are_kept(world: Any) -> None:
    world.side.engine.cache.unpin = lambda lookup_id: None


@fault("KVR009", "load_specs")
def a_load_spec_is_kept(world: Any) -> None:
    class Sticky(dict):  # type: ignore[type-arg]
        def pop(self, key: Any, default: Any = None) -> Any:
            return self.get(key, default)

    world.side.scheduler_side.load_specs = Sticky()


@fault("KVR011", "ZeroDivisionError")
def a_hook_raises(world: Any) -> None:
    _metadata(world, lambda meta: 1 // 0)


@fault("LAB003", "is PREEMPTED for ever")
def nobody_is_ever_answered(world: Any) -> None:
    _answer(world, lambda request, computed, answer: None if request.num_preemptions else answer)


def _answer(world: Any, changed: Callable[[Any, int, Any], Any]) -> None:
    """Change what the adapter answers to `get_num_new_matched_tokens`, under the lab's eyes."""
    side = world.side.scheduler_side
    ask = side.get_num_new_matched_tokens
    side.get_num_new_matched_tokens = lambda request, computed: changed(request, computed, ask(request, computed))


def _metadata(world: Any, changed: Callable[[Any], None]) -> None:
    """Change each request's metadata, between the adapter in the scheduler and that in the worker."""
    side = world.side.scheduler_side
    build = side.build_connector_meta

    def built(output: Any) -> Any:
        metadata = build(output)
        for meta in metadata.requests:
            changed(meta)
        return metadata

    side.build_connector_meta = built


def options(asynchronous: bool) -> Options:
    lmcache = {"enable_async_loading": True} if asynchronous else {}
    return Options(chunk_size=CHUNK, num_blocks=64, max_num_batched_tokens=256, lmcache=lmcache)


def played(name: str | None, asynchronous: bool = False) -> dict[str, Any]:
    """Codes and messages of what is found, and the counts of the run."""
    from kvfix_tools.lab.world import Died, World

    world = World(options(asynchronous))
    if name is not None:
        FAULTS[name][2](world)
    with suppress(Died):
        schedule(world)
        if world.scheduler.has_unfinished_requests():
            world.never_ends()
    return {"found": [(found.code, found.message) for found in world.findings], "counts": world.counts}


def random_schedules(seeds: int) -> dict[str, Any]:
    """Pleasant schedules with asynchronous loading: no aborts, no failed loads, no evictions. (Others: planted.py.)"""
    from kvfix_tools.lab.play import play
    from kvfix_tools.lab.schedule import draw

    found: dict[str, int] = {}
    counts: dict[str, int] = {}
    for seed in range(seeds):
        drawn = draw(seed, "v1", plain=True)
        lmcache = {"enable_async_loading": True}
        done = play(drawn._replace(options=dataclasses.replace(drawn.options, lmcache=lmcache)))
        for finding in done.findings:
            found[f"{finding.code} {finding.message}"] = seed
        for key, count in done.counts.items():
            counts[key] = counts.get(key, 0) + count
    return {"found": found, "counts": counts}


def outcomes() -> dict[str, Any]:
    with runner.quiet():
        own_blocks()
        return {
            "sound": [played(None), played(None, asynchronous=True)],
            "faults": {name: played(name) for name in FAULTS},
            "random": random_schedules(60),
            "twice": [played("two_blocks_are_exchanged", asynchronous=True) for _ in range(2)],
        }
