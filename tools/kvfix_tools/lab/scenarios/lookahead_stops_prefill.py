"""Two tokens after the last whole block, and four MTP modules: a chunk ends before the block, the next has no token.

Others leave 16 tokens of a step's budget. The third chunk, from token 32 on, ends at token 46 of 50.
"""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import admit, budget, expect_all_ended, prompt, run, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(50)),
        budget(16),
        step(4),
        budget(64),
        run(100),
        expect_all_ended(),
    ],
    rule="LAB003",
    text="is RUNNING for ever",
    wrong={"vllm": ">=0.32"},
    needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
    not_in_hooks=REQUEST,
    options=Options(
        connector="mp",
        block_size=16,
        chunk_size=16,
        max_num_batched_tokens=64,
        states=True,
        drafter="mtp",
        drafts=4,
        acceptance=50,
    ),
)
