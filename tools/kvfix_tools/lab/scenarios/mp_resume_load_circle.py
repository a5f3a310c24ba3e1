"""A preempted request is resumed with a load that fails: it is looked up and loaded in a circle, and never runs."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import admit, expect_all_ended, fail_load, free_blocks, keep_blocks, preempt, prompt, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(140), max_tokens=8),
        step(6),
        preempt("r"),
        keep_blocks(0),  # vLLM's own prefix cache has none of it when it comes back
        step(),
        free_blocks(),
        *[fail_load("r"), step()] * 40,
        expect_all_ended(),
    ],
    rule="LAB003",
    not_in_hooks=REQUEST,
    wrong={"lmcache": ">=0.5.6"},
    needs={"lmcache": ">=0.4.5"},
    options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256),
)
