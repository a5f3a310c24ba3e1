"""A preempted request goes on, is left out of a step, and computes in blocks that it has used already.

Tracker and worker keep the same list of the blocks that it came back with, and both have added those of its tokens 256
to 384. When it joins the batch again the worker takes its blocks from there: tokens 384 to 512 go where 256 to 384 are.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, budget, preempt, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("other", prompt(1, seed=1), max_tokens=20),
        budget(129),
        admit("r", prompt(520)),
        step(),
        preempt("r"),
        step(2),
        budget(1),  # the other one has it
        step(),
        budget(129),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    text="the step reads token 256 of 512",
    wrong={"lmcache": ">=0.3.10"},
    options=Options(max_num_batched_tokens=129),
)
