"""Plays healthy worlds of the multi-process connector with one fault planted in each, and plain schedules of both.

What was found is in `result`. (The faults of the in-process connector: faults_v1.py.)
"""

import gc
from contextlib import suppress
from math import inf

from kvfix_tools.lab import runner
from kvfix_tools.lab.fuzz import fuzz
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import prompt
from tests.healthy import own_blocks

with runner.quiet():
    from kvfix_tools.lab.world import Died, World


def healthy(world):
    world.stored_elsewhere(prompt(64))
    world.admit("a", prompt(200), max_tokens=12)
    world.step()
    world.step()
    world.admit("b", prompt(120, seed=1), max_tokens=12)
    while world.requests["b"] not in world.scheduler.running:
        world.step()
    world.preempt("b")
    world.run()
    world.admit("c", prompt(200), max_tokens=4)
    world.run()
    world.settle()


def codes(connector, plant):
    world = World(Options(connector=connector, block_size=16, num_blocks=40, chunk_size=32, max_num_batched_tokens=64))
    plant(world)
    with suppress(Died):
        healthy(world)
    return sorted({f"{found.code} {found.name}" for found in world.findings})


def answer_with(world, change):
    # the hook itself answers otherwise; the world looks at it as before
    connector = world.scheduler.connector
    ask = type(connector).get_num_new_matched_tokens.__get__(connector)
    connector.get_num_new_matched_tokens = lambda request, computed: change(*ask(request, computed))
    connector.update_state_after_alloc = type(connector).update_state_after_alloc.__get__(connector)
    world.watcher.listen(connector)


def promise_more(world):
    answer_with(world, lambda promised, later: (promised if promised is None else promised + 999, later))


def change_promise(world):
    seen = []

    def change(promised, later):
        seen.append(promised)
        return (promised, later) if promised is None or len(seen) % 2 else (0, False)

    answer_with(world, change)
    world.stored_elsewhere(prompt(64))
    world.keep_blocks(0)
    world.admit("z", prompt(64))
    for _ in range(5):
        world.step()
    world.free_blocks()


def wrong_chunk(world):
    get = world.cache.get

    def other(key):
        contents = get(key)
        return None if contents is None else contents[::-1]

    world.cache.get = other


def wrong_slot(world):
    write = world.slots.write

    def shifted(blocks, start, contents):
        write(blocks, start, [*contents[:-1], 7] if len(contents) > 40 else contents)

    world.slots.write = shifted


def lost_chunk(world):
    world.cache.get = lambda key: None


def hook_raises(world):
    def dies(*args, **kwargs):
        raise RuntimeError("planted")

    world.scheduler.connector.build_connector_meta = dies


def leaks(world):
    end = world.settle

    def settle():
        world.side.scheduler_adapter._finished_lookup_results["a"] = 0
        end()

    world.settle = settle


def drop_loads(world):
    build = world.scheduler.connector.build_connector_meta

    def without(output):
        meta = build(output)
        meta.requests = [each for each in meta.requests if each.direction != "RETRIEVE"]
        return meta

    world.scheduler.connector.build_connector_meta = without


def store_gap(world):
    told = world.side.transfer.on_store
    world.side.transfer.on_store = lambda name, tokens, start, end: told(name, tokens, start + 32, end + 32)


FAULTS = (promise_more, change_promise, wrong_chunk, wrong_slot, lost_chunk, hook_raises, leaks, drop_loads, store_gap)
faults = {"nothing": lambda world: None, **{fault.__name__: fault for fault in FAULTS}}
result = {"faults": {}, "plain": {}}
own_blocks()
with runner.quiet():
    for name, plant in faults.items():
        result["faults"][name] = codes("mp", plant)
for connector in ("v1", "mp"):
    done = fuzz(connector, range(150), inf, fixes=False, plain=True, shrinking=0)
    kinds = sorted({f"{v.rule} {v.message.split()[1]}: {v.message.split(': ', 1)[1]}" for v in done.violations})
    result["plain"][connector] = {"seeds": done.seeds, "nothing": done.tested_nothing, "violations": kinds}
a, b = (fuzz("v1", range(5, 9), inf, fixes=False, shrinking=0) for _ in range(2))
result["same"] = (a.steps, a.counts) == (b.steps, b.counts)
result["happened"] = {name: fuzz(name, range(60), inf, fixes=False, shrinking=0).counts for name in ("v1", "mp")}
gc.collect()
result["worlds"] = sum(type(each) is World for each in gc.get_objects())
none = fuzz("v1", range(0), inf, fixes=False)
result["nothing"] = none.tested_nothing
found = fuzz("v1", range(3), inf, fixes=False, shrinking=inf).violations
result["shrunk"] = [[v.rule, len(v.schedule.steps)] for v in found]
