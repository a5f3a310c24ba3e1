"""Faults planted in the in-process connector: each one the lab must find. Runs in a process of its own, with vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvfix_tools.lab import runner
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.healthy import own_blocks

FAULTS: dict[str, tuple[str, str, Callable[[Any], None]]] = {}
CHUNK = 64


def fault(rule: str, text: str = "") -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """The rule that must see it, and what must stand in the message."""

    def register(plant: Callable[[Any], None]) -> Callable[[Any], None]:
        FAULTS[plant.__name__] = (rule, text, plant)
        return plant

    return register


def schedule(engine: Any) -> None:
    """Computes, stores, preempts, resumes with a load, hits vLLM's cache and LMCache's; clean on a sound release."""
    engine.admit("first", prompt(300), max_tokens=3)
    engine.run()
    engine.reset_prefix_cache()
    engine.admit("again", prompt(300), max_tokens=20)
    engine.admit("other", prompt(200, seed=1), max_tokens=20)
    engine.step(4)
    engine.preempt("again")
    engine.keep_blocks(3)
    engine.step(2)
    engine.free_blocks()
    engine.run()
    engine.settle()


@fault("LAB001")
def load_goes_one_slot_too_far(engine: Any) -> None:
    slots = engine.connector.cache_engine.slots
    put = slots.put
    slots.put = lambda slot, content: put(slot + 1 if slot % 16 < 15 else slot, content)


@fault("LAB001")
def load_moves_nothing_and_says_it_did(engine: Any) -> None:
    engine.connector.cache_engine.slots.put = lambda slot, content: None


@fault("LAB001")
def load_takes_the_chunk_of_another_key(engine: Any) -> None:
    cache_engine = engine.connector.cache_engine
    cache_engine.chunk = lambda name, key: next(reversed(cache_engine.cache._chunks.values()))


@fault("LAB001")
def store_reads_the_next_block(engine: Any) -> None:
    slots = engine.connector.cache_engine.slots
    get = slots.get
    slots.get = lambda slot: get((slot + 16) % (engine.options.num_blocks * 16))


@fault("LAB001")
def two_blocks_are_exchanged(engine: Any) -> None:
    iterate, memory, done = engine.iterate, engine.slots._blocks, []

    def exchange() -> None:
        iterate()
        blocks = engine.model.blocks("again")
        if not done and len(blocks) > 1:
            memory[blocks[0]], memory[blocks[1]] = memory[blocks[1]], memory[blocks[0]]
            done.append(True)

    engine.iterate = exchange


@fault("LAB002", "loaded up to 192 of 256")
def load_comes_short_for_no_reason(engine: Any) -> None:
    engine.connector.cache_engine.failing["again"] = 3


@fault("KVR001")
def promises_one_too_many(engine: Any) -> None:
    _answer(engine, lambda request, computed, answer: request.num_tokens - computed)


@fault("KVR002", "promised 0 where")
def changes_its_mind(engine: Any) -> None:
    asked = []

    def answer(request: Any, computed: int, answer: int) -> int:
        asked.append(request.num_preemptions)
        return 0 if asked.count(1) > 1 else answer

    _answer(engine, answer)


@fault("KVR004")
def load_of_less_than_was_granted(engine: Any) -> None:
    def less(meta: Any) -> None:
        if meta.load_spec is not None and meta.load_spec.can_load:
            meta.load_spec.lmcache_cached_tokens -= CHUNK

    _metadata(engine, less)


@fault("KVR006", "no load of them was started")
def load_is_forgotten(engine: Any) -> None:
    def forget(meta: Any) -> None:
        meta.load_spec = None

    _metadata(engine, forget)


@fault("KVR007", "never are")
def store_skips_a_chunk(engine: Any) -> None:
    def skip(meta: Any) -> None:
        if meta.req_id == "other" and meta.save_spec is not None:
            meta.save_spec.skip_leading_tokens += CHUNK

    _metadata(engine, skip)


@fault("KVR008", "are computed")
def store_reports_more_than_there_is(engine: Any) -> None:
    stored = engine.request_events.stored
    engine.request_events.stored = lambda name, tokens, start, end: stored(name, tokens, start, end + CHUNK)


@fault("KVR009", "pins of the worker")
def pins_are_kept(engine: Any) -> None:
    engine.connector.cache_engine.cache.unpin = lambda lookup_id: None


@fault("KVR009", "load_specs")
def a_load_spec_is_kept(engine: Any) -> None:
    class Sticky(dict):  # type: ignore[type-arg]
        def pop(self, key: Any, default: Any = None) -> Any:
            return self.get(key, default)

    engine.connector.scheduler_adapter.load_specs = Sticky()


@fault("KVR011", "ZeroDivisionError")
def a_hook_raises(engine: Any) -> None:
    _metadata(engine, lambda meta: 1 // 0)


@fault("LAB003", "is PREEMPTED for ever")
def no_question_is_ever_answered(engine: Any) -> None:
    _answer(engine, lambda request, computed, answer: None if request.num_preemptions else answer)


def _answer(engine: Any, changed: Callable[[Any, int, Any], Any]) -> None:
    """Change what the adapter answers to `get_num_new_matched_tokens`, where the lab sees it."""
    adapter = engine.connector.scheduler_adapter
    ask = adapter.get_num_new_matched_tokens
    adapter.get_num_new_matched_tokens = lambda request, computed: changed(request, computed, ask(request, computed))


def _metadata(engine: Any, changed: Callable[[Any], None]) -> None:
    """Change each request's metadata, between the adapter in the scheduler and that in the worker."""
    adapter = engine.connector.scheduler_adapter
    build = adapter.build_connector_meta

    def built(output: Any) -> Any:
        metadata = build(output)
        for meta in metadata.requests:
            changed(meta)
        return metadata

    adapter.build_connector_meta = built


def options(asynchronous: bool) -> Options:
    lmcache = {"enable_async_loading": True} if asynchronous else {}
    return Options(chunk_size=CHUNK, num_blocks=64, max_num_batched_tokens=256, lmcache=lmcache)


def played(name: str | None, asynchronous: bool = False) -> dict[str, Any]:
    """Codes and messages of what is found, and the counts of the run."""
    from kvfix_tools.lab.lab_engine import EngineDied, LabEngine

    engine = LabEngine(options(asynchronous))
    if name is not None:
        FAULTS[name][2](engine)
    with suppress(EngineDied):
        schedule(engine)
        if engine.scheduler.has_unfinished_requests():
            engine.expect_all_ended()
    return {"found": [(found.code, found.message) for found in engine.findings], "counts": engine.counts}


def random_schedules(seeds: int) -> dict[str, Any]:
    """Plain schedules with asynchronous loading: no aborts, no failed loads, no evictions."""
    from kvfix_tools.lab.fuzz import play
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
