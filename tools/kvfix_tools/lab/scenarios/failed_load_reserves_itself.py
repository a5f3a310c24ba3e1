"""A load failed, the request is to be loaded again: vLLM keeps blocks back for it, from itself, and it never starts.

vLLM admits a load only if the free blocks are more than all prefills in flight still need (scheduler.py 0.32.0:1249).
A request whose load failed gives its blocks back and stays among them.
"""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import (
    admit,
    expect_all_ended,
    fail_load,
    free_blocks,
    keep_blocks,
    preempt,
    prompt,
    run,
    step,
)

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(140), max_tokens=8),
        step(6),
        preempt("r"),
        keep_blocks(0),  # vLLM's own prefix cache has none of it when it comes back
        step(),
        free_blocks(),
        fail_load("r"),
        run(200),
        expect_all_ended(),
    ],
    rule="LAB003",
    not_in_hooks=REQUEST,
    wrong={"vllm": ">=0.26.0", "lmcache": ">=0.5.6"},
    needs={"lmcache": ">=0.4.5"},
    options=Options(connector="mp", block_size=16, num_blocks=16, chunk_size=64, max_num_batched_tokens=256),
)
