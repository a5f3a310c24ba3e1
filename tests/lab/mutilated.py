"""Plays with a fix that lacks something. What was found is in `result`."""

from dataclasses import replace

import kvfix
from kvfix.correction import before
from kvfix.fix import find
from kvfix_tools.lab import runner, scenario
from kvfix_tools.lab.options import Options
from tests.lab import two_engines

with runner.quiet():
    from kvfix_tools.lab.world import World


def with_patches(code, change, play):
    fix = find(code)
    whole = fix.patches
    object.__setattr__(fix, "patches", tuple(change(whole)))
    try:
        return [str(found) for found in play()]
    finally:
        object.__setattr__(fix, "patches", whole)


def capped():
    return runner.play(scenario.find("max-load-unaligned"), fixes=True).findings


def shared():
    kvfix.apply()
    try:
        world = two_engines.until_its_load_failed()
        return [*two_engines.end(world), "the load has failed"]
    finally:
        kvfix.revert()


def under_way():
    return runner.play(scenario.find("failed-load-stored-under-way"), fixes=True).findings


def fails_again():
    """The load of `r` fails, and would fail again when it is scheduled next."""
    kvfix.apply()
    try:
        world = World(Options(max_num_batched_tokens=512, async_scheduling=True))
        world.admit("first", scenario.prompt(192))
        world.run()
        world.reset_prefix_cache()
        world.fail_load("r")
        world.admit("r", scenario.prompt(193), max_tokens=4)
        world.step()
        world.step()
        world.fail_load("r")
        world.run()
        world.settle()
        return [*world.findings, *(["a load has failed"] * world.counts["loads_failed"])]
    finally:
        kvfix.revert()


def without(function):
    return lambda patches: [patch for patch in patches if not patch.function.endswith(function)]


def failing(patches):
    return [replace(patch, correct=lambda module: before(lambda impl, *_: None, when="nobody")) for patch in patches]


def whole(patches):
    return patches


result = {
    "KVF003": with_patches("KVF003", whole, capped),
    "KVF003 fails": with_patches("KVF003", failing, capped),
    "KVF007": with_patches("KVF007", whole, shared),
    "KVF007 without who notes it": with_patches("KVF007", without("_update_requests_with_invalid_blocks"), shared),
    "KVF007 without its memory": with_patches("KVF007", without("get_block_ids_with_load_errors"), under_way),
    "KVF205": with_patches("KVF205", whole, fails_again),
    "KVF205 without the lookup": with_patches("KVF205", without("get_num_new_matched_tokens"), fails_again),
    # Last: it leaves notes.
    "KVF007 without what follows": with_patches("KVF007", without("build_connector_meta"), shared),
}
