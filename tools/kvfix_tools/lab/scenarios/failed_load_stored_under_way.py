"""A load fails while the next step is in flight, and what that step computes on top of it is stored for others.

With asynchronous scheduling a step is scheduled before the answer of the last one is there. 128 tokens are promised of
320, 64 are computed in a step: the load brings none, and the second step stores what it has computed after the first.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, fail_load, prompt, reset_prefix_cache, run, settle, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(128)),
        fail_load("first"),
        admit("first", prompt(320)),
        run(),
        reset_prefix_cache(),
        admit("r", prompt(324), max_tokens=4),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    wrong={"vllm": ">=0.11.2"},
    # before 0.4.1 LMCache dies of such a request (KVF008)
    needs={"lmcache": ">=0.4.1"},
    options=Options(max_num_batched_tokens=64, async_scheduling=True),
)
