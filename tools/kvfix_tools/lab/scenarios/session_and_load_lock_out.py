"""A session has input and needs more blocks, a load is done and needs one more: each holds what the other needs.

"session" took blocks that were reserved for "r", whose load was on its way, and keeps them when its turn has ended.
"""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import add_input, admit, end_input, expect_all_ended, prompt, run, step, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(264)),
        admit("session", prompt(40, seed=1), max_tokens=12, resumable=True),
        step(),
        admit("r", prompt(264), max_tokens=2),
        step(30),
        add_input("session", prompt(48, seed=2)),
        step(30),
        end_input("session"),
        run(200),
        expect_all_ended(),
    ],
    rule="LAB009",
    not_in_hooks=REQUEST,
    wrong={"vllm": ">=0.32.0", "lmcache": ">=0.4.5"},
    needs={"lmcache": ">=0.4.5", "vllm": ">=0.32.0"},
    options=Options(connector="mp", delay=20, block_size=16, num_blocks=21, chunk_size=64, max_num_batched_tokens=256),
)
