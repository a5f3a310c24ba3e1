"""A load fails with speculative decoding on: vLLM has taken the failed blocks by the time the step is saved.

With a drafter vLLM defers `wait_for_save` until the drafts are made, and asks for the failed blocks before that
(gpu_model_runner.py 0.32.0:4179, 4509). `failing` and `sharing` begin in the same step with the same 128 tokens, whose
load brings none; both compute the rest of their prompts on top of them, and both are saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import Scenario, prompt

if TYPE_CHECKING:
    from kvfix_tools.lab.world import World


def play(world: World) -> None:
    world.stored_elsewhere(prompt(128))
    world.fail_load("failing")
    world.admit("failing", prompt(300))
    world.admit("sharing", prompt(260))
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
    needs={"lmcache": ">=0.4.1"},  # before, LMCache dies of such a request (KVF008)
    options=Options(max_num_batched_tokens=1024, save_last=True),
)
