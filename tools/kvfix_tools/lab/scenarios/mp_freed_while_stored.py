"""A request with two stores is reported done at the end of the first: its blocks are freed while they are copied.

The first chunk is stored early and done; the last one is still being copied when the request ends.
"""

from kvfix_tools.lab.scenario import mp_scenarios
from kvfix_tools.lab.steps import admit, free_blocks, keep_blocks, prompt, run_until_finished, settle, step

SCENARIO = mp_scenarios(
    schedule=[
        admit("r", prompt(256)),
        run_until_finished("r"),
        step(),  # the worker hears of it, and answers
        keep_blocks(0),  # others take its blocks and write to them
        step(4),
        free_blocks(),
        settle(),
    ],
    rule="LAB001",
    hooks_rule="KVR009",
    text="is stored under their key",
    wrong=">=0.4.5",
    max_num_batched_tokens=16,
    delay=3,
)
