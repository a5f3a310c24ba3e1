"""A kv_producer, whose worker stores what its metadata say not to (0.5.6 vllm_v1_adapter.py:1152)."""

import pytest

import kvfix
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.conftest import RELEASES, Once


def cached_chunks(fixes: bool) -> list[int]:
    """A request is preempted in its decode phase. vLLM has all of its prompt, and LMCache by then half of it.

    Chunks that are cached: before, when some were evicted, and when it has ended.
    """
    from kvfix_tools.lab.engine.lab_engine import LabEngine

    if fixes:
        kvfix.apply()
    options = Options(kv_role="kv_producer", block_size=16, chunk_size=16, num_blocks=40, max_num_batched_tokens=512)
    engine = LabEngine(options)
    engine.admit("r", prompt(128), max_tokens=8)
    engine.step(3)
    before = len(engine.cache)
    engine.evict(4)
    evicted = len(engine.cache)
    engine.preempt("r")
    engine.run()
    return [before, evicted, len(engine.cache)]


@pytest.mark.parametrize("name", ["0.4.6", "0.5.6"])
@pytest.mark.parametrize("fixes", [False, True], ids=["released", "fixed"])
def test_a_resumed_request_leaves_no_hole(fixes: bool, name: str, once: Once) -> None:
    assert once(cached_chunks, RELEASES / name, fixes) == [8, 4, 8]
