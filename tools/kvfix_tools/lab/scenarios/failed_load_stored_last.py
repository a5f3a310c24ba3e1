"""A load fails with speculative decoding on: vLLM has taken the failed blocks by the time the step is saved.

With a drafter vLLM defers `wait_for_save` until the drafts are made, and asks for the failed blocks before that
(gpu_model_runner.py 0.32.0:4179, 4509). `failing` and `sharing` begin in the same step with the same 128 tokens, whose
load brings none; both compute the rest of their prompts on top of them, and both are saved.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, fail_load, prompt, reset_prefix_cache, run, settle, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(128)),
        fail_load("failing"),
        admit("failing", prompt(300)),
        admit("sharing", prompt(260)),
        run(),
        reset_prefix_cache(),
        admit("r", prompt(300)),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    text="the step reads token 128 of",
    wrong={"lmcache": ">=0.3.9.post1"},
    needs={"lmcache": ">=0.4.1"},  # before, LMCache dies of such a request (KVF008)
    options=Options(max_num_batched_tokens=1024, save_last=True),
)
