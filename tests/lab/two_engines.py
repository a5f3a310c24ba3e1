"""A load that fails while another request shares its blocks; alone, and with another engine in the process."""

import kvfix
from kvfix_tools.lab import runner
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt

with runner.quiet():
    from kvfix_tools.lab.lab_engine import LabEngine

OPTIONS = Options(block_size=16, chunk_size=16, num_blocks=40, max_num_batched_tokens=512)


def until_its_load_failed() -> LabEngine:
    """Of a prompt whose load fails, `sharing` has 64 tokens in vLLM's cache, by then none in LMCache, and computes the
    rest in the same step. The worker leaves that save out, and vLLM takes it back to token 64."""
    engine = LabEngine(OPTIONS)
    engine.admit("first", prompt(160))
    engine.run()
    engine.reset_prefix_cache()
    engine.admit("before", prompt(64))
    engine.run()
    engine.fail_load("failing")
    engine.take_blocks(OPTIONS.num_blocks - 6)
    engine.admit("failing", prompt(160))
    engine.step()
    engine.evict(6, forced=True)
    engine.free_blocks()
    engine.admit("sharing", prompt(112))
    while not engine.counts["loads_failed"]:
        engine.step()
    return engine


def end(engine: LabEngine) -> list[str]:
    engine.run()
    engine.settle()
    return [str(found) for found in engine.findings]


def play(between: bool) -> list[str]:
    """What is found in the first; the other has a request of the same name, whose load fails too."""
    kvfix.apply()
    try:
        one = until_its_load_failed()
        if between:
            other = LabEngine(OPTIONS)
            other.stored_elsewhere(prompt(64))
            other.fail_load("sharing")
            other.admit("sharing", prompt(112))
            other.run()
            assert other.counts["loads_failed"]
        return end(one)
    finally:
        kvfix.revert()
