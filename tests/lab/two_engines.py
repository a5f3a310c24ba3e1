"""A load that fails beside a request that shares its blocks; alone, and with another engine in the process."""

import kvfix
from kvfix_tools.lab import runner, scenario
from kvfix_tools.lab.options import Options

with runner.quiet():
    from kvfix_tools.lab.world import World

OPTIONS = Options(block_size=16, chunk_size=16, num_blocks=40, max_num_batched_tokens=512)


def until_its_load_failed() -> World:
    """Of a prompt whose load fails, `sharing` has 64 tokens in vLLM's cache, by then none in LMCache, and computes the
    rest in the same step. The worker leaves that save out, and vLLM takes it back to token 64."""
    world = World(OPTIONS)
    world.admit("first", scenario.prompt(160))
    world.run()
    world.reset_prefix_cache()
    world.admit("before", scenario.prompt(64))
    world.run()
    world.fail_load("failing")
    world.take_blocks(OPTIONS.num_blocks - 6)
    world.admit("failing", scenario.prompt(160))
    world.step()
    world.evict(6, forced=True)
    world.free_blocks()
    world.admit("sharing", scenario.prompt(112))
    while not world.counts["loads_failed"]:
        world.step()
    return world


def end(world: World) -> list[str]:
    world.run()
    world.settle()
    return [str(found) for found in world.findings]


def play(between: bool) -> list[str]:
    """What is found in the first; the other has a request of the same name, whose load fails too."""
    kvfix.apply()
    try:
        one = until_its_load_failed()
        if between:
            other = World(OPTIONS)
            other.stored_elsewhere(scenario.prompt(64))
            other.fail_load("sharing")
            other.admit("sharing", scenario.prompt(112))
            other.run()
            assert other.counts["loads_failed"]
        return end(one)
    finally:
        kvfix.revert()
