"""A load fails, and what the step computes on top of it is stored under valid keys: others get wrong answers from it.

128 tokens are hit and promised, the load brings none of them. vLLM is told of the failed blocks and drops the output of
the request, but the step has run: it computed tokens 128 to 300 from KV that is not there, and in the same step
`wait_for_save` stores 128 to 256 of them (vllm_v1_adapter.py 0.5.6:1104-1259 does not look at the failed blocks that
`start_load_kv` has just recorded). The next request with this prompt is answered from them. No line is logged for it.
With kv_load_failure_policy "recompute" the right KV is computed and stored again a step later; the cache keeps the
chunks that it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.admit("first", prompt(128))
    world.run()
    world.reset_prefix_cache()
    world.fail_load("failing")
    world.admit("failing", prompt(300))
    world.run()
    world.reset_prefix_cache()
    world.admit("r", prompt(300))
    world.run()
    world.settle()


SCENARIO = Scenario(
    __name__,
    __doc__,
    play,
    fixes=("KVF007",),
    rule="LAB001",
    text="the step reads token 128 of",
    wrong={"lmcache": ">=0.3.9.post1"},
    # 0.3.9 does not tell vLLM that a load failed; before 0.13 vLLM has no such option, and computes it again
    needs={"lmcache": ">=0.3.9.post1", "vllm": ">=0.13.0"},
    options=Options(max_num_batched_tokens=512, kv_load_failure_policy="fail"),
)
