"""A preempted request goes on, its tracker takes blocks of other tokens for its last ones, and stores their KV.

Tracker and worker keep the same list of the blocks that it came back with. Both add those of the third step; in the
fourth, tokens 384 to 512 are taken to be where 256 to 384 are.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, preempt, prompt, reset_prefix_cache, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("preempted", prompt(520)),
        step(),
        preempt("preempted"),
        run(),
        reset_prefix_cache(),
        admit("r", prompt(520)),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    text="the step reads token 384 of",
    wrong={"lmcache": ">=0.3.11"},  # before, what is stored has tokens missing too, and is never asked for (KVF002)
    options=Options(max_num_batched_tokens=128),
)
