"""Faults planted in the multi-process connector: each one the lab must find. What is found is in `result`."""

from contextlib import suppress

from kvfix_tools.lab import runner
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.healthy import own_blocks

with runner.quiet():
    from kvfix_tools.lab.lab_engine import EngineDied, LabEngine


def healthy(engine):
    engine.stored_elsewhere(prompt(64))
    engine.admit("a", prompt(200), max_tokens=12)
    engine.step(2)
    engine.admit("b", prompt(120, seed=1), max_tokens=12)
    while engine.requests["b"] not in engine.scheduler.running:
        engine.step()
    engine.preempt("b")
    engine.run()
    engine.admit("c", prompt(200), max_tokens=4)
    engine.run()
    engine.settle()


def codes(plant):
    engine = LabEngine(Options(connector="mp", block_size=16, num_blocks=40, chunk_size=32, max_num_batched_tokens=64))
    plant(engine)
    with suppress(EngineDied):
        healthy(engine)
    return sorted({f"{found.code} {found.name}" for found in engine.findings})


def answer_with(engine, change):
    # the hook itself answers otherwise; the lab looks at it as before
    connector = engine.scheduler.connector
    ask = type(connector).get_num_new_matched_tokens.__get__(connector)
    connector.get_num_new_matched_tokens = lambda request, computed: change(*ask(request, computed))
    connector.update_state_after_alloc = type(connector).update_state_after_alloc.__get__(connector)
    engine.request_events.wrap_hooks(connector)


def promise_more(engine):
    answer_with(engine, lambda promised, later: (promised if promised is None else promised + 999, later))


def change_promise(engine):
    answers = []

    def change(promised, later):
        answers.append(promised)
        return (promised, later) if promised is None or len(answers) % 2 else (0, False)

    answer_with(engine, change)
    engine.stored_elsewhere(prompt(64))
    engine.keep_blocks(0)
    engine.admit("z", prompt(64))
    engine.step(5)
    engine.free_blocks()


def wrong_chunk(engine):
    get = engine.cache.get

    def other(key):
        contents = get(key)
        return None if contents is None else contents[::-1]

    engine.cache.get = other


def wrong_slot(engine):
    write = engine.slots.write

    def shifted(blocks, start, contents):
        write(blocks, start, [*contents[:-1], 7] if len(contents) > 40 else contents)

    engine.slots.write = shifted


def lost_chunk(engine):
    engine.cache.get = lambda key: None


def hook_raises(engine):
    def dies(*args, **kwargs):
        raise RuntimeError("planted")

    engine.scheduler.connector.build_connector_meta = dies


def leaks(engine):
    end = engine.settle

    def settle():
        engine.connector.scheduler_adapter._finished_lookup_results["a"] = 0
        end()

    engine.settle = settle


def drop_loads(engine):
    build = engine.scheduler.connector.build_connector_meta

    def without(output):
        meta = build(output)
        meta.requests = [each for each in meta.requests if each.direction != "RETRIEVE"]
        return meta

    engine.scheduler.connector.build_connector_meta = without


def store_gap(engine):
    stored = engine.request_events.stored
    engine.request_events.stored = lambda name, tokens, start, end: stored(name, tokens, start + 32, end + 32)


FAULTS = (promise_more, change_promise, wrong_chunk, wrong_slot, lost_chunk, hook_raises, leaks, drop_loads, store_gap)
own_blocks()
with runner.quiet():
    result = {fault.__name__: codes(fault) for fault in FAULTS}
    result["nothing"] = codes(lambda engine: None)
